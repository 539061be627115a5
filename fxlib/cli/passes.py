"""`fxlib passes`: list the passes and the recipes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fxlib.cli.options import add_service, endpoint_of
from fxlib.cli.printing import say, say_json

if TYPE_CHECKING:
    from fxlib.cli.options import Commands
    from fxlib.v1 import jobs_pb2


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "passes",
        help="list passes and recipes, of this library or of a service",
        description="List passes and recipes: this library's own, or with --service those of a service.",
    )
    add_service(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the passes and recipes."""
    if options.service:
        with endpoint_of(options).connect() as client:
            known = client.passes()
    else:
        from fxlib.protocol import catalogue_to_proto

        known = catalogue_to_proto()
    if options.json:
        from google.protobuf.json_format import MessageToDict

        say_json(MessageToDict(known, preserving_proto_field_name=True))
    else:
        say(_text(known))
    return 0


def _text(known: jobs_pb2.ListPassesResponse) -> str:
    from fxlib.utils.text import table

    recipes = [["recipe", "passes", ""], *([each.name, ", ".join(each.passes), each.summary] for each in known.recipes)]
    passes = [["pass", "preserves", "needs", ""]]
    passes += [[each.name, each.preserves, ", ".join(each.needs) or "-", each.summary] for each in known.passes]
    options = [["pass", "option", "type", "default", ""]]
    for each in known.passes:
        options += [[each.name, one.name, one.type, one.default_value, one.doc] for one in each.options]
    tables = (table(rows, indent="") for rows in (recipes, passes, options))
    return "\n\n".join(map("\n".join, tables))
