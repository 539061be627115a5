"""Durations, tables, locations in a model and guesses as text for people; strangers' text, harmless for a terminal."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from torch.fx import Node


def seconds(value: float | None) -> str:
    """Format a duration with a fitting unit: 350 us, 12.5 ms, 1.20 s; a dash if it is unknown."""
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def as_json(value: Any) -> Any:
    """Return plain data as JSON can hold it: the end of an interval that has none is null there."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that names the known word most like this one; empty if none is."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {found[0]}?" if found else ""


def plain(text: str) -> str:
    """Return one line of text; characters that steer a terminal, begin a line or turn the direction become blanks."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def plain_lines(text: str) -> str:
    """Return text of several lines, each of them plain."""
    return "\n".join(map(plain, text.split("\n")))


class PlainFormatter(logging.Formatter):
    """Formats log lines such that nothing steers a terminal, whatever strangers have put into their arguments.

    A message is one line, and a traceback below it has lines of its own.
    """

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record))

    @override
    def format(self, record: logging.LogRecord) -> str:
        return plain_lines(super().format(record))


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Align rows in columns two spaces apart; `right` names the columns that hold figures.

    Cells become plain, so that each row is one line, whatever strangers have put into it.
    """
    shown = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    lines = []
    for row in shown:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def location_of(node: Node) -> str:
    """Return a node's name, the path of its module, and the line of the model, as far as they are known."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if isinstance(entry, tuple)]
    within = f" in {paths[-1]!r}" if paths and paths[-1] else ""
    source = node.meta.get("source", "")
    return f"node {node.name!r}{within}{f' ({source})' if source else ''}"
