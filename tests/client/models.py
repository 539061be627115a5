"""A small model that calls a parameter server, and its step."""

import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import Server, Table, Workload, ps


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(8, 8)
        self.top = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.bottom(x)
        rows = rpc.rpc_sync("ps0", ps.lookup, args=("clicks", ids))
        return self.top(x + rows)


def workload() -> Workload:
    batches = [(torch.randn(4, 8), torch.randint(100, (4,))) for _ in range(2)]
    servers = [Server(name="ps0", tables=(Table(name="clicks", rows=100, dim=8),))]
    return Workload.describe(batches, servers=servers)


def made() -> tuple[nn.Module, Workload]:
    """A factory, as `fxlib optimize` takes it."""
    return fxlib.capture(Clicks()), workload()
