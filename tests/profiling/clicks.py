"""A model to measure, and its workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed import rpc

from fxlib import Batch, Server, Table, Workload, ps
from tests.shared.rpc_world import rpc_world

TABLES = (Table(name="clicks", rows=100, dim=4, optimizer="adagrad"),)


@contextmanager
def world(*, slow_s: float = 0.02) -> Iterator[None]:
    """Be "trainer" of two servers with a table each: "ps0" takes 2 ms for a call, "ps1" takes `slow_s`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other are all that is measured
    fast = Server(name="ps0", tables=TABLES, service_time_s=0.002)
    slow = Server(name="ps1", tables=TABLES, service_time_s=slow_s)
    with rpc_world(fast, slow):
        yield
    torch.set_num_threads(threads)


class Clicks(nn.Module):
    """Two lookups around local work of very different weight, with a buffer, a dropout, and a gradient each."""

    def __init__(self) -> None:
        super().__init__()
        self.light = nn.Linear(4, 4)
        self.heavy = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 4))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        early = rpc.rpc_sync("ps0", ps.lookup, args=("clicks", ids))
        x = self.heavy(self.light(x) + early)
        late = rpc.rpc_sync("ps1", ps.lookup, args=("clicks", ids))
        return cast(torch.Tensor, self.drop(self.norm(x)) * late)


def batch(size: int = 256) -> Batch:
    return Batch(inputs=(torch.randn(size, 4), torch.randint(100, (size,))), target=torch.randn(size, 4))


def workload() -> Workload:
    return Workload(batches=[batch(), batch()], loss="mse", optimizer="adam")


def digests() -> list[str]:
    """Of the state of both servers."""
    return [rpc.rpc_sync(name, ps.state_digest) for name in ("ps0", "ps1")]
