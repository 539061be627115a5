"""A graph as a picture by graphviz: the text that `dot` reads, and the SVG that it makes of it."""

from __future__ import annotations

import shutil
import subprocess

from fxlib.errors import FxlibError
from fxlib.inspection.analyzing import Analysis, NodeFigures, cells

MOST_NODES = 1000
"""`dot` takes more than twice the time for twice the nodes."""
_TIMEOUT_S = 120
_CALM, _EFFECT, _UNKNOWN = "#eef3fa", "#f6d9c4", "#dddddd"


def dot_text(analysis: Analysis) -> str:
    """Return the graph in the DOT language; of a longer one the first `MOST_NODES` nodes, and a note.

    Source of the format: "DOT Language", https://graphviz.org/doc/info/lang.html.
    """
    drawn = dict(list(analysis.nodes.items())[:MOST_NODES])
    numbers = {node: number for number, node in enumerate(drawn)}
    lines = ["digraph {", 'node [shape=box style=filled fontname="sans-serif" fontsize=10];']
    if len(drawn) < len(analysis.nodes):
        left = len(analysis.nodes) - len(drawn)
        lines.append(f'note [label="{left} more nodes are not drawn" shape=note];')
    for node, figures in drawn.items():
        words = [f"{node.name}: {node._pretty_print_target(node.target)}", *_figures(figures), *figures.effects]
        label = "\\n".join(map(_quoted, words))
        lines.append(f'n{numbers[node]} [label="{label}" fillcolor="{colour(figures)}"];')
        lines += [f"n{numbers[given]} -> n{numbers[node]};" for given in node.all_input_nodes]
    return "\n".join([*lines, "}"])


def svg(analysis: Analysis) -> str:
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
        told = error.stderr.decode(errors="replace").strip()
        raise FxlibError(f"graphviz failed: {told:.200}", where="dot") from error
    except subprocess.TimeoutExpired as error:
        raise FxlibError(
            f"graphviz took longer than {_TIMEOUT_S} s", where="dot", hint="Draw an .html page instead."
        ) from error
    return ran.stdout.decode()


def colour(figures: NodeFigures) -> str:
    """Return the colour of a node: grey where it is unknown, warm where it has effects."""
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
    """Return a text as it stands between the quotes of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
