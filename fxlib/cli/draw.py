"""`fxlib draw FILE -o PICTURE`: a saved graph as a page or an SVG."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fxlib.cli.graph import add_graph_command, analysis_of
from fxlib.cli.options import output
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    from fxlib.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_graph_command(
        commands,
        "draw",
        does="draw a saved graph (.fxg), with time, bytes and effects on its nodes",
        about="Draw a file of fxlib.save for inputs of given shapes",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=output,
        metavar="PICTURE",
        help="file to write: .html, which needs nothing else, .svg by graphviz, or .dot for it",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draw the graph, and write the picture.

    Raises:
        FxlibError: the file, an input or the device is not valid, or the picture cannot be written.
    """
    from fxlib.inspection import draw

    found = analysis_of(options)
    try:
        draw(found, options.output)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=options.output) from error
    return 0
