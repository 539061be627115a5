"""The whole loop for jobs whose remote functions nobody but the job has: measured in its own world, then replayed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.client import Client
from fxlib.client.result import Result
from fxlib.reasons import Reason
from fxlib.spec.workload import Server, Workload
from tests.loop import own_functions
from tests.loop.processes import Service, Worker
from tests.shared.rpc_world import rpc_world

pytestmark = pytest.mark.cluster

SERVERS = (Server(name="ps0"), Server(name="ps1"))
INPUTS = (torch.randn(8, 4), torch.arange(8))
MASK = torch.ones(4)


class Own(nn.Module):
    """Reads of two servers whose gradients are pushed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", own_functions.rows, args=(ids,))
        x = x if mask is None else x * mask
        second = rpc.rpc_sync("ps1", own_functions.rows, args=(ids,))
        third = rpc.rpc_sync("ps0", own_functions.rows, args=(ids + 1,))
        return self.linear(x) + first * second * third


def workload() -> Workload:
    """The step of `Own`, of whose servers it says nothing; it has variants without a mask, and for evaluation."""
    bare = fxlib.Variant(name="no mask", batches=[INPUTS])
    return Workload.describe([(*INPUTS, MASK)], loss="mean", evaluation=True, variants=[bare])


@dataclass(frozen=True)
class Answered:
    """A job, and its answer."""

    model: nn.Module
    workload: Workload
    result: Result


@pytest.fixture(scope="module")
def answered(service: Service, workers: list[Worker], tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """What the service says of what the job measured in its own world."""
    model, asked, path = Own(), workload(), tmp_path_factory.mktemp("own") / "own.fxp"
    with rpc_world(*SERVERS):
        fxlib.save_profile(fxlib.profile(Own(), asked), path)
    with fxlib.connect(service.address) as client:
        return Answered(model, asked, client.optimize(model, asked, profile=fxlib.load_profile(path), budget_s=24))


def test_a_job_is_measured_by_its_profile_and_gets_a_module_for_its_own_world(answered: Answered) -> None:
    result = answered.result
    assert result.reason is Reason.FASTER, result.explanation
    assert result.not_reproduced == ()
    assert "profile" not in result.phase_seconds
    assert [(call.function, call.to) for call in result.calls] == [
        ("tests.loop.own_functions:rows", to) for to in ("ps0", "ps1", "ps0")
    ]
    with rpc_world():
        assert torch.equal(result.module(*INPUTS, MASK), answered.model(*INPUTS, MASK))


def test_each_variant_is_measured_in_the_same_job_and_trains_as_the_original_does(answered: Answered) -> None:
    result, module = answered.result, answered.result.module
    assert {name: each.reason for name, each in result.variants.items()} == {
        "no mask": Reason.FASTER,
        "evaluation": Reason.FASTER,
    }
    with rpc_world():
        before = fxlib.usage(module).graphs
        captured = fxlib.capture(answered.model)
        bare = fxlib.capture(answered.model, concrete_args={"mask": None})
        captured._fxlib.graphs.add(captured, "no mask", bare)
        rewritten, blocking = (trained(each, answered.model) for each in (module, captured))
        ran = {name: count - before[name] for name, count in fxlib.usage(module).graphs.items()}
    assert ran == {"main": 2, "no mask": 2, "evaluation": 1}
    assert rewritten == blocking


def trained(module: nn.Module, model: nn.Module) -> list[bytes]:
    """Return the bits of steps with and without a mask, of an evaluation, and of what servers were sent."""
    found: list[torch.Tensor | None] = []
    model.zero_grad()
    for masked in (True, False, False, True):
        out = module(*INPUTS, *([MASK * 2] if masked else []))
        out.sum().backward()
        fxlib.push_gradients(module)
        found += [out, *(each.grad for each in model.parameters())]
        for server in SERVERS:
            found += rpc.rpc_sync(server.name, own_functions.learnt)
    module.eval()
    with torch.no_grad():
        found.append(module(*INPUTS, MASK))
    module.train()
    return [each.detach().numpy().tobytes() for each in found if each is not None]


def test_a_later_measurement_is_answered_by_the_result_of_an_earlier_one(client: Client, answered: Answered) -> None:
    with rpc_world(*SERVERS):
        anew = fxlib.profile(Own(), answered.workload)
    again = client.optimize(Own(), answered.workload, profile=anew, budget_s=24)
    assert (answered.result.cached, again.cached) == (False, True)
    assert (again.reason, again.gain) == (answered.result.reason, answered.result.gain)


def test_without_a_profile_the_original_is_kept_and_the_way_out_is_named(client: Client) -> None:
    result = client.optimize(Own(), workload(), budget_s=4)
    assert result.reason is Reason.NO_SERVER
    assert "fxlib.profile" in result.explanation
