"""`fxlib capabilities`, `fxlib passes`, `fxlib reasons`: what there is to ask for, and what answers mean.

They list a service's limits and workers, with how well each contains the code it runs; passes and recipes, of this
library or of a service; and the reasons in reports.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from functools import partial
from typing import TYPE_CHECKING

from fxlib.cli.options import UsageError, add_service, endpoint_of
from fxlib.cli.printing import say, say_json
from fxlib.reasons import Reason
from fxlib.utils.text import did_you_mean, plain, table

if TYPE_CHECKING:
    from fxlib.cli.options import Commands
    from fxlib.v1 import jobs_pb2

_NARROWEST = 60
"""Columns of the narrowest terminal that text is wrapped for."""


def add_to(commands: Commands) -> None:
    """Add the commands."""
    _add_capabilities(commands)
    _add_passes(commands)
    _add_reasons(commands)


def _add_capabilities(commands: Commands) -> None:
    parser = commands.add_parser(
        "capabilities",
        help="a service's limits, recipes and workers, with the containment level of each",
        description="Show what a service can do: versions, limits, recipes, and its live workers.",
    )
    add_service(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_capabilities)


def _capabilities(options: argparse.Namespace) -> int:
    """Print what the service can do."""
    with endpoint_of(options).connect() as client:
        found = client.capabilities()
    if options.json:
        from google.protobuf.json_format import MessageToDict

        say_json(MessageToDict(found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        say(_capabilities_text(found))
    return 0


def _capabilities_text(found: jobs_pb2.GetCapabilitiesResponse) -> str:
    from fxlib.spec.labels import show_labels

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


def _add_passes(commands: Commands) -> None:
    parser = commands.add_parser(
        "passes",
        help="list passes and recipes, of this library or of a service",
        description="List passes and recipes: this library's own, or with --service those of a service.",
    )
    add_service(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_passes)


def _passes(options: argparse.Namespace) -> int:
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
        say(_passes_text(known))
    return 0


def _passes_text(known: jobs_pb2.ListPassesResponse) -> str:
    recipes = [(each.name, [each.summary, ", ".join(each.passes)]) for each in known.recipes]
    passes = []
    for each in known.passes:
        needs = f"; needs {', '.join(each.needs)}" if each.needs else ""
        options = [f"{one.name} ({one.type}, default {one.default_value}): {one.doc}" for one in each.options]
        passes.append((each.name, [each.summary, f"preserves {each.preserves}{needs}", *options]))
    return "\n\n".join(["recipes:", *map(_entry, recipes), "passes:", *map(_entry, passes)])


def _entry(entry: tuple[str, list[str]]) -> str:
    """Return a name, and below it paragraphs that are as wide as the terminal."""
    name, paragraphs = entry
    wrap = partial(textwrap.wrap, width=max(_NARROWEST, shutil.get_terminal_size().columns - 1))
    lines = [wrap(plain(each), initial_indent=" " * 4, subsequent_indent=" " * 6) for each in paragraphs]
    return "\n".join([f"  {plain(name)}", *(line for each in lines for line in each)])


def _add_reasons(commands: Commands) -> None:
    parser = commands.add_parser(
        "reasons",
        help="what the reasons in reports mean",
        description="List the reasons why a call was left alone, a rewrite declined, or an original kept.",
    )
    parser.add_argument("codes", nargs="*", metavar="CODE", help="the reasons to explain; default: all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    parser.set_defaults(run=_reasons)


def _reasons(options: argparse.Namespace) -> int:
    """Print the reasons.

    Raises:
        UsageError: a code is not that of a reason.
    """
    codes = [each.upper() for each in options.codes] or list(Reason.__members__)
    if unknown := next((each for each in codes if each not in Reason.__members__), None):
        raise UsageError(
            f"no reason is called {unknown}",
            hint=did_you_mean(unknown, Reason.__members__) or "`fxlib reasons` lists them.",
        )
    rows = [(each, Reason[each].sentence("...")) for each in codes]
    if options.json:
        say_json(dict(rows))
    elif options.markdown:
        say(_markdown(rows).removesuffix("\n"))
    else:
        width = max(len(code) for code, _ in rows)
        say("\n".join(f"{code:{width}}  {sentence}" for code, sentence in rows))
    return 0


def _markdown(rows: list[tuple[str, str]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| code | means |", "|---|---|", *(f"| `{code}` | {sentence} |" for code, sentence in rows)]
    return "".join(f"{line}\n" for line in lines)
