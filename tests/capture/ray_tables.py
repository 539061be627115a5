"""Tables in Ray actors, and three functions that make the blocking idiom `ray.get(actor.method.remote(x))` known."""

from __future__ import annotations

import time
from typing import Any

import ray
import torch
from torch import nn
from typing_extensions import override

import fxlib

SERVICE_S = 0.02


@ray.remote
class Table:
    """A synchronous actor: it runs one submitter's tasks one after another, in their order."""

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Answer after a while."""
        time.sleep(SERVICE_S)
        return rows * 2.0


def lookup(table: Any, rows: torch.Tensor) -> torch.Tensor:
    """Call the actor, and block."""
    found: torch.Tensor = ray.get(table.lookup.remote(rows))
    return found


def lookup_later(table: Any, rows: torch.Tensor) -> Any:
    """Submit the task, and return the reference to its result."""
    return table.lookup.remote(rows)


def join(reference: Any) -> torch.Tensor:
    """Return the result, or raise what the task raised."""
    found: torch.Tensor = ray.get(reference)
    return found


fxlib.register_call(
    name="table actor",
    blocking=lookup,
    issue=lookup_later,
    wait=join,
    contract=fxlib.Contract(reads=frozenset({"rows"})),
    to="table",
)


class Sums(nn.Module):
    """Two independent lookups in two actors, beside work."""

    def __init__(self, *tables: Any) -> None:
        super().__init__()
        self.tables = list(tables)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = lookup(self.tables[0], x)
        second = lookup(self.tables[1], x + 1.0)
        return torch.sin(x) + first * second
