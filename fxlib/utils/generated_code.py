"""Keep generated code to what a program means: torch.fx writes some nodes otherwise."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any


def target_of(target: Any, args: Sequence[Any]) -> Any:
    """Return the function to record in place of `target`, so that the generated code computes what a program did.

    A power of a negative number, `(-1) ** k`, would become `-1 ** k`, which is `-(1 ** k)`.
    """
    is_power = target is operator.pow and args and isinstance(args[0], (int, float, complex))
    return pow if is_power and repr(args[0]).startswith("-") else target
