"""A long training leaves nothing behind, in the trainer or on the servers, but what it learned."""

from __future__ import annotations

import time
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import Server, Table, Workload, ps
from fxlib.runtime.ops import send_gradient
from fxlib.runtime.tracking.flow_control import DEADLINES
from tests.runtime.gradients.pushing import messages
from tests.runtime.remote_functions import living, start_threads
from tests.shared.rpc_world import rpc_world

_NAMES = ("ps0", "ps1")
_TABLES = tuple(Table(name=name, rows=50, dim=4, optimizer="adagrad") for name in "abcd")


class Clicks(nn.Module):
    """Four lookups from each of two servers, and work that takes them up at different times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in _TABLES)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for table, layer in zip(_TABLES, self.layers, strict=True):
            for server in _NAMES:
                x = x + cast(torch.Tensor, rpc.rpc_sync(server, ps.lookup, args=(table.name, ids)))
            x = layer(x).tanh()
        return x


def _alive() -> list[tuple[int, int]]:
    return [living(), *(rpc.rpc_sync(name, living) for name in _NAMES)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hundreds_of_steps_leave_no_tensors_threads_or_messages_behind() -> None:
    with rpc_world(*(Server(name=name, tables=_TABLES) for name in _NAMES)):
        torch.manual_seed(0)
        workload = Workload(batches=[(torch.randn(8, 4), torch.randint(50, (8,)))], mode="local")
        module = fxlib.optimize(fxlib.capture(Clicks()), workload=workload)
        assert any(node.target is send_gradient for node in module.graph.nodes)
        optimizer = torch.optim.Adam(module.parameters())

        def train(steps: int) -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                module(torch.randn(8, 4), torch.randint(50, (8,))).square().sum().backward()
                optimizer.step()
                fxlib.push_gradients(module)

        train(50)  # threads of the RPC layer start as they are needed
        for name in _NAMES:
            rpc.rpc_sync(name, start_threads)
        with messages() as sent:
            train(1)
        assert len(sent) < 2 * 2 * len(_TABLES)  # reads travel together, and so do pushes
        before = _alive()
        train(300)
        after = _settled(before)
    assert after == before
    assert DEADLINES.in_flight == 0


def _settled(expected: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is alive once it is as expected, or after a while: RPC lets go of messages in its own time."""
    for _ in range(1000):
        if (found := _alive()) == expected:
            break
        time.sleep(0.05)
    return found
