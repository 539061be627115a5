"""`fxlib show FILE`: print what a saved graph or profile holds."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from fxlib.cli.options import UsageError, unreadable
from fxlib.cli.printing import say, say_json
from fxlib.cli.profile import show
from fxlib.errors import FxlibError, PassError

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from fxlib.cli.options import Commands
    from fxlib.spec.contract import Contract
    from fxlib.spec.profile import Profile


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "show",
        help="print what a saved graph (.fxg) or profile (.fxp) holds",
        description="Print what a file of fxlib.save or fxlib.save_profile holds; nothing in it is executed.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="file written by fxlib.save or fxlib.save_profile")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--code", action="store_true", help="print the Python code of its forward instead")
    shown.add_argument("--diff", metavar="RECIPE", help="print what each pass of a recipe does to that code instead")
    shown.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the file.

    Raises:
        FxlibError: the file cannot be read, or holds no valid graph or profile.
    """
    try:
        return _show(options)
    except OSError as error:
        hint = f"A job of the service is shown by: fxlib jobs show {options.file}" if _is_id(options.file.name) else ""
        raise unreadable(error, str(options.file), hint) from error


def _is_id(name: str) -> bool:
    return bool(re.fullmatch("[0-9a-f]{1,32}", name))


def _show(options: argparse.Namespace) -> int:
    import fxlib
    from fxlib.profiling import file

    with options.file.open("rb") as opened:
        if opened.read(len(file.MARK)) == file.MARK:
            return _show_profile(fxlib.load_profile(options.file), options)
    module = fxlib.load(options.file)
    if options.diff:
        _show_diffs(module, options.diff)
    elif options.code:
        say(module.code.strip())
    elif options.json:
        say_json(_facts(module))
    else:
        say(_text(module))
    return 0


def _show_profile(profile: Profile, options: argparse.Namespace) -> int:
    if options.code or options.diff:
        hint = f"Leave --{'code' if options.code else 'diff'} out."
        raise FxlibError("a profile holds no code", where=str(options.file), hint=hint)
    show(profile, as_json=options.json)
    return 0


def _show_diffs(module: GraphModule, recipe: str) -> None:
    """Print what each pass of a recipe changes, in colours if the output is a terminal."""
    from rich.console import Console
    from rich.text import Text

    from fxlib.recipes import recipes
    from fxlib.utils.text import plain

    console = Console(highlight=False, soft_wrap=True)
    try:
        chosen = recipes.get(recipe)
    except PassError as error:
        raise UsageError(str(error), where="--diff") from None
    for report in chosen.run(module, diffs=True).passes:
        for line in report.diff.splitlines():
            console.print(Text(plain(line), style=_STYLES.get(line[:1], "")))
        if not report.diff:
            console.print(Text(f"{report.name}: no change", style="dim"))


_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def _facts(module: GraphModule) -> dict[str, object]:
    return {
        "nodes": [
            {
                "name": node.name,
                "op": node.op,
                "target": _target(node),
                "args": str(node.args),
                "kwargs": {name: str(value) for name, value in node.kwargs.items()},
                "source": node.meta.get("source", ""),
            }
            for node in module.graph.nodes
        ],
        "calls": [dict(zip(_COLUMNS, _call(node), strict=True)) for node in _calls(module)],
        "parameters": {name: list(value.shape) for name, value in module.named_parameters()},
    }


def _text(module: GraphModule) -> str:
    from fxlib.utils.text import table

    nodes = list(module.graph.nodes)
    counted = ", ".join(f"{count} {op}" for op, count in Counter(node.op for node in nodes).items())
    elements = sum(value.numel() for value in module.parameters())
    lines = [f"{type(module).__name__}: {len(nodes)} nodes ({counted}); {elements:,} parameter elements", ""]
    rows = [[node.name, node.op, _target(node), _arguments(node)] for node in nodes]
    lines += table([["node", "op", "target", "arguments"], *rows], indent="")
    calls = [_call(node) for node in _calls(module)]
    lines += ["", "remote calls: none"] if not calls else ["", "remote calls", *table([list(_COLUMNS), *calls])]
    return "\n".join(lines)


_COLUMNS = ("node", "kind", "function", "to", "contract", "source")


def _calls(module: GraphModule) -> list[Node]:
    from fxlib.runtime import is_call, is_issue

    return [node for node in module.graph.nodes if is_call(node) or is_issue(node)]


def _call(node: Node) -> list[str]:
    from fxlib.runtime import is_issue
    from fxlib.runtime.ops.registry import is_batch, items_of

    to, function = (str(value) for value in (*node.args, "", "")[:2])
    if is_batch(node):
        function = ", ".join(each.function for each in items_of(node))
    kind = f"{_target(node).rpartition('.')[2]}{' (issued)' if is_issue(node) else ''}"
    return [node.name, kind, function, to, _contract(node.meta.get("contract")), node.meta.get("source", "")]


def _contract(contract: Contract | None) -> str:
    if contract is None:
        return "unknown: ordered with every other effect"
    words = ["pure"] if contract.pure else []
    words += [f"reads {', '.join(sorted(contract.reads))}"] if contract.reads else []
    words += [f"writes {', '.join(sorted(contract.writes))}"] if contract.writes else []
    words += ["commutes"] if contract.commutes else []
    words += [f"gradient {contract.gradient}"] if contract.gradient else []
    return "; ".join(words)


def _target(node: Node) -> str:
    return node._pretty_print_target(node.target)


def _arguments(node: Node) -> str:
    words = [str(each) for each in node.args] + [f"{name}={value}" for name, value in node.kwargs.items()]
    text = ", ".join(words)
    return text if len(text) <= 60 else f"{text[:57]}..."
