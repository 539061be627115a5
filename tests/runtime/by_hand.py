"""A training with lookups, and the same program by hand: what all ways to push are held against."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from fxlib import Table, ps

WHERE = (("ps0", "a"), ("ps1", "b"), ("ps0", "c"), ("ps1", "d"))
"""Server and table of each lookup."""
SERVERS = ("ps0", "ps1")
TABLES = tuple(Table(name=name, rows=20, dim=4) for name in "abcd")


class Clicks(nn.Module):
    """Four lookups on two servers, and a layer for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in WHERE)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x.detach()
        total = x
        for (server, table), layer in zip(WHERE, self.layers, strict=True):
            rows: Tensor = rpc.rpc_sync(server, ps.lookup, args=(table, ids))
            total = total + layer(rows * x).tanh()
        return total


class ByHand(Clicks):
    """The same, as it is written without fxlib: leaves of its own, whose gradients it pushes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        total = x
        found = [rpc.rpc_sync(to, ps.lookup, args=(table, ids)).requires_grad_() for to, table in WHERE]
        self.due += [(ids, rows) for rows in found]
        for rows, layer in zip(found, self.layers, strict=True):
            total = total + layer(rows * x).tanh()
        return total

    def push(self) -> None:
        """Push forward by forward, one by one, in program order."""
        for place, (ids, rows) in enumerate(self.due):
            server, table = WHERE[place % len(WHERE)]
            rpc.rpc_sync(server, ps.push, args=(table, ids, rows.grad))
        self.due.clear()
