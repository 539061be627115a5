"""A model's gain over time as a picture: a point for each job, with its confidence interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from markupsafe import Markup

_WIDTH: Final = 900
_HEIGHT: Final = 240
_LEFT: Final = 60
_EDGE: Final = 16


def gain_chart(jobs: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the gains of jobs, which are given newest first; empty if none was measured. All text is escaped."""
    measured = [job for job in reversed(jobs) if job["gain"]]
    if not measured:
        return Markup("")
    low = min(0.0, *(job["gain"]["low"] for job in measured))
    high = max(0.0, *(job["gain"]["high"] for job in measured))
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
        words = escape(f"{job['created_at'] or ''}: {gain['value']:+.1%} [{gain['low']:+.1%}, {gain['high']:+.1%}]")
        kind = "adopted" if job["decision"] == "adopt" else "kept"
        parts.append(
            f'<g class="{kind}"><title>{words}</title>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(gain["low"]):.1f}" y2="{y(gain["high"]):.1f}"/>'
            f'<circle cx="{x:.1f}" cy="{y(gain["value"]):.1f}" r="4"/></g>'
        )
    shown = "".join(parts)
    name = f"Gain of {len(measured)} jobs, the oldest on the left"
    return Markup(  # noqa: S704 - numbers, and escaped text
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="{name}">{shown}</svg>'
    )
