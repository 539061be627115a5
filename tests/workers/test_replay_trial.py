"""Trials of jobs whose remote functions nobody but the job has: answered from a profile, in real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule

import fxlib
from fxlib import recipes, wire
from fxlib.profiles import Opaque, Profile
from fxlib.protocol import workload_to_proto
from fxlib.reasons import Reason
from fxlib.runtime import issue_batch
from fxlib.workload import RemoteObject, Workload
from tests.workers import remote_code
from tests.workers.weighed import ROWS, Weighed, recorded, weighed_profile, workload
from workers.config import TrialSettings
from workers.trial.arms import ORIGINAL
from workers.trial.bits import digest_all
from workers.trial.cluster import connected
from workers.trial.failures import TrialError
from workers.trial.trainer import Material, Trace
from workers.trial.world import World

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

CANDIDATE = "candidate"
SETTINGS = TrialSettings(process_memory_bytes=1 << 30)


@pytest.fixture(scope="module", autouse=True)
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = Path("/tmp") / f"fxlib-replay-{tmp_path_factory.getbasetemp().name[-6:]}"  # noqa: S108 - a socket's path is short
    path.mkdir()
    with connected(SETTINGS, path):
        yield


@contextmanager
def world(
    model: nn.Module, workload: Workload, profile: Profile | None, candidate: Callable[[GraphModule], GraphModule]
) -> Iterator[World]:
    """A trial's processes with the original and one candidate."""
    encoded = workload_to_proto(workload)
    graph = wire.serialize(wire.encode(fxlib.capture(model)).graph)
    material = Material(original=graph, workload=encoded.message.SerializeToString(), blobs=dict(encoded.blobs))
    rewritten = candidate(wire.decode(wire.parse(graph)))
    with World(workload, material, SETTINGS, lambda: False, profile) as made:
        made.prepare()
        made.admit(CANDIDATE, wire.serialize(wire.encode(rewritten).graph), {})
        yield made


def scheduled(graph: GraphModule) -> GraphModule:
    return recipes.apply(graph, "schedule").module


def traces(made: World, arm: str, steps: int = 3) -> Sequence[Trace]:
    made.ask(made.trainers[:1], "reset", timeout_s=30)
    return [made.ask(made.trainers[:1], "trace", arm, step, timeout_s=30)[0] for step in range(steps)]


def seconds(made: World, arm: str, steps: int = 10) -> float:
    return float(made.ask(made.trainers, "block", arm, steps, timeout_s=30)[0])


class Stale(nn.Module):
    """A read, a write of what it reads, and the read again; or, wrongly, both reads before the write."""

    def __init__(self, *, stale: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stale = stale

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", remote_code.weigh, args=(rows,))
        if self.stale:
            second = rpc.rpc_sync("ps0", remote_code.weigh, args=(rows,))
        rpc.rpc_sync("ps0", remote_code.learn, args=(rows, rows))
        if not self.stale:
            second = rpc.rpc_sync("ps0", remote_code.weigh, args=(rows,))
        return self.linear(x) + first + second


class Attached(nn.Module):
    """A read that distributed autograd sends a gradient home to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", remote_code.double, args=(rows.long(),))
        second = rpc.rpc_sync("ps1", remote_code.double, args=(rows.long(),))
        return self.linear(x) * first + second


class Created(nn.Module):
    """A result that stays on its server until it is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        made = rpc.remote("ps0", remote_code.learn, args=(rows, rows))
        return self.linear(x) + made.to_here()


class Objects(nn.Module):
    """Methods of objects behind RRefs, of which nobody has the class of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rows: torch.Tensor, near: object, far: object) -> torch.Tensor:
        a = near.rpc_sync().forward(x)  # type: ignore[attr-defined]
        b = far.rpc_sync().forward(x)  # type: ignore[attr-defined]
        return self.linear(x) + a + b


def test_a_schedule_is_the_same_as_its_original_and_faster() -> None:
    with world(Weighed(), workload(), weighed_profile(), scheduled) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        replayed = "server ps0: writes that were replayed"
        assert before[0][replayed] != before[1][replayed]
        blocks = [(seconds(made, ORIGINAL), seconds(made, CANDIDATE)) for _ in range(2)]
        assert all(after < 0.9 * original for original, after in blocks)
        assert min(original for original, _ in blocks) > 10 * (3 * 0.01 + 3 * 0.005)


def test_trainers_that_share_a_replayed_server_wait_for_each_other_there() -> None:
    recorded_ = weighed_profile()
    one_at_once = tuple(replace(server, concurrency=1) for server in recorded_.servers)
    with world(Weighed(), workload(trainers=2), replace(recorded_, servers=one_at_once), scheduled) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        alone_s = min(made.ask(made.trainers[:1], "block", CANDIDATE, 5, timeout_s=30)[0] for _ in range(2))
        together_s = made.ask(made.trainers, "block", CANDIDATE, 5, timeout_s=30)
        assert min(together_s) > 1.3 * alone_s  # overlapped, the calls to one server are most of a step
        assert made.ask(made.trainers[:1], "profile", 0.5, timeout_s=60)[0].servers[0].concurrency == 1


def test_calls_in_one_message_are_answered_as_single_ones() -> None:
    def batched(graph: GraphModule) -> GraphModule:
        module = recipes.apply(graph, "schedule", profile=weighed_profile(per_item_s=0.0)).module
        assert any(node.target is issue_batch for node in module.graph.nodes)
        return module

    with world(Weighed(), workload(), weighed_profile(per_item_s=0.0), batched) as made:
        assert traces(made, ORIGINAL) == traces(made, CANDIDATE)


def test_what_is_created_on_a_server_is_fetched_as_recorded() -> None:
    profile = Profile(calls=(recorded("fetch", "fetch", "ps0"),))
    with world(Created(), workload(), profile, scheduled) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        assert before[0]["output"] != traces(made, ORIGINAL, 2)[1]["output"]


def test_a_read_that_a_write_was_moved_before_shows() -> None:
    name = "tests.workers.remote_code"
    profile = Profile(
        calls=(
            recorded("weigh", f"{name}:weigh", "ps0"),
            recorded("weigh_1", f"{name}:weigh", "ps0"),
            recorded("learn", f"{name}:learn", "ps0", returns=Opaque()),
        )
    )
    wrong = lambda _: fxlib.capture(Stale(stale=True))  # noqa: E731 - the world asks for a rewrite
    with world(Stale(stale=False), workload(), profile, wrong) as made:
        original, candidate = traces(made, ORIGINAL, 1), traces(made, CANDIDATE, 1)
        assert original == traces(made, ORIGINAL, 1)
        assert original[0]["output"] != candidate[0]["output"]


def test_gradients_come_home_under_distributed_autograd_and_are_compared() -> None:
    rows = replace(ROWS, requires_grad=True)
    name = "tests.workers.remote_code:double"
    profile = Profile(
        calls=tuple(recorded(call, name, to, returns=rows) for call, to in (("double", "ps0"), ("double_1", "ps1")))
    )
    with world(Attached(), workload(mode="distributed"), profile, scheduled) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        nothing = digest_all({})
        assert {before[0]["gradients on server ps0"], before[0]["gradients on server ps1"]}.isdisjoint({nothing})
        written = [each["server ps0: writes that were replayed"] for each in before]
        assert len(set(written)) == len(written)


def test_methods_of_objects_are_answered_beside_real_ones() -> None:
    rrefs = {
        "near": RemoteObject(owner="ps0", cls="torch.nn:Linear", args=(4, 4)),
        "far": RemoteObject(owner="ps1", cls="tests.workers.remote_code:Scale", kwargs={"width": 4}),
    }
    profile = Profile(
        calls=(recorded("forward", ".forward", "ps0"), recorded("forward_1", ".forward", "ps1", seconds=0.02))
    )
    asked = workload(rrefs=rrefs, assume="reads")
    with world(Objects(), asked, profile, lambda graph: recipes.apply(graph, assume="reads").module) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        assert "server ps0: object 'near'" in before[0]
        assert "server ps1: object 'far'" not in before[0]


def test_servers_that_only_the_profile_knows_are_started() -> None:
    with world(Weighed(), workload(servers=()), weighed_profile(), scheduled) as made:
        before = traces(made, ORIGINAL)
        assert before == traces(made, CANDIDATE)
        assert {"server ps0: writes that were replayed", "server ps1: writes that were replayed"} <= before[0].keys()


def test_what_nobody_can_answer_is_named_with_a_way_out() -> None:
    with pytest.raises(TrialError) as caught, world(Weighed(), workload(), None, lambda graph: graph):
        pass
    assert caught.value.reason is Reason.NO_SERVER
    assert "fxlib.profile" in caught.value.detail
