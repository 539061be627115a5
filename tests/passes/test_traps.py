"""What goes wrong when calls are moved without care, on real RPC: each of these has cost somebody a surprise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.recipes import recipes
from fxlib.runtime import is_issue, is_wait
from fxlib.spec.workload import Server
from tests.analysis.sketch import Sketch, names, schedule
from tests.passes import shop
from tests.shared.rpc_world import rpc_world

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with rpc_world(Server(name="ps0")):
        yield


class WritesItsArgument(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = rpc.rpc_sync("ps0", shop.slow_double, (x,))
        x.view(-1)[0] = 100.0
        return doubled + x


def test_a_write_through_a_view_does_not_reach_an_argument_in_flight() -> None:
    scheduled = fxlib.optimize(fxlib.capture(WritesItsArgument()))
    for _ in range(5):
        x = torch.ones(16)
        assert torch.equal(scheduled(x)[1:], torch.full((15,), 3.0))
        assert scheduled(torch.ones(16))[0] == 102.0


class PushesThenPulls(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rpc.rpc_sync("ps0", shop.push, (x,))
        pulled = rpc.rpc_sync("ps0", shop.pull)
        rpc.rpc_sync("ps0", shop.push_unknown, (x.sin() - x.sin(),))
        return pulled + rpc.rpc_sync("ps0", shop.pull_unknown) + x.cos() * 0


def test_a_pull_sees_the_push_before_it() -> None:
    scheduled = fxlib.optimize(fxlib.capture(PushesThenPulls()))
    first = rpc.rpc_sync("ps0", shop.pull)
    for step in range(1, 60):
        assert torch.equal(scheduled(torch.ones(4)), 2 * (first + step))


def test_a_push_that_nobody_waits_for_outlives_dead_code() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    program.issue("pushed", x, contract=None)
    program.work("unused", torch.sin, x)
    assert schedule(program.returns(x)) == ["pushed"]


def test_random_operators_and_writes_outlive_dead_code() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    program.work("noise", torch.rand_like, x)
    program.work("written", "add_", x, 1)
    program.work("looked_up", torch.gather, x, 0, x)
    program.work("sized", "size", x)
    assert names(recipes.apply(program.returns(x)).module) == ["noise", "written", "looked_up"]


def test_every_future_is_waited_for_once() -> None:
    """Distributed autograd would wait forever for the gradient of a result that was never taken."""
    program = Sketch("x", "ids")
    x, ids = program.inputs
    program.call("unused", ids)
    module = program.returns(program.work("dense", torch.sin, x), program.call("used", ids))
    nodes = list(recipes.apply(module).module.graph.nodes)
    issued = [node for node in nodes if is_issue(node)]
    assert issued
    assert all([is_wait(user) for user in node.users] == [True] for node in issued)


class UsesOneTensorFourTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        found = rpc.rpc_sync("ps0", shop.slow_double, (self.branches[3](x).detach(),))
        return sum((branch(x) * 3**place for place, branch in enumerate(self.branches)), found)


def test_gradients_are_added_up_in_the_programs_order() -> None:
    model = UsesOneTensorFourTimes()
    original = fxlib.capture(model)
    scheduled = fxlib.optimize(original)
    assert scheduled is not original
    verified = fxlib.verify(original, scheduled, [torch.randn(8, 16, requires_grad=True)])
    assert verified, str(verified)
