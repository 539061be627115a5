"""A model's gain over time as a picture: for each job a point, and a square for what its training saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Final

from markupsafe import Markup

_WIDTH: Final = 900
_HEIGHT: Final = 240
_LEFT: Final = 60
_EDGE: Final = 16
_BESIDE: Final = 7


def gain_chart(jobs: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the gains of jobs, which are given newest first; empty if none was measured. All text is escaped."""
    measured = [job for job in reversed(jobs) if job["gain"]]
    if not measured:
        return Markup("")
    seen = [job["live"]["gain"] for job in measured if job["live"] and job["live"]["gain"]]
    low = min(0.0, *(gain["low"] for gain in (*(job["gain"] for job in measured), *seen)))
    high = max(0.0, *(gain["high"] for gain in (*(job["gain"] for job in measured), *seen)))
    room = (high - low) or 1.0

    def y(gain: float) -> float:
        return _EDGE + (high - gain) / room * (_HEIGHT - 2 * _EDGE)

    parts = []
    for gain in (low, 0.0, high):
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(gain):.1f}" y2="{y(gain):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(gain) + 4:.1f}" text-anchor="end">{gain:+.0%}</text>')
    step = (_WIDTH - _LEFT - 2 * _EDGE) / max(len(measured) - 1, 1)
    for index, job in enumerate(measured):
        x, gain = _LEFT + _EDGE + index * step, job["gain"]
        kind = "adopted" if job["decision"] == "adopt" else "kept"
        point = f'<circle cx="{x:.1f}" cy="{y(gain["value"]):.1f}" r="4"/>'
        parts.append(_mark(kind, job["created_at"] or "", gain, x=x, y=y, point=point))
        if job["live"] and (live := job["live"]["gain"]):
            beside = x + _BESIDE
            square = f'<rect x="{beside - 3:.1f}" y="{y(live["value"]) - 3:.1f}" width="6" height="6"/>'
            parts.append(_mark("live", "in training", live, x=beside, y=y, point=square))
    shown = "".join(parts)
    name = f"Gain of {len(measured)} jobs, the oldest on the left"
    return Markup(  # noqa: S704 - numbers, and escaped text
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="{name}">{shown}</svg>'
    )


def _mark(kind: str, when: str, gain: Mapping[str, float], *, x: float, y: Callable[[float], float], point: str) -> str:
    """Draw one gain: its interval, its point, and both in words."""
    words = escape(f"{when}: {gain['value']:+.1%} [{gain['low']:+.1%}, {gain['high']:+.1%}]")
    return (
        f'<g class="{kind}"><title>{words}</title>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(gain["low"]):.1f}" y2="{y(gain["high"]):.1f}"/>{point}</g>'
    )
