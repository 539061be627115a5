"""A model with DistributedDataParallel inside, captured where its process group is: on two ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import fxlib
from fxlib import ps, wire
from fxlib.runtime import CapturedModule
from tests.collectives.world import on_all_ranks
from tests.workers.cases import DIM


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(13, 32), nn.Linear(32, DIM), nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.second(torch.relu_(self.first(x))))
        return found


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = DistributedDataParallel(Layers(), bucket_cap_mb=1)
        self.top = DistributedDataParallel(nn.Linear(3 * DIM, 1), find_unused_parameters=True)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        rows = [rpc.rpc_sync(f"ps{i}", ps.lookup, args=(f"t{i}", sparse[:, i])) for i in range(2)]
        found: torch.Tensor = self.top(torch.cat([self.bottom(dense), *rows], 1))
        return found


def hybrid() -> CapturedModule:
    """Return the graph as a worker has it."""
    return wire.decode(wire.parse(on_all_ranks(_encoded)[0]))


def _encoded() -> bytes:
    return wire.serialize(wire.encode(fxlib.capture(Hybrid())).graph)
