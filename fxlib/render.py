"""Reports and timelines for people: a self-contained HTML page, or a trace that Perfetto opens.

The figures come from `fxlib.spec.report`; `fxlib.inspection` draws graphs.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from fxlib.serialization.files import write_whole
from fxlib.spec.report import Report, Span, Timeline

__all__ = ["chrome_trace", "figure", "page", "report_page", "svg", "timelines_of", "write_report"]

IN_FLIGHT = "in_flight"
COLOURS = {
    "forward": "#c7d7ee", "loss": "#aebfd8", "backward": "#9fc5b0", "optimizer": "#b7a9d6",
    "call": "#d1495b", "wait": "#d1495b", "push": "#e08e45", "issue": "#2d6a9f", IN_FLIGHT: "#e9c46a",
    "nothing_written": "#8ab17d", "by_keys": "#2a9d8f", "behind_push": "#bc8a5f", "stale": "#8d6a9f",
}  # fmt: skip
MEANINGS = {
    "forward": "compute: forward", "backward": "compute: backward", "optimizer": "optimizer", "issue": "issue",
    "call": "blocked by a call", "push": "pushing gradients", IN_FLIGHT: "call in flight",
}  # fmt: skip
AHEAD = {
    "nothing_written": "in flight ahead of its step", "by_keys": "ahead by keys", "behind_push": "behind the push",
    "stale": "ahead of a push that it missed",
}  # fmt: skip
"""Kinds of calls in flight for a later step, and their meaning."""
WIDTH, MARGIN, ROW, GAP = 1100, 130, 14, 3
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
"""The times that an axis may span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A named row of the picture, several rows high if its spans overlap."""

    name: str
    rows: Sequence[Sequence[Span]]


def lanes(timeline: Timeline) -> list[Lane]:
    """Lay a timeline out: the trainer's thread with one row per depth, then for each server its calls in flight."""
    thread = [span for span in timeline.spans if span.kind != IN_FLIGHT and span.kind not in AHEAD]
    outer = [span for span in thread if span.kind in {"forward", "loss", "backward", "optimizer"}]
    inner = [span for span in thread if span.kind not in {"forward", "loss", "backward", "optimizer"}]
    # A blocking call is in flight for as long as it blocks.
    shown = {"call": IN_FLIGHT, IN_FLIGHT: IN_FLIGHT, **dict(zip(AHEAD, AHEAD, strict=True))}
    in_flight = [replace(span, kind=shown[span.kind]) for span in timeline.spans if span.kind in shown]
    remote = {to: pack([span for span in in_flight if span.to == to]) for to in sorted({span.to for span in in_flight})}
    return [
        Lane(name="trainer", rows=[row for row in (outer, inner) if row]),
        *(Lane(name=to or "remote", rows=rows) for to, rows in remote.items()),
    ]


def pack(spans: Sequence[Span]) -> list[list[Span]]:
    """Put spans on as few rows as possible without overlap, each on the first free row, in O(n log n).

    Source: interval partitioning by start; Kleinberg and Tardos, "Algorithm Design", 2005, section 4.1.
    """
    rows: list[list[Span]] = []
    free, busy = list[int](), list[tuple[float, int]]()
    for span in sorted(spans, key=lambda each: each.start_s):
        while busy and busy[0][0] <= span.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(rows))
            rows.append([])
        row = heapq.heappop(free)
        rows[row].append(span)
        heapq.heappush(busy, (span.end_s, row))
    return rows


def timelines_of(report: Report) -> dict[str, Timeline]:
    """Return the timelines in a report: the original step, the rewritten one, and the one at the bound."""
    found = {
        "original": report.timeline_original,
        "optimized": report.timeline_optimized,
        "at the bound (by the cost model)": report.timeline_bound,
    }
    return {name: timeline for name, timeline in found.items() if timeline is not None}


def page(timelines: Mapping[str, Timeline], *, title: str, text: str = "") -> str:
    """Return a self-contained HTML page: the timelines one above another on one time axis, then the text."""
    return _PAGE.format(title=escape(title), figure=figure(timelines), text=escape(text))


def figure(timelines: Mapping[str, Timeline]) -> str:
    """Return the timelines and their legend as an HTML fragment, to embed in another page."""
    longest_s = _longest(timelines)
    parts = [_frame(*_legend(timelines))]
    for name, timeline in timelines.items():
        parts += [f"<h2>{_heading(name, timeline)}</h2>", _frame(*_drawn(timeline, longest_s))]
    return "\n".join(parts)


def svg(timelines: Mapping[str, Timeline]) -> str:
    """Return the timelines and their legend as one SVG, for where a picture is shown without a page."""
    longest_s, (legend, top) = _longest(timelines), _legend(timelines)
    parts = [legend]
    for name, timeline in timelines.items():
        body, height = _drawn(timeline, longest_s)
        parts.append(f'<text y="{top + 22:.0f}" font-size="14">{_heading(name, timeline)}</text>')
        parts.append(f'<g transform="translate(0 {top + 30:.0f})">{body}</g>')
        top += 30 + height
    size = f'viewBox="0 0 {WIDTH} {top:.0f}" font-family="sans-serif" font-size="11" fill="#444"'
    whole = f'<rect width="{WIDTH}" height="{top:.0f}" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', whole, *parts, "</svg>\n"])


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """Return the timelines as a JSON trace, one process each, for https://ui.perfetto.dev or chrome://tracing.

    Source: "Trace Event Format", the complete (`X`) and metadata (`M`) events; times in microseconds.
    """
    events: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        rows = ((lane.name, row) for lane in lanes(timeline) for row in lane.rows)
        for thread, (lane_name, row) in enumerate(rows, start=1):
            events.append(
                {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": lane_name}}
            )
            events += [_event(span, process, thread) for span in row]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(span: Span, process: int, thread: int) -> dict[str, object]:
    return {
        "ph": "X", "pid": process, "tid": thread, "cat": span.kind,
        "name": f"{span.kind} {span.name}".strip(), "args": {"to": span.to},
        "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6,
    }  # fmt: skip


def _longest(timelines: Mapping[str, Timeline]) -> float:
    longest_s = max((timeline.step_s * timeline.steps for timeline in timelines.values()), default=0.0) or 1.0
    return min(max(longest_s, _SHORTEST_S), _LONGEST_S)  # a service may have said anything


def _heading(name: str, timeline: Timeline) -> str:
    several = f", {timeline.steps} steps" if timeline.steps > 1 else ""
    return f"{escape(name)}: {timeline.step_s * 1e3:.1f} ms a step{several}"


def _frame(body: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="100%" font-size="11" fill="#444">{body}</svg>'


def _legend(timelines: Mapping[str, Timeline]) -> tuple[str, float]:
    """Return the legend and its height; calls ahead of their step have a row of it if there are any."""
    kinds = {span.kind for timeline in timelines.values() for span in timeline.spans}
    rows = [MEANINGS, *([AHEAD] if kinds & AHEAD.keys() else [])]
    marks = (
        f'<rect x="{90 + index * 145}" y="{2 + 16 * row}" width="12" height="10" fill="{COLOURS[kind]}"/>'
        f'<text x="{106 + index * 145}" y="{11 + 16 * row}">{escape(text)}</text>'
        for row, meanings in enumerate(rows)
        for index, (kind, text) in enumerate(meanings.items())
    )
    return "".join(marks), 16.0 * len(rows)


def _drawn(timeline: Timeline, longest_s: float) -> tuple[str, float]:
    """Return a timeline's lanes, its axis, and their height."""
    scale = (WIDTH - MARGIN) / longest_s
    parts, top = [], GAP
    for lane in lanes(timeline):
        middle = top + len(lane.rows) * (ROW + GAP) / 2 + 4
        parts.append(f'<text x="{MARGIN - 8}" y="{middle:.0f}" text-anchor="end">{escape(lane.name)}</text>')
        for row in lane.rows:
            parts += [_bar(span, top, scale) for span in row]
            top += ROW + GAP
        top += 2 * GAP
    parts += _ends(timeline, scale, top)
    parts += _axis(longest_s, scale, top)
    return "".join(parts), top + 18


def _ends(timeline: Timeline, scale: float, top: float) -> Iterator[str]:
    """Yield a line at the end of each step but the last."""
    for number in range(1, timeline.steps):
        x = MARGIN + number * timeline.step_s * scale
        yield f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{top}" stroke="#444" stroke-dasharray="3 3"/>'


def _bar(span: Span, top: float, scale: float) -> str:
    left, width = MARGIN + span.start_s * scale, max((span.end_s - span.start_s) * scale, 0.6)
    words = escape(f"{span.kind} {span.name} {span.to}: {(span.end_s - span.start_s) * 1e3:.3f} ms")
    colour = COLOURS.get(span.kind, "#999999")
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" fill="{colour}">'
        f"<title>{words}</title></rect>"
    )


def _axis(longest_s: float, scale: float, top: float) -> Iterator[str]:
    step_s = next(s for s in _ticks() if longest_s / s <= 12)
    for tick in range(int(longest_s / step_s) + 1):
        x = MARGIN + tick * step_s * scale
        yield f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{top}" stroke="#00000018"/>'
        yield f'<text x="{x:.1f}" y="{top + 13}" text-anchor="middle">{tick * step_s * 1e3:g} ms</text>'


def _ticks() -> Iterator[float]:
    power = 1e-6
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.4 system-ui, sans-serif; max-width: 1140px; margin: 2em auto; color: #222; background: #fff; }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 15px; margin: 1.4em 0 .3em; }} pre {{ font-size: 12px; overflow-x: auto; }}
</style></head><body><h1>{title}</h1>
{figure}
<pre>{text}</pre>
</body></html>
"""


_TITLES = {"adopt": "fxlib: the rewritten module, measured faster", "keep_original": "fxlib: the original module, kept"}


def report_page(result: Report) -> str:
    """Return a result as a self-contained HTML page."""
    return page(timelines_of(result), title=_TITLES[result.decision], text=str(result))


def write_report(result: Report, path: str | os.PathLike[str]) -> None:
    """Write a result as a self-contained HTML page, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(Path(path), [report_page(result).encode()])
