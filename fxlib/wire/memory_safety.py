"""The operators and functions of torch that stay inside of their tensors, whatever their arguments.

The table beside this module (`memory_safety.json`) is written by `python -m benchmarks.out_of_bounds`: each name was
called with integers, indices, sizes and strides out of bounds, on tensors between inaccessible pages. "tried" ran, and
stayed inside; "ruled" reaches outside with some arguments, which `fxlib.wire.argument_rules` refuses; "untried" looks
nothing up, and cannot run alone (collectives). Nothing else may travel: "refused" says what was observed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("memory_safety.json")
"""Path of the table."""
WAY_OUT = "Use another operator, or capture the model again: what may not travel stays with the client, where it runs."
"""Advice about a refusal."""
UNRUN = "no call of it ran when it was tried"
"""Observation for names about which the table says nothing else."""
_UNTRIED = "it was never tried out of bounds"


@cache
def table() -> dict[str, Any]:
    """Return the table."""
    return json.loads(TABLE.read_text())


def refused() -> Mapping[str, str]:
    """Return what was observed of each name that was tested and may not travel."""
    found: Mapping[str, str] = table()["refused"]
    return found


@cache
def safe() -> frozenset[str]:
    """Return the names that may travel, some of them under a rule."""
    return frozenset((*table()["tried"], *table()["ruled"], *table()["untried"]))


def reason(name: str) -> str:
    """Return why a name may not travel."""
    return refused().get(name, _UNTRIED)


def reached_outside(name: str) -> bool:
    """Return whether a call of this name was observed to leave its tensors."""
    return refused().get(name, UNRUN) != UNRUN
