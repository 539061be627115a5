"""The recommendation step that every arm runs: remote lookups, two towers, and the plain blocking program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.rpc import rpc_sync

from benchmarks.grid.cells import MOST_LOOKUPS, Cell
from fxlib import ps
from fxlib.spec.workload import Server, Table

DENSE, DIM, ROWS, BATCH = 13, 32, 1000, 128


def server_name(table: int, servers: int) -> str:
    """Name of the server that holds a table."""
    return f"ps{table % servers}"


def served(servers: int) -> tuple[Server, ...]:
    """One table for each lookup, dealt to the servers in turn."""
    tables = [Table(name=f"table{i}", rows=ROWS, dim=DIM) for i in range(MOST_LOOKUPS)]
    return tuple(Server(name=f"ps{rank}", tables=tables[rank::servers]) for rank in range(servers))


class Towers(nn.Module):
    """The local part: a tower over dense features, and one over it and all looked-up vectors."""

    def __init__(self, lookups: int, hidden: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(DENSE, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, DIM),
        )  # fmt: skip
        self.top = nn.Sequential(
            nn.Linear((lookups + 1) * DIM, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )


class Blocking(nn.Module):
    """As a user writes it: each lookup where it is needed, one after another."""

    def __init__(self, towers: Towers, cell: Cell) -> None:
        super().__init__()
        self.towers, self.cell = towers, cell

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        vectors = self.vectors(sparse)
        return interact(self.towers, self.towers.bottom(dense), vectors)

    def vectors(self, sparse: Tensor) -> list[Tensor]:
        """Look all rows up."""
        lookup = ps.lookup_attached if self.cell.mode == "distributed" else ps.lookup
        return [
            rpc_sync(server_name(i, self.cell.servers), lookup, args=(f"table{i}", sparse[:, i]))
            for i in range(self.cell.lookups)
        ]


def interact(towers: Towers, features: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """Run the upper tower over the dense features [batch, DIM] and all vectors [batch, DIM]."""
    return towers.top(torch.cat([features, *vectors], dim=1))
