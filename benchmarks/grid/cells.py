"""What is measured: the grid, and the other dimensions one at a time around its middle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from benchmarks.report import Case

Mode = Literal["local", "push", "forward", "distributed"]
Per = Literal["item", "call"]
LocalPart = Literal["towers", "attention"]

BLOCKING, PAPER, FXLIB, HAND, COMPUTE, BOUND = "blocking", "paper", "fxlib", "hand", "compute", "bound"
"""The arms; the last is computed, not run."""
PIPELINE, HAND_PIPELINE, PIPELINE_BOUND = "pipeline", "hand_pipeline", "pipeline_bound"
"""The arms that read for the next step during this one, and their bound; there are none under distributed autograd."""

MOST_LOOKUPS = 26
HIDDEN = (256, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One workload.

    `per`: what the servers charge their service time for. `mode`: `local` is forward, backward and SGD on the trainer;
    `push` also sends the gradients of the lookups to the servers; `forward` is inference; `distributed` is distributed
    autograd. `mbit_per_s` is the bandwidth each way between the trainer and all of the servers, 0 if nothing limits it.
    """

    lookups: int
    service_ms: float
    hidden: int
    servers: int = 2
    per: Per = "item"
    mode: Mode = "local"
    mbit_per_s: int = 0
    conflicts: float = 1.0
    """Share of a step's keys that are among those of the step before."""
    zipf: float = 0.0
    """Exponent of the keys' distribution (Zipf's law), which then decides how many come again; 0: it is uniform."""
    depth: int = 1
    """Number of batches that the pipeline knows before their step; 0: it chooses by itself."""
    local_part: LocalPart = "towers"
    """What the trainer computes: two towers of products of matrices, or attention, with much elementwise work."""

    @property
    def case(self) -> Case:
        """What rows say of the cell: the dimensions of the grid, and the others where they are not as usual."""
        grid = ("lookups", "servers", "service_ms", "hidden")
        usual = asdict(_USUAL)
        given = asdict(self)
        return {key: given[key] for key in (*grid, *(key for key in given if given[key] != usual[key]))}


_USUAL = MIDDLE = Cell(lookups=MOST_LOOKUPS, service_ms=2.0, hidden=256)

GRID = tuple(
    Cell(lookups=lookups, service_ms=service_ms, hidden=hidden)
    for lookups, service_ms, hidden in itertools.product((8, MOST_LOOKUPS), (0.0, 0.5, 2.0, 10.0), HIDDEN)
)


def _around(middle: Cell) -> Iterator[Cell]:
    yield replace(middle, servers=1)
    yield replace(middle, servers=4)
    yield replace(middle, per="call")
    yield replace(middle, mbit_per_s=200)
    yield replace(middle, mode="forward")
    yield replace(middle, mode="push")
    yield replace(middle, mode="distributed")


def _across() -> Iterator[Cell]:
    """What matters to reading ahead: how many keys come again, how the servers' time counts, and how much is known."""
    push = replace(MIDDLE, lookups=8, mode="push")
    for conflicts in (0.0, 0.1, 0.5, 0.9):
        yield replace(push, conflicts=conflicts)
        yield replace(push, conflicts=conflicts, per="call")
    yield replace(push, zipf=1.1)
    yield replace(push, conflicts=0.1, service_ms=0.0, mbit_per_s=200)
    for depth in (0, 2, 4):
        yield replace(push, conflicts=0.1, depth=depth)
        yield replace(MIDDLE, lookups=8, mode="forward", conflicts=0.1, depth=depth, service_ms=10.0, per="call")
    yield replace(MIDDLE, lookups=8, mode="forward", conflicts=0.1, service_ms=10.0, per="call")


PARTS = {
    "grid": GRID,
    "around": tuple(cell for hidden in HIDDEN for cell in _around(replace(MIDDLE, hidden=hidden))),
    "across": tuple(_across()),
}
"""All cells: the grid, what lies around its middle, and what matters to reading ahead."""
QUICK_CELLS = (
    Cell(lookups=8, service_ms=0.0, hidden=256),
    MIDDLE,
    replace(MIDDLE, mode="push"),
    replace(MIDDLE, mbit_per_s=200),
    replace(MIDDLE, lookups=8, mode="push", conflicts=0.1),
)
