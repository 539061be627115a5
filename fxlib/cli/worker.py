"""`fxlib worker`: replace this process by a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from fxlib.cli.applications import command, require, started_as

if TYPE_CHECKING:
    from fxlib.cli.options import Commands

NAME = "worker"


def add_to(commands: Commands) -> None:
    """Add the command to the list; the worker itself reads its options."""
    commands.add_parser(NAME, help="claim jobs of a service, rewrite and measure them here (fxlib worker --help)")


def run(arguments: Sequence[str]) -> NoReturn:
    """Become `python -m fxlib_workers`, with the same arguments.

    Raises:
        FxlibError: the distribution `fxlib-workers` is not installed.
    """
    require("fxlib-workers", "workers")
    os.execve(sys.executable, command("fxlib_workers", arguments), started_as(NAME))  # noqa: S606 - replacing the process is what the command does
