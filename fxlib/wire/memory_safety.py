"""Which operators and functions of torch stay inside of their tensors, whatever they are given.

The table beside this module (`memory_safety.json`) is written by `python -m benchmarks.out_of_bounds`: each name was
called with integers, indices, sizes and strides out of bounds, on tensors between pages that nobody may touch. "tried"
ran, and stayed inside; "ruled" reaches outside with some arguments, which `fxlib.wire.argument_rules` refuses;
"untried" looks nothing up, and cannot run alone (collectives). All else may not travel: "refused" says what was seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("memory_safety.json")
"""The file of the table."""
WAY_OUT = "Use another operator, or capture the model again: what may not travel stays with the client, where it runs."
"""What to do about a refusal."""
UNRUN = "no call of it ran when it was tried"
"""What the table says of a name that it has nothing else to say of."""
_UNTRIED = "it was never tried out of bounds"


@cache
def table() -> dict[str, Any]:
    """Return the table."""
    return json.loads(TABLE.read_text())


def refused() -> Mapping[str, str]:
    """Return what was seen of each name that was tried and may not travel."""
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
    """Whether a call of this name was seen to leave its tensors."""
    return refused().get(name, UNRUN) != UNRUN
