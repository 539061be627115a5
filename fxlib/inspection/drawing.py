"""`fxlib.draw`: a picture of a graph with the figures of each node, by graphviz or as an HTML page.

The page has a row for each node, from top to bottom in program order, and its inputs as lines beside the rows. A line
leads from the node that makes a value down to its last user, with a dot at each use; overlapping lines have lanes of
their own, as far as there is room. Bars show time and memory. The page is made in linear time and contains no script.
"""

from __future__ import annotations

import heapq
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from torch.fx import Node

from fxlib.capture.coerce import Model
from fxlib.errors import FxlibError
from fxlib.inspection.analyzing import Analysis, NodeFigures, analyze, cells, render
from fxlib.inspection.graph_inputs import GivenInputs
from fxlib.serialization.files import write_whole

MOST_IN_DOT = 1000
"""Maximum number of nodes drawn by `dot`, which takes more than twice the time for twice the nodes."""
_TIMEOUT_S = 120
_CALM, _EFFECT, _UNKNOWN = "#eef3fa", "#f6d9c4", "#dddddd"


def draw(drawn: Analysis | Model, path: str | os.PathLike[str], inputs: GivenInputs = None) -> None:
    """Write a picture of a graph, with shapes, time, bytes and effects on its nodes. The file is written atomically.

    Args:
        drawn: an analysis from `fxlib.analyze`, or a model that it accepts.
        path: the file to write; its suffix gives the format: `.html` (needs nothing), `.svg` (made by graphviz), or
            `.dot` (for graphviz).
        inputs: the inputs of a model, as `fxlib.analyze` takes them.

    Raises:
        CaptureError: the model cannot be captured.
        FxlibError: the suffix is another one, inputs are missing, or graphviz is needed and is missing or fails.
        OSError: the file cannot be written.
    """
    target = Path(path)
    check_suffix(target)
    analysis = drawn if isinstance(drawn, Analysis) else analyze(drawn, inputs)
    write_whole(target, [_FORMS[target.suffix](analysis).encode()])


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Check that the suffix of a file gives a format.

    Raises:
        FxlibError: it does not.
    """
    suffix = Path(path).suffix
    if suffix not in _FORMS:
        hint = f"Name the file {', '.join(_FORMS)}."
        raise FxlibError(f"nothing is drawn as {suffix!r}", where=str(path), hint=hint)


MOST_NODES = 2000
_LANES = 24
_ROW, _LANE, _BAR = 18, 7, 90
_COLUMNS = (("node", 0), ("target", 210), ("makes", 430), ("time", 650), ("live memory", 750), ("effects", 950))
_WIDTH = 1300
_CUT = {"node": 30, "target": 32, "makes": 32, "effects": 60}


def page(analysis: Analysis) -> str:
    """Return the page; a longer graph gives its first `MOST_NODES` nodes and a note."""
    title = escape(f"{analysis.name}: {len(analysis.nodes)} nodes")
    left = len(analysis.nodes) - MOST_NODES
    note = f"<p>{left} more nodes are not drawn; the text below counts them.</p>" if left > 0 else ""
    return _PAGE.format(title=title, note=note, figure=figure(analysis), text=escape(render(analysis)))


def figure(analysis: Analysis) -> str:
    """Return the rows and lines as an SVG fragment, to embed in another page."""
    nodes = list(analysis.nodes)[:MOST_NODES]
    margin = _LANES * _LANE + 10
    parts = [f'<text x="{margin + x}" y="12" font-weight="bold">{escape(name)}</text>' for name, x in _COLUMNS]
    parts += _lines(nodes)
    most_s = max((each.seconds or 0.0 for each in analysis.nodes.values()), default=0.0)
    for row, node in enumerate(nodes):
        figures = analysis.nodes[node]
        parts += _row(node, figures, _middle(row), margin, (most_s, analysis.peak_bytes))
    height, width = _middle(len(nodes)), margin + _WIDTH
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" font-size="11" fill="#222">{"".join(parts)}</svg>'


def _middle(row: int) -> int:
    return (row + 1) * _ROW + _ROW // 2


def _row(node: Node, figures: NodeFigures, y: int, margin: int, most: tuple[float, int]) -> Iterator[str]:
    made, takes, arithmetic, moves, live = cells(figures)
    target = node._pretty_print_target(node.target)
    lines = [f"{node.name} = {node.op} {target}", made, f"{takes}, {arithmetic}, {moves} moved, {live} live"]
    lines += [*figures.effects, *([str(figures.unknown)] if figures.unknown is not None else [])]
    lines += [source] if (source := str(node.meta.get("source", ""))) else []
    yield (
        f'<g><title>{escape(chr(10).join(lines))}</title><rect x="{margin - 4}" y="{y - _ROW // 2 + 1}" '
        f'width="{_WIDTH}" height="{_ROW - 2}" fill="{_colour(figures)}"/>'
    )
    shares = {
        "time": (figures.seconds or 0.0) / most[0] if most[0] else 0.0,
        "live memory": figures.live_bytes / most[1] if most[1] else 0.0,
    }
    words = {
        "node": node.name, "target": target, "makes": made, "time": takes, "live memory": live,
        "effects": "; ".join(figures.effects),
    }  # fmt: skip
    for name, x in _COLUMNS:
        if name in shares:
            width = _BAR * shares[name]
            yield f'<rect x="{margin + x}" y="{y - 6}" width="{width:.1f}" height="12" fill="#9fb8d8"/>'
        yield f'<text x="{margin + x}" y="{y + 4}">{escape(_cut(words[name], _CUT.get(name, 20)))}</text>'
    yield "</g>"


def _lines(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a line for each value that is used beyond the next row, in the first free lane."""
    rows = {node: row for row, node in enumerate(nodes)}
    free, busy = list(range(_LANES)), list[tuple[int, int]]()
    for row, node in enumerate(nodes):
        while busy and busy[0][0] <= row:
            heapq.heappush(free, heapq.heappop(busy)[1])
        uses = sorted(rows[user] for user in node.users if user in rows)
        if not uses:
            continue
        lane = heapq.heappop(free) if free else _LANES - 1
        if lane < _LANES - 1:
            heapq.heappush(busy, (uses[-1], lane))
        x = (_LANES - lane) * _LANE
        ends = f'<line x1="{x}" y1="{_middle(row)}" x2="{x}" y2="{_middle(uses[-1])}" stroke="#7a8ca5"/>'
        dots = (f'<circle cx="{x}" cy="{_middle(use)}" r="2.2" fill="#2d6a9f"/>' for use in uses)
        start = f'<circle cx="{x}" cy="{_middle(row)}" r="2.2" fill="#fff" stroke="#2d6a9f"/>'
        yield f"<g><title>{escape(node.name)}</title>{ends}{start}{''.join(dots)}</g>"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def dot_text(analysis: Analysis) -> str:
    """Return the graph in the DOT language; a longer graph gives its first `MOST_IN_DOT` nodes and a note.

    Source of the format: "DOT Language", https://graphviz.org/doc/info/lang.html.
    """
    drawn = dict(list(analysis.nodes.items())[:MOST_IN_DOT])
    numbers = {node: number for number, node in enumerate(drawn)}
    lines = ["digraph {", 'node [shape=box style=filled fontname="sans-serif" fontsize=10];']
    if len(drawn) < len(analysis.nodes):
        left = len(analysis.nodes) - len(drawn)
        lines.append(f'note [label="{left} more nodes are not drawn" shape=note];')
    for node, figures in drawn.items():
        words = [f"{node.name}: {node._pretty_print_target(node.target)}", *_figures(figures), *figures.effects]
        label = "\\n".join(map(_quoted, words))
        lines.append(f'n{numbers[node]} [label="{label}" fillcolor="{_colour(figures)}"];')
        lines += [f"n{numbers[given]} -> n{numbers[node]};" for given in node.all_input_nodes]
    return "\n".join([*lines, "}"])


def _svg(analysis: Analysis) -> str:
    """Return the graph as SVG.

    Raises:
        FxlibError: graphviz is not installed, or its `dot` fails.
    """
    program = shutil.which("dot")
    if program is None:
        raise FxlibError("graphviz is not installed", where="dot", hint="Install it, or draw an .html page.")
    try:
        ran = subprocess.run(
            [program, "-Tsvg"],
            input=dot_text(analysis).encode(),
            capture_output=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        problem = error.stderr.decode(errors="replace").strip()
        raise FxlibError(f"graphviz failed: {problem:.200}", where="dot") from error
    except subprocess.TimeoutExpired as error:
        raise FxlibError(
            f"graphviz took longer than {_TIMEOUT_S} s", where="dot", hint="Draw an .html page instead."
        ) from error
    return ran.stdout.decode()


def _colour(figures: NodeFigures) -> str:
    """Return the colour of a node: grey if it is unknown, warm if it has effects."""
    if figures.unknown is not None:
        return _UNKNOWN
    return _EFFECT if figures.effects else _CALM


def _figures(figures: NodeFigures) -> list[str]:
    made, takes, arithmetic, moves, _ = cells(figures)
    known = [made] if figures.tensors or figures.unknown is not None else []
    if figures.operations:
        known.append(", ".join([*([takes] if figures.seconds is not None else []), arithmetic, moves]))
    return known


def _quoted(text: str) -> str:
    """Return a text escaped for use between the quotes of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }}
h1 {{ font-size: 20px; }} pre {{ font-size: 12px; overflow-x: auto; }}
</style></head><body><h1>{title}</h1>
<p>Warm rows have effects, grey ones are unknown. Lines join a value (ring) to its uses (dots); rest the pointer on
anything for all that is known of it.</p>
{note}{figure}
<pre>{text}</pre>
</body></html>
"""

_FORMS: Mapping[str, Callable[[Analysis], str]] = {".html": page, ".svg": _svg, ".dot": dot_text}
