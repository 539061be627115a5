"""The steps of all cells as one picture: a self-contained SVG, one line for each cell, one mark for each arm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from benchmarks.grid.cells import BLOCKING, BOUND, COMPUTE, FXLIB, HAND, HAND_PIPELINE, PAPER, PIPELINE
from benchmarks.report import Case, Row

COLOURS = {
    BLOCKING: "#8d99ae",
    PAPER: "#e9c46a",
    HAND: "#2d6a9f",
    FXLIB: "#d1495b",
    HAND_PIPELINE: "#79a7d3",
    PIPELINE: "#8f2d56",
    COMPUTE: "#9fc5b0",
    BOUND: "#222",
}
WIDTH, LABELS, LINE, TOP, BOTTOM = 900, 330, 18, 34, 26
RADIUS = 5
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def picture(rows: Sequence[Row]) -> str:
    """Return the picture of the rows of `benchmarks.overlap`; milliseconds on a logarithmic axis."""
    steps: dict[str, dict[str, Row]] = {}
    for each in rows:
        if each.metric == "step_seconds":
            steps.setdefault(label(each.case), {})[each.arm] = each
    axis = Axis([1e3 * each.value for arms in steps.values() for each in arms.values()])
    height = TOP + LINE * len(steps) + BOTTOM
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11" fill="#333"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    lines += [*legend(), *axis.drawn(height)]
    for place, (name, arms) in enumerate(steps.items()):
        lines += line(TOP + LINE * place + LINE / 2, name, arms, axis)
    return "\n".join([*lines, "</svg>\n"])


class Axis:
    """Milliseconds, to pixels."""

    def __init__(self, values_ms: Sequence[float]) -> None:
        """Cover all values."""
        self._first = max((tick for tick in TICKS_MS if tick <= min(values_ms)), default=min(values_ms))
        self._last = min((tick for tick in TICKS_MS if tick >= max(values_ms)), default=max(values_ms))

    def x(self, value_ms: float) -> float:
        """Place of a value."""
        whole = math.log(self._last / self._first)
        return LABELS + (WIDTH - LABELS - 2 * RADIUS) * math.log(value_ms / self._first) / whole

    def drawn(self, height: float) -> Iterator[str]:
        """Draw lines and figures."""
        for tick in TICKS_MS:
            if self._first <= tick <= self._last:
                x = self.x(tick)
                yield f'<path d="M{x:.1f} {TOP}V{height - BOTTOM}" stroke="#ddd"/>'
                yield f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{tick} ms</text>'


def label(case: Case) -> str:
    """Name a cell in as few words as do."""
    words = {"lookups": "{} lookups", "servers": "{} servers", "service_ms": "{:g} ms", "hidden": "hidden {}"}
    words |= {"per": "per {}", "mode": "{}", "mbit_per_s": "{} Mbit/s"}
    words |= {"conflicts": "{:g} of keys again", "zipf": "Zipf {:g}", "depth": "depth {}"}
    return ", ".join(words[key].format(value) for key, value in case.items() if key in words)


def line(y: float, name: str, arms: Mapping[str, Row], axis: Axis) -> Iterator[str]:
    """Draw one cell."""
    yield f'<text x="{LABELS - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
    places = [axis.x(1e3 * each.value) for each in arms.values()]
    yield f'<path d="M{min(places):.1f} {y:.1f}H{max(places):.1f}" stroke="#ccc"/>'
    for arm in (each for each in COLOURS if each in arms):
        yield mark(arm, axis.x(1e3 * arms[arm].value), y, f"{arm}: {1e3 * arms[arm].value:.2f} ms")


def mark(arm: str, x: float, y: float, title: str) -> str:
    """Draw one arm: a stroke for the bound, a disc for what was measured."""
    shape = (
        f'<path d="M{x:.1f} {y - LINE / 2 + 1:.1f}v{LINE - 2}" stroke="{COLOURS[arm]}" stroke-width="2">'
        if arm == BOUND
        else f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{COLOURS[arm]}" fill-opacity="0.85">'
    )
    return f"{shape}<title>{escape(title)}</title></{'path' if arm == BOUND else 'circle'}>"


def legend() -> Iterator[str]:
    """Name the marks."""
    for place, arm in enumerate(COLOURS):
        x = LABELS + 70 * place
        yield mark(arm, x, 14, arm)
        yield f'<text x="{x + 10}" y="18">{arm}</text>'
