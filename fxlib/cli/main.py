"""The entry point of the command: it parses the arguments, runs one command, and prints errors as one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from fxlib.cli import (
    applications,
    completion,
    dashboard,
    inspection,
    jobs,
    listings,
    optimize,
    profile,
    serve,
    show,
    zoo,
)
from fxlib.cli.options import UsageError
from fxlib.cli.printing import warn
from fxlib.errors import FxlibError, of_system
from fxlib.utils.command_line import Parser

_EPILOG = """exit codes: 0 done; 1 it failed, or there is no answer; 2 the command line is wrong; 130 interrupted

a first look:
  fxlib serve                          a service and a worker on this machine
  fxlib optimize my.models:factory     a model's answer, measured
  fxlib jobs                           what the service did
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 misused, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # These commands hand their options on, --help included.
    if given[:1] == [serve.NAME]:
        return _guarded(partial(serve.run, given[1:]))
    if given and given[0] in applications.NAMES:
        return _guarded(partial(applications.run, given))
    if given[:1] == [jobs.NAME]:
        given = jobs.spelled_out(given)
    parsed = _parser().parse_args(given)
    return _guarded(lambda: parsed.run(parsed))


def _parser() -> argparse.ArgumentParser:
    from fxlib import __version__

    parser: argparse.ArgumentParser = Parser(
        prog="fxlib",
        description="Make distributed training jobs faster without touching the model, and prove it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fxlib {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, applications, optimize, jobs, listings, dashboard, zoo, profile, show):
        command.add_to(commands)
    inspection.add_to(commands)
    completion.add_to(parser, commands)
    return parser


def _guarded(run: Callable[[], int]) -> int:
    try:
        code = run()
        sys.stdout.flush()  # a closed pipe raises here, and not when the interpreter exits
        return code
    except FxlibError as error:
        warn(f"fxlib: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # The reader closed the pipe, so that what is still buffered must not be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a read-only folder, a full disk, a file where a folder is wanted
        warn(f"fxlib: {of_system(error)}")
        return 1
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            warn(f"fxlib: {note}")
        return 130
