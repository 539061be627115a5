"""Durations and tables as text for a person."""

from __future__ import annotations

from collections.abc import Sequence


def seconds(value: float | None) -> str:
    """Write a duration with a unit that fits: 350 us, 12.5 ms, 1.20 s; a dash when it is not known."""
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Align rows in columns two spaces apart; `right` names the columns that hold figures."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
