"""A step that ends before its push, wherever and however: servers hold what they hold in the program by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import Server, ps
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import send_gradient
from tests.runtime.by_hand import SERVERS, TABLES, WHERE, ByHand, Clicks
from tests.shared.rpc_world import rpc_world


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with rpc_world(*(Server(name=name, tables=TABLES) for name in SERVERS)):
        yield


@dataclass
class Points:
    """The points of a step, of which one may raise."""

    at: int = -1
    error: type[BaseException] = RuntimeError
    passed: int = field(default=0, init=False)

    def __call__(self, *_: object) -> None:
        self.passed += 1
        if self.passed == self.at:
            raise self.error("here")


def step(module: nn.Module, number: int, points: Points, push: Callable[[], None]) -> None:
    """Run one step, which passes points in forward, in backward, and around each statement."""
    torch.manual_seed(number)
    x, ids = torch.randn(3, 4), torch.randint(20, (3,))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    hooks = [each.register_hook(points) for each in list(module.parameters())[:1]]
    try:
        points()
        loss = module(x, ids).square().mean()
        points()
        (loss * (math.nan if points.at == 0 else 1.0)).backward()
        points()
        if not all(bool(each.grad.isfinite().all()) for each in module.parameters() if each.grad is not None):
            raise FloatingPointError("a gradient is not finite")
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        points()
        optimizer.step()
        points()
        push()
        points()
    finally:
        optimizer.zero_grad()
        for each in hooks:
            each.remove()


def trained(module: nn.Module, push: Callable[[], None], drop: Callable[[], None], points: Points) -> list[object]:
    """Run a whole step, one that ends early, and a whole one; return every bit of servers and weights after each."""
    for server in SERVERS:
        rpc.rpc_sync(server, ps.reset, args=(0,))
    found: list[object] = []
    first = {name: each.clone() for name, each in module.state_dict().items()}
    for number, passing in enumerate((Points(), points, Points())):
        try:
            step(module, number, passing, push)
        except (RuntimeError, FloatingPointError, KeyboardInterrupt):
            drop()
        found += [rpc.rpc_sync(server, ps.state_digest) for server in SERVERS]
        found += [each.detach().numpy().tobytes() for each in module.parameters()]
    module.load_state_dict(first)
    return found


POINTS = 8
"""Those of a step: seven statements, and one gradient of a parameter."""


def programs() -> dict[str, tuple[nn.Module, Callable[[], None], Callable[[], None]]]:
    """Return the program by hand, as captured, and rewritten, each over weights of its own."""
    own = ByHand()
    captured, rewritten = fxlib.capture(Clicks()), fxlib.optimize(fxlib.capture(Clicks()))
    assert isinstance(rewritten, CapturedModule)
    assert sum(node.target is send_gradient for node in rewritten.graph.nodes) == len(WHERE)
    return {
        "by hand": (own, own.push, own.due.clear),
        "captured": (captured, lambda: fxlib.push_gradients(captured), lambda: fxlib.drop_gradients(captured)),
        "rewritten": (rewritten, lambda: fxlib.push_gradients(rewritten), lambda: fxlib.drop_gradients(rewritten)),
    }


@pytest.mark.slow
def test_a_step_that_ends_at_any_point_leaves_servers_and_weights_as_by_hand() -> None:
    outcomes, arms = [], programs()
    for at in range(POINTS + 1):  # at 0 none raises, and the step is skipped since its gradients are not finite
        found = {
            name: trained(*each, Points(at, (RuntimeError, KeyboardInterrupt)[at % 2])) for name, each in arms.items()
        }
        assert found["captured"] == found["by hand"], f"point {at}"
        assert found["rewritten"] == found["by hand"], f"point {at}"
        outcomes.append(found["by hand"])
    assert len({repr(each) for each in outcomes}) == 3  # nothing was done, the optimizer has stepped, all was done
