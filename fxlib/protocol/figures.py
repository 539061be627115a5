"""Figures that others sent, before a person or a monitor sees them."""

from __future__ import annotations

import math

from fxlib.wire.faults import Fault


def finite(value: float) -> float:
    """Return a figure.

    Raises:
        Fault: it is infinite, or not a number.
    """
    if not math.isfinite(value):
        raise Fault(f"{value} is no figure")
    return value


def amount(value: float) -> float:
    """Return a figure of which there is never less than nothing.

    Raises:
        Fault: it is negative, infinite, or not a number.
    """
    if not 0.0 <= value < math.inf:
        raise Fault(f"{value} is no amount")
    return value
