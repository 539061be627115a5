"""Text and figures that others sent, before a person or a monitor sees them."""

from __future__ import annotations

import math

from fxlib.errors import WireError


def plain(text: str) -> str:
    """Return one line of text: what steers a terminal, begins a new line or turns the direction becomes blank."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def plain_lines(text: str) -> str:
    """Return text of several lines, each of them plain."""
    return "\n".join(map(plain, text.split("\n")))


def finite(value: float, where: str) -> float:
    """Return a figure.

    Raises:
        WireError: it is infinite, or not a number; `where` names the field.
    """
    if not math.isfinite(value):
        raise WireError(f"{value} is no figure", where=where)
    return value


def amount(value: float, where: str) -> float:
    """Return a figure of which there is never less than nothing.

    Raises:
        WireError: it is negative, infinite, or not a number; `where` names the field.
    """
    if not (math.isfinite(value) and value >= 0):
        raise WireError(f"{value} is no amount", where=where)
    return value
