"""An analysis as text for a person: totals, and the nodes that take longest."""

from __future__ import annotations

from fxlib.inspection.analyzing import Analysis, NodeFigures
from fxlib.inspection.tensors import Size, number
from fxlib.spec.report_text import seconds, table

_LONGEST = 20


def render(analysis: Analysis) -> str:
    """Lay an analysis out: totals, the nodes that take longest (or do most), and what is unknown."""
    moved = f"{size(analysis.read_bytes)} read, {size(analysis.written_bytes)} written"
    held = f"{size(analysis.state_bytes)} of parameters and buffers, {size(analysis.input_bytes)} of inputs"
    lines = [
        f"{analysis.name}: {len(analysis.nodes)} nodes, {flops(analysis.flops)}, {moved}",
        f"memory: {held}; {size(analysis.peak_bytes)} at the most, at {analysis.peak_node}",
    ]
    if analysis.device is not None:
        lines.append(f"one forward on {analysis.device.name}: {seconds(analysis.seconds)}, by the model of the device")
    ranked = sorted(analysis.nodes.items(), key=lambda each: _weight(each[1]), reverse=True)[:_LONGEST]
    rows = [[node.name, *cells(figures), "; ".join(figures.effects) or "-"] for node, figures in ranked]
    heads = ["node", "makes", "takes", "arithmetic", "moves", "live", "effects"]
    lines += ["", f"the {len(rows)} nodes with most to do", *table([heads, *rows], right=(2, 3, 4, 5))]
    if analysis.unknown:
        lines += ["", "unknown", *(f"  {name}: {why}" for name, why in analysis.unknown.items())]
    if analysis.undeclared:
        heading = "remote functions that declare nothing; what reads= would be worth, by the cost model"
        lines += ["", heading, *(f"  {each}" for each in analysis.undeclared)]
    return "\n".join(lines)


def cells(figures: NodeFigures) -> list[str]:
    """Return what a node makes, how long it takes, its arithmetic, the bytes that it moves, and those that are live."""
    made = ", ".join(map(str, figures.tensors)) or ("unknown" if figures.unknown is not None else "-")
    moved = figures.read_bytes + figures.written_bytes
    return [made, seconds(figures.seconds), flops(figures.flops), size(moved), size(figures.live_bytes)]


def flops(value: Size) -> str:
    """Write an amount of arithmetic with a unit that fits; a symbolic one by its hint."""
    known = number(value)
    if known is None:
        return "unknown"
    amount = float(known)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TFLOP"


def size(value: Size) -> str:
    """Write bytes with a unit that fits; a symbolic amount by its hint."""
    known = number(value)
    if known is None:
        return "unknown"
    amount = float(known)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def _weight(figures: NodeFigures) -> tuple[float, int]:
    moved = (number(figures.read_bytes) or 0) + (number(figures.written_bytes) or 0)
    return figures.seconds or 0.0, (number(figures.flops) or 0) + moved
