"""What trainings do between backward and push: bit for bit as the program by hand does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc

import fxlib
from fxlib import Server, ps
from tests.runtime.by_hand import SERVERS, TABLES, ByHand, Clicks
from tests.runtime.remote_functions import read_log, read_shared
from tests.shared.rpc_world import rpc_world

pytestmark = pytest.mark.slow

Drop = Callable[[], None]


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with rpc_world(*(Server(name=name, tables=TABLES) for name in SERVERS)):
        yield


def scaled(module: nn.Module, optimizer: torch.optim.Optimizer, push: Drop, drop: Drop) -> None:
    """Scale the loss; a step whose gradients overflow is skipped, on the servers, too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for number in range(5):
        optimizer.zero_grad()
        loss = module(*batch(number)).square().mean() * (float("inf") if number == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            drop()
        else:
            push()


def accumulated(module: nn.Module, optimizer: torch.optim.Optimizer, push: Drop, _: Drop) -> None:
    """Step and push once for three backwards, the last of them through two forwards."""
    for number in range(0, 6, 3):
        optimizer.zero_grad()
        module(*batch(number)).square().mean().backward()
        (module(*batch(number + 1)).square().mean() + module(*batch(number + 2)).mean()).backward()
        optimizer.step()
        push()


def twice(module: nn.Module, optimizer: torch.optim.Optimizer, push: Drop, _: Drop) -> None:
    """Go backward twice through one graph, and once more through a part of it."""
    for number in range(3):
        optimizer.zero_grad()
        output = module(*batch(number))
        output.square().mean().backward(retain_graph=True)
        output.sum().backward(retain_graph=True)
        output[:1].mean().backward()
        optimizer.step()
        push()


def batch(number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    return torch.randn(3, 4), torch.randint(20, (3,))


@pytest.mark.parametrize("training", [scaled, accumulated, twice])
def test_a_training_leaves_servers_and_weights_as_by_hand(training: Callable[..., None]) -> None:
    by_hand = ByHand()
    ours = (fxlib.capture(Clicks()), fxlib.optimize(fxlib.capture(Clicks())))
    arms: list[tuple[nn.Module, Drop, Drop]] = [
        (by_hand, by_hand.push, by_hand.due.clear),
        *((each, partial(fxlib.push_gradients, each), partial(fxlib.drop_gradients, each)) for each in ours),
    ]
    found: list[Any] = []
    for module, push, drop in arms:
        for server in SERVERS:
            rpc.rpc_sync(server, ps.reset, args=(0,))
        training(module, torch.optim.SGD(module.parameters(), lr=0.1), push, drop)
        states = [rpc.rpc_sync(server, ps.state_digest) for server in SERVERS]
        found.append((states, [each.detach().numpy().tobytes() for each in module.parameters()]))
    assert found[1] == found[0]
    assert found[2] == found[0]


class Shared(nn.Module):
    """A result that holds one tensor in several containers."""

    def forward(self, x: Tensor) -> Tensor:
        held: Any = rpc.rpc_sync("ps0", read_shared, args=("a", x))
        return held["one"] * 2.0 + held["several"][0] * x


def test_a_tensor_in_several_containers_of_a_result_takes_one_gradient() -> None:
    x, found = torch.tensor([1.0, 2.0]), []
    for module in (fxlib.capture(Shared()), fxlib.optimize(fxlib.capture(Shared()))):
        rpc.rpc_sync("ps0", read_log)
        module(x).sum().backward()
        fxlib.push_gradients(module)
        found.append(rpc.rpc_sync("ps0", read_log))
    gradient = torch.tensor([3.0, 4.0])
    assert found == [[f"a { ({'one': gradient, 'several': [gradient]}) }"]] * 2
