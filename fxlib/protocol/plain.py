"""Text and figures that others sent, before a person or a monitor sees them."""

from __future__ import annotations

import math

from fxlib.wire.faults import Fault


def plain(text: str) -> str:
    """Return one line of text: what steers a terminal, begins a new line or turns the direction becomes blank."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def plain_lines(text: str) -> str:
    """Return text of several lines, each of them plain."""
    return "\n".join(map(plain, text.split("\n")))


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
