"""Other processes write, too: behind a barrier, a collective or a store, a loop sees what they wrote before it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives, rpc
from torch.distributed import distributed_c10d as c10d
from torch.fx import Graph, GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxlib
from fxlib.errors import FxlibError, FxlibWarning
from fxlib.pipeline import trainers as trainers_module
from fxlib.pipeline.watch import WATCH
from fxlib.runtime import CapturedModule, ops
from fxlib.wire import OpaqueRRef
from tests.random_programs import simulation
from tests.random_programs.simulation import World, simulated
from tests.random_programs.trainings import look_up_table


class Fixed(nn.Module):
    """Reads what no push of its own writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + rpc.rpc_sync("ps0", simulation.count, args=(x,))


class Trained(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + rpc.rpc_sync("ps0", look_up_table, args=(x,))


@pytest.fixture
def ranks() -> Iterator[None]:
    """This process is one of two ranks; collectives return at once."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    distributed.destroy_process_group()


def captured(module: nn.Module) -> CapturedModule:
    found = fxlib.capture(module)
    assert isinstance(found, CapturedModule)
    return found


def batches() -> list[torch.Tensor]:
    return [torch.full((2, 4), float(place)) for place in range(6)]


def another_process_writes(world: World) -> None:
    """Change a server's state by no call of this process."""
    state = world.states["ps0"]
    state["count"] = state["count"] + 1


def seen(module: nn.Module, world: World, synchronize: Callable[[], Any]) -> list[torch.Tensor]:
    """Return what each step of a loop sees, in which another process writes before both synchronize."""
    found = []
    for batch in fxlib.pipeline(batches(), module):
        found.append(module(batch))
        another_process_writes(world)
        synchronize()
    return found


def check_fresh(synchronize: Callable[[], Any]) -> None:
    with simulated(3) as world:
        plain = seen(Fixed(), world, synchronize)
    module = captured(Fixed())
    with simulated(3) as world:
        ahead = seen(module, world, synchronize)
    for one, other in zip(plain, ahead, strict=True):
        assert torch.equal(one, other)


def test_without_a_synchronization_a_read_ahead_may_have_come_before_what_another_process_writes() -> None:
    with pytest.raises(AssertionError):
        check_fresh(lambda: None)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "synchronize",
    [
        distributed.barrier,
        lambda: distributed.all_reduce(torch.ones(1)),
        lambda: distributed.all_reduce(torch.ones(1), async_op=True).wait(),
        lambda: distributed.broadcast(torch.ones(1), src=1),
        lambda: distributed.recv(torch.ones(1), src=1),
        lambda: _functional_collectives.all_reduce(torch.ones(1), "sum", c10d.GroupName("0")).add_(0),
    ],
    ids=["barrier", "all_reduce", "asynchronous", "broadcast", "recv", "functional"],
)
def test_what_others_wrote_before_a_collective_is_seen_behind_it(synchronize: Callable[[], Any]) -> None:
    check_fresh(synchronize)


def test_what_others_wrote_before_they_set_a_key_of_a_store_is_seen_behind_it() -> None:
    store = distributed.HashStore()

    def synchronize() -> None:
        other = threading.Thread(target=store.set, args=("written", "1"))
        other.start()
        store.wait(["written"])
        other.join()

    check_fresh(synchronize)


@pytest.mark.usefixtures("ranks")
def test_collectives_of_a_backward_leave_what_was_read_ahead() -> None:
    class Averaged(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, *gradients: torch.Tensor) -> Any:
            distributed.all_reduce(gradients[0])
            return gradients[0]

    module = captured(Fixed())
    loop = fxlib.pipeline(batches(), module)
    weight = torch.ones(2, 4, requires_grad=True)
    with simulated(3):
        for batch in loop:
            (module(batch) * Averaged.apply(weight)).sum().backward()  # type: ignore[no-untyped-call]
    assert loop.taken == len(batches()) - 1


def test_nothing_of_torch_stays_replaced_when_the_loop_is_over() -> None:
    methods = [(distributed.Store, "get"), (distributed.Work, "wait"), (distributed.ProcessGroup, "barrier")]
    before = [getattr(owner, name) for owner, name in methods]
    module = captured(Fixed())
    with simulated(3):
        loop = iter(fxlib.pipeline(batches(), module))
        next(loop)
        assert [getattr(owner, name) for owner, name in methods] != before
        del loop
    assert not WATCH.is_watching
    assert [getattr(owner, name) for owner, name in methods] == before


class Agent:
    """An RPC agent that knows these workers, the first of which is this process."""

    is_static_group = True

    def __init__(self, *names: str) -> None:
        self._infos = [mock.Mock() for _ in names]
        for info, name in zip(self._infos, names, strict=True):
            info.name = name

    def get_worker_infos(self) -> list[mock.Mock]:
        return self._infos

    def get_worker_info(self) -> mock.Mock:
        return self._infos[0]


def reads_behind_pushes(*workers: str, trainers: int | None = None) -> bool:
    """Return whether reads of what pushes write ran ahead, in a job with these workers of RPC."""
    module = captured(Trained())
    with (
        simulated(3),
        mock.patch.object(trainers_module, "rpc") as told,
    ):
        told.api._get_current_rpc_agent.return_value = Agent(*workers)
        loop = fxlib.pipeline(batches(), module, trainers=trainers)
        for batch in loop:
            module(batch).sum().backward()
            fxlib.push_gradients(module)
    return loop.taken > 0


@pytest.mark.slow
def test_a_worker_that_the_module_does_not_call_counts_as_a_trainer_until_the_loop_says_otherwise() -> None:
    assert reads_behind_pushes("trainer0", "ps0")
    with pytest.warns(FxlibWarning, match=r"does not call trainer1, which may train.*trainers=1"):
        assert not reads_behind_pushes("trainer0", "ps0", "trainer1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reads_behind_pushes("trainer0", "ps0", "evaluator", trainers=1)
        assert not reads_behind_pushes("trainer0", "ps0", trainers=2)


def test_a_trainer_that_joins_counts_from_then_on_and_what_was_read_before_is_read_again() -> None:
    module = captured(Trained())
    agent = Agent("trainer0", "ps0")
    agent.is_static_group = False
    taken = []
    with simulated(3), mock.patch.object(trainers_module, "rpc") as told, warnings.catch_warnings(action="ignore"):
        told.api._get_current_rpc_agent.return_value = agent
        loop = fxlib.pipeline(batches(), module)
        for place, batch in enumerate(loop):
            if place == 3:
                agent.get_worker_infos().append(mock.Mock())
                agent.get_worker_infos()[-1].name = "trainer1"
            module(batch).sum().backward()
            taken.append(module._fxlib.ahead.taken)  # type: ignore[union-attr]
            fxlib.push_gradients(module)
    assert taken == [0, 1, 2, 2, 2, 2]


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = OpaqueRRef("table", "ps1", here=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_server_that_the_module_reaches_by_an_rref_is_one_that_it_calls() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(ops.remote_call, ("ps0", "m:f", (x,), {}, None))
    graph.call_function(ops.remote_call, (graph.get_attr("table"), ".read", (x,), {}, None))
    graph.output(x)
    assert trainers_module.servers_of(GraphModule(Held(), graph)) == {"ps0", "ps1"}


def test_a_loop_within_a_loop_leaves_the_outer_one_its_number_of_trainers() -> None:
    module = captured(Trained())
    with simulated(3):
        outer = fxlib.pipeline(batches(), module, trainers=2)
        for batch in outer:
            with torch.no_grad():
                for other in fxlib.pipeline(batches()[:2], module):
                    module(other)
            module(batch).sum().backward()
            fxlib.push_gradients(module)
    assert outer.taken == 0


def test_a_loop_has_at_least_one_trainer() -> None:
    with pytest.raises(FxlibError, match="trainers=0"):
        fxlib.pipeline([], nn.Identity(), trainers=0)
