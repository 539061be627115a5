"""`fxlib capabilities`: what a service and its workers can do, and how well each contains the code it runs."""

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
        "capabilities",
        help="a service's limits, recipes and workers, with the containment level of each",
        description="Show what a service can do: versions, limits, recipes, and its live workers.",
    )
    add_service(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what the service can do."""
    with endpoint_of(options).connect() as client:
        found = client.capabilities()
    if options.json:
        from google.protobuf.json_format import MessageToDict

        say_json(MessageToDict(found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        say(_text(found))
    return 0


def _text(found: jobs_pb2.GetCapabilitiesResponse) -> str:
    from fxlib.spec.labels import show_labels
    from fxlib.utils.text import table

    service = [
        ["fxlib", found.fxlib_version],
        ["torch", ", ".join(found.torch_versions) or "-"],
        ["recipes", ", ".join(found.recipes)],
        ["largest blob", f"{found.max_blob_bytes:,} bytes"],
        ["largest graph", f"{found.max_graph_nodes:,} nodes"],
    ]
    workers = [["worker", "containment", "fxlib", "torch", "hardware", "labels", "modules"]]
    for each in found.workers:
        modules = ", ".join(each.allowed_modules) or "-"
        labels = show_labels(each.labels) or "-"
        level = each.containment or "?"
        workers.append([each.worker_id, level, each.fxlib_version, each.torch_version, each.hardware, labels, modules])
    shown = table(workers, indent="") if found.workers else ["no live worker"]
    return "\n".join([*table(service, indent=""), "", *shown])
