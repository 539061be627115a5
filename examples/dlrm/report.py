"""What the demo leaves behind: a page with figures, loss curves, calls and timelines, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import fxlib
from fxlib.render import chrome_trace, figure, svg, timelines_of

CURVE_WIDTH, CURVE_HEIGHT = 1100, 220


def write(folder: Path, *, result: fxlib.Result, figures: Sequence[str], losses: Mapping[str, Sequence[float]]) -> None:
    """Write `report.html`, `timeline.svg` (one step before and after), `timeline.json` (Chrome trace), `losses.csv`."""
    timelines = timelines_of(result)
    table = escape("\n".join(figures))
    calls = escape(str(result))
    (folder / "report.html").write_text(
        _PAGE.format(table=table, curves=curves(losses), timelines=figure(timelines), result=calls)
    )
    (folder / "timeline.svg").write_text(svg({name: timelines[name] for name in timelines if name in losses}))
    (folder / "timeline.json").write_text(chrome_trace(timelines))
    rows = (",".join(map(repr, values)) for values in zip(*losses.values(), strict=True))
    (folder / "losses.csv").write_text("\n".join([",".join(losses), *rows]) + "\n")


def curves(losses: Mapping[str, Sequence[float]]) -> str:
    """Draw the losses one upon another: a broad pale line below, a thin dark one on top."""
    lowest = min(min(values) for values in losses.values())
    highest = max(max(values) for values in losses.values())
    span = (highest - lowest) or 1.0
    styles = (("#a9c4e4", 6), ("#b3262e", 1.4))
    lines = []
    for (name, values), (colour, width) in zip(losses.items(), styles, strict=False):
        points = " ".join(
            f"{index * CURVE_WIDTH / max(len(values) - 1, 1):.1f},{(highest - value) / span * CURVE_HEIGHT:.1f}"
            for index, value in enumerate(values)
        )
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return f'<svg viewBox="-10 -10 {CURVE_WIDTH + 20} {CURVE_HEIGHT + 20}" width="100%">{"".join(lines)}</svg>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fxlib: DLRM, before and after</title><style>
body {{ font: 14px/1.4 system-ui, sans-serif; max-width: 1140px; margin: 2em auto; color: #222; background: #fff; }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 15px; margin: 1.4em 0 .3em; }} pre {{ font-size: 12px; overflow-x: auto; }}
</style></head><body><h1>DLRM with 26 remote embeddings, before and after</h1>
<pre>{table}</pre>
<h2>Loss: original (broad, pale) and optimized (thin, dark)</h2>
{curves}
{timelines}
<h2>What became of each call</h2>
<pre>{result}</pre>
</body></html>
"""
