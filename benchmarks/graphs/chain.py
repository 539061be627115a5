"""A chain of work of all kinds with a remote call in every hundred nodes, as large as asked for."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import wrap
from torch.nn import functional as F

from fxlib import ps

CALL_EVERY = 100
SERVERS = 4


class Chain(nn.Module):
    """Functions, methods, modules and writes in place; what a remote call returns joins them 50 nodes later.

    Args:
        size: nodes, inputs and output left out.
        unused_every: of how many nodes one makes a value that nobody uses; 0 for none.
    """

    def __init__(self, size: int, *, unused_every: int = 0) -> None:
        super().__init__()
        self.size, self.unused_every = size, unused_every
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        pending = x
        for place in range(self.size):
            if place % CALL_EVERY == 0:
                pending = self.rows(f"ps{place // CALL_EVERY % SERVERS}", ids)
            elif place % CALL_EVERY == CALL_EVERY // 2:
                x = x + pending
            elif self.unused_every and place % self.unused_every == 1:
                torch.exp(x)
            else:
                x = self.work(place, x)
        return x

    def rows(self, server: str, ids: torch.Tensor) -> torch.Tensor:
        """Look rows up on a server."""
        found: torch.Tensor = rpc.rpc_sync(server, ps.lookup, args=("rows", ids))
        return found

    def work(self, place: int, x: torch.Tensor) -> torch.Tensor:
        """One node."""
        if place % 5 == 0:
            return self.layers[place % 8](x)
        if place % 5 == 1:
            return x.view(-1, 4)
        if place % 5 == 2:
            return torch.add(x, x, alpha=0.5)
        return F.relu(x, inplace=True) if place % 5 == 3 else torch.tanh(x)


class StockChain(Chain):
    """The same for `symbolic_trace`, which runs remote calls where it should record them: in a function kept whole."""

    def rows(self, server: str, ids: torch.Tensor) -> torch.Tensor:
        return lookup(server, ids)


@wrap
def lookup(server: str, ids: torch.Tensor) -> torch.Tensor:
    """Make one blocking remote call."""
    found: torch.Tensor = rpc.rpc_sync(server, ps.lookup, args=("rows", ids))
    return found
