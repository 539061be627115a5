"""`fxlib backup` and `fxlib restore`: replace this process by the service's command of that name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from fxlib.cli.applications import command, require

if TYPE_CHECKING:
    from fxlib.cli.options import Commands

NAMES: Final = ("backup", "restore")


def add_to(commands: Commands) -> None:
    """Add the commands to the list; the service reads their options."""
    commands.add_parser("backup", help="back a service up, while it runs (fxlib backup --help)")
    commands.add_parser("restore", help="restore a backup into an empty folder (fxlib restore --help)")


def run(arguments: Sequence[str]) -> NoReturn:
    """Become `python -m fxlib_service` with these arguments, the first of which is one of the names.

    Raises:
        FxlibError: the distribution `fxlib-service` is not installed.
    """
    require("fxlib-service", "service")
    os.execv(sys.executable, command("fxlib_service", arguments))  # noqa: S606 - replacing the process is what the command does
