"""`fxlib analyze FILE`: print what a saved graph costs, without running it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fxlib.cli.graph import add_graph_command, analysis_of
from fxlib.cli.printing import say, say_json

if TYPE_CHECKING:
    from fxlib.cli.options import Commands
    from fxlib.inspection import Analysis


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_graph_command(
        commands,
        "analyze",
        does="print shapes, arithmetic, memory, time and effects of a saved graph (.fxg)",
        about="Print what a file of fxlib.save costs for inputs of given shapes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, every node")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Analyze the graph and print the analysis.

    Raises:
        FxlibError: the file, an input or the device is not valid.
    """
    found = analysis_of(options)
    say_json(_facts(found)) if options.json else say(found)
    return 0


def _facts(found: Analysis) -> dict[str, Any]:
    from fxlib.inspection.tensors import number
    from fxlib.spec.report import plain

    return {
        "nodes": [
            {
                "name": node.name,
                "makes": list(map(str, each.tensors)),
                "operators": [operation.name for operation in each.operations],
                "flops": number(each.flops),
                "read_bytes": number(each.read_bytes),
                "written_bytes": number(each.written_bytes),
                "live_bytes": each.live_bytes,
                "seconds": each.seconds,
                "effects": list(each.effects),
                "unknown": None if each.unknown is None else str(each.unknown),
            }
            for node, each in found.nodes.items()
        ],
        "flops": found.flops,
        "read_bytes": found.read_bytes,
        "written_bytes": found.written_bytes,
        "state_bytes": found.state_bytes,
        "input_bytes": found.input_bytes,
        "peak_bytes": found.peak_bytes,
        "peak_node": found.peak_node,
        "device": None if found.device is None else found.device.name,
        "seconds": found.seconds,
        "undeclared": plain(found.undeclared),
        "ahead": [
            {
                "call": each.name,
                "way": None if each.way is None else each.way.value,
                "reason": each.reason.name,
                "detail": each.detail,
                "remedy": each.remedy,
            }
            for each in found.ahead
        ],
    }
