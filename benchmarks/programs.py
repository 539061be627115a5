"""One recommendation step, written four ways: blocking, rewritten by fxlib, asynchronous by hand, compute alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rpc import rpc_async, rpc_sync
from torch.futures import wait_all

import fxlib
from fxlib import ps
from fxlib.workload import Server, Table

DENSE, DIM, ROWS, BATCH = 13, 32, 1000, 128
SERVERS = ("ps0", "ps1")

Step = Callable[[], None]


def servers(lookups: int) -> tuple[Server, ...]:
    """One table for each lookup, dealt to the servers in turn."""
    return tuple(
        Server(
            name=name,
            tables=tuple(Table(name=f"table{i}", rows=ROWS, dim=DIM) for i in range(lookups) if owner(i) == name),
        )
        for name in SERVERS
    )


def owner(table: int) -> str:
    """Name of the server that holds a table."""
    return SERVERS[table % len(SERVERS)]


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

    def __init__(self, towers: Towers, lookups: int) -> None:
        super().__init__()
        self.towers, self.lookups = towers, lookups

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        vectors = [rpc_sync(owner(i), ps.lookup, args=(f"table{i}", sparse[:, i])) for i in range(self.lookups)]
        return self.towers.top(torch.cat([self.towers.bottom(dense), *vectors], dim=1))


class ByHand(Blocking):
    """As an expert writes it: all lookups issued first, all awaited after the independent tower."""

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        futures = [rpc_async(owner(i), ps.lookup, args=(f"table{i}", sparse[:, i])) for i in range(self.lookups)]
        features = self.towers.bottom(dense)
        return self.towers.top(torch.cat([features, *wait_all(futures)], dim=1))


class ComputeAlone(Blocking):
    """What no schedule can beat: the remote results are there already."""

    def __init__(self, towers: Towers, lookups: int, sparse: Tensor) -> None:
        super().__init__(towers, lookups)
        with torch.no_grad():
            self.vectors = [rpc.rpc_sync(owner(i), ps.lookup, args=(f"table{i}", sparse[:, i])) for i in range(lookups)]

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        return self.towers.top(torch.cat([self.towers.bottom(dense), *self.vectors], dim=1))


# The interval between issue and wait is the programs' own here: gradients of lookups are not pushed.
READS = {"fxlib.ps:lookup": fxlib.Contract(reads=frozenset({"tables"}))}


def steps(lookups: int, hidden: int) -> Mapping[str, Step]:
    """One training step (forward, backward, SGD) of each program, all over the same parameters and batch."""
    torch.manual_seed(0)
    towers = Towers(lookups, hidden)
    dense, sparse = torch.randn(BATCH, DENSE), torch.randint(0, ROWS, (BATCH, lookups))
    blocking = Blocking(towers, lookups)
    graph = fxlib.capture(blocking, contracts=READS)
    programs: dict[str, nn.Module] = {
        "blocking": blocking,
        "fxlib": fxlib.optimize(graph, recipe="schedule"),
        "hand": ByHand(towers, lookups),
        "compute": ComputeAlone(towers, lookups, sparse),
    }
    expected = blocking(dense, sparse)
    for name, program in programs.items():
        assert torch.equal(program(dense, sparse), expected), name
    optimizer = torch.optim.SGD(towers.parameters(), lr=1e-4)
    return {name: _step(program, optimizer, dense, sparse) for name, program in programs.items()}


def _step(program: nn.Module, optimizer: torch.optim.Optimizer, dense: Tensor, sparse: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        program(dense, sparse).mean().backward()
        optimizer.step()

    return step
