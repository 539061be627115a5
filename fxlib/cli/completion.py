"""`fxlib completion SHELL`: print a script that lets a shell complete commands, options, recipes, passes and files."""

from __future__ import annotations

import argparse
import json
import subprocess
from contextlib import suppress
from functools import partial
from typing import Final

from fxlib.cli import jobs, serve
from fxlib.cli.applications import WORKER, command, require
from fxlib.cli.printing import say
from fxlib.errors import FxlibError

_SHELLS: Final = ("bash", "zsh", "fish")
_APPLICATIONS: Final = {serve.NAME: ("fxlib-service", "service"), WORKER: ("fxlib-workers", "workers")}
_EPILOG = """to have it in every new shell:
  bash    fxlib completion bash > ~/.local/share/bash-completion/completions/fxlib
  zsh     fxlib completion zsh > DIR/_fxlib     DIR being one of $fpath
  fish    fxlib completion fish > ~/.config/fish/completions/fxlib.fish
in this shell alone: eval "$(fxlib completion bash)"
"""


def add_to(parser: argparse.ArgumentParser, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of the whole parser, which it completes."""
    own = commands.add_parser(
        "completion",
        help="have a shell complete these commands, their options, recipes, passes and files",
        description="Print what makes a shell complete the words of this command line.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=" or ".join(_SHELLS))
    own.set_defaults(run=partial(_run, parser, commands))


def _run(
    parser: argparse.ArgumentParser,
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    options: argparse.Namespace,
) -> int:
    import shtab

    for name, (distribution, folder) in _APPLICATIONS.items():
        with suppress(FxlibError):  # one that is not installed has no options to complete
            require(distribution, folder)
            _add_options(commands.choices[name], distribution.replace("-", "_"))
    _take_over(commands.choices[serve.NAME], serve.options_parser())
    _take_over(commands.choices[jobs.NAME], _actions_of(commands.choices[jobs.NAME]).choices["list"])
    _complete_values(parser)
    say(shtab.complete(parser, options.shell))
    return 0


def _take_over(parser: argparse.ArgumentParser, other: argparse.ArgumentParser) -> None:
    """Add the options of another parser to one that lacks them."""
    for action in other._actions:
        if action.option_strings and not set(action.option_strings) & set(parser._option_string_actions):
            parser._add_action(action)


def _add_options(parser: argparse.ArgumentParser, module: str) -> None:
    """Add the options of an application, which it lists itself; what they take may be a file."""
    ran = subprocess.run(command(module, ["--print-options"]), check=False, capture_output=True)
    for name, option in (json.loads(ran.stdout) if ran.returncode == 0 else {}).items():
        if isinstance(option["value"], bool):
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(f"--{name}", metavar="FILE")


def _actions_of(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Return the commands of a parser that has some."""
    return next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Set what each argument below a parser takes: a recipe, a pass, a reason, a file or a folder."""
    import shtab

    from fxlib.passes.infra.base import REGISTRY
    from fxlib.reasons import Reason
    from fxlib.recipes import RECIPES

    words = {"recipe": [*RECIPES], "diff": [*RECIPES], "passes": sorted(REGISTRY), "codes": [*Reason.__members__]}
    kinds = {"FILE": shtab.FILE, "PICTURE": shtab.FILE, "ZOO.toml": shtab.FILE, "DIR": shtab.DIRECTORY}
    kinds["DIR|URL"] = shtab.DIRECTORY
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_values(each)
        elif action.nargs != 0 and action.dest in words:
            action.choices = words[action.dest]
        elif isinstance(action.metavar, str) and action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]  # shtab's own protocol
