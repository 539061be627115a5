"""The recommendation step that every arm runs: remote lookups, two towers, and the plain blocking program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.rpc import rpc_sync
from typing_extensions import override

from benchmarks.grid.cells import MOST_LOOKUPS, Cell, LocalPart
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

    def interact(self, features: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Run the upper tower over the dense features [batch, DIM] and all vectors [batch, DIM]."""
        top: Tensor = self.top(torch.cat([features, *vectors], dim=1))
        return top


class Attention(Towers):
    """The same around the local part of a Deep Interest Network, most of whose work is elementwise.

    The first vector is the candidate's, the others are those of a user's history, each weighted by a small network.

    Source: G. Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018).
    """

    _UNITS: Final = (80, 40)

    def __init__(self, lookups: int, hidden: int) -> None:
        super().__init__(2, hidden)
        first, second = self._UNITS
        self.weight = nn.Sequential(
            nn.Linear(4 * DIM, first), nn.PReLU(), nn.Linear(first, second), nn.PReLU(), nn.Linear(second, 1)
        )

    @override
    def interact(self, features: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        candidate, *others = vectors
        history = torch.stack(others, dim=1)
        beside = candidate[:, None].expand_as(history)
        weights = self.weight(torch.cat([beside, history, beside - history, beside * history], dim=2))
        return super().interact(features, [candidate, (weights * history).sum(dim=1)])


LOCAL_PARTS: Final[Mapping[LocalPart, type[Towers]]] = {"towers": Towers, "attention": Attention}
"""What a step computes between its calls, by the name in its cell."""


class Blocking(nn.Module):
    """As a user writes it: each lookup where it is needed, one after another."""

    def __init__(self, towers: Towers, cell: Cell) -> None:
        super().__init__()
        self.towers, self.cell = towers, cell

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        vectors = self.vectors(sparse)
        return self.towers.interact(self.towers.bottom(dense), vectors)

    def vectors(self, sparse: Tensor) -> list[Tensor]:
        """Look all rows up."""
        lookup = ps.lookup_attached if self.cell.mode == "distributed" else ps.lookup
        return [
            rpc_sync(server_name(i, self.cell.servers), lookup, args=(f"table{i}", sparse[:, i]))
            for i in range(self.cell.lookups)
        ]
