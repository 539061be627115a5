"""`fxlib reasons`: print what the reason codes in reports, logs and metrics mean."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fxlib.cli.printing import say, say_json
from fxlib.errors import FxlibError
from fxlib.reasons import Reason

if TYPE_CHECKING:
    from fxlib.cli.options import Commands


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "reasons",
        help="what the reasons mean that reports name",
        description="List the reasons why a call was left alone, a rewrite declined, or an original kept.",
    )
    parser.add_argument("codes", nargs="*", metavar="CODE", help="the reasons to explain; default: all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the reasons.

    Raises:
        FxlibError: a code names no reason.
    """
    codes = [each.upper() for each in options.codes] or list(Reason.__members__)
    if unknown := next((each for each in codes if each not in Reason.__members__), None):
        raise FxlibError(f"no reason is called {unknown}", hint="`fxlib reasons` lists them.")
    rows = [(each, Reason[each].sentence("...")) for each in codes]
    if options.json:
        say_json(dict(rows))
    elif options.markdown:
        say(markdown(rows).removesuffix("\n"))
    else:
        width = max(len(code) for code, _ in rows)
        say("\n".join(f"{code:{width}}  {sentence}" for code, sentence in rows))
    return 0


def markdown(rows: list[tuple[str, str]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| code | means |", "|---|---|", *(f"| `{code}` | {sentence} |" for code, sentence in rows)]
    return "".join(f"{line}\n" for line in lines)
