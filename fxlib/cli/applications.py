"""The applications of fxlib, the service and a worker: each is a distribution, run as a child or in this one's place.

`fxlib worker`, `fxlib backup` and `fxlib restore` replace this process by the application that has the command.
`fxlib serve` (`fxlib.cli.serve`) runs both applications as children.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Self

from fxlib.errors import FxlibError
from fxlib.utils.settings import STARTED_AS

if TYPE_CHECKING:
    from fxlib.cli.options import Commands

WORKER: Final = "worker"
NAMES: Final = (WORKER, "backup", "restore")
"""The commands that replace this process."""

_PR_SET_PDEATHSIG = 1
_GRACE_S: Final = 15.0
"""Seconds that an application has to end after SIGTERM before it is killed."""


def add_to(commands: Commands) -> None:
    """Add the commands that replace this process to the list; the applications read their options."""
    for name, text in (
        (WORKER, "claim jobs of a service, rewrite and measure them here (fxlib worker --help)"),
        ("backup", "back a service up, while it runs (fxlib backup --help)"),
        ("restore", "restore a backup into an empty folder (fxlib restore --help)"),
    ):
        commands.add_parser(name, help=text)


def run(arguments: Sequence[str]) -> NoReturn:
    """Become `python -m fxlib_workers`, or `python -m fxlib_service` for its command of that name.

    Args:
        arguments: one of the names, and what follows it on the command line.

    Raises:
        FxlibError: the application is not installed.
    """
    name, *given = arguments
    if name == WORKER:
        require("fxlib-workers", "workers")
        os.execve(sys.executable, command("fxlib_workers", given), started_as(name))  # noqa: S606 - see `NAMES`
    require("fxlib-service", "service")
    os.execv(sys.executable, command("fxlib_service", arguments))  # noqa: S606 - see `NAMES`


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command `python -m module ARGS`."""
    # -P keeps a folder of the user's that has the module's name from being imported instead.
    return [sys.executable, "-P", "-m", module, *arguments]


class Child:
    """A process `python -m module ARGS`. It ends with the `with` block, or by the kernel if this process is killed."""

    def __init__(self, module: str, arguments: Sequence[str], *, grace_s: float = _GRACE_S) -> None:
        """Start the package `module` with a command line; `grace_s` is how long it has to end after SIGTERM."""
        self.module = module
        self._grace_s = grace_s
        self._process = subprocess.Popen(
            command(module, arguments),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,  # its output is log text, whereas programs read the output of this process
            process_group=0,  # a Ctrl-C of the terminal ends this process, which then ends its children in order
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code of the process, negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Send SIGTERM, wait, and kill the process if it does not end in time."""
        if self.code is None:
            self._process.terminate()
            try:
                self._process.wait(self._grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def die_with_parent() -> None:
    """Let the kernel end this process when its parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_NAME = re.compile(r"[A-Za-z0-9._-]+")


def started_as(name: str) -> dict[str, str]:
    """Return the environment in which an application names the command `name` that starts it."""
    return {**os.environ, STARTED_AS: f"fxlib {name}"}


def require(application: str, folder: str) -> None:
    """Check that the distribution of an application is installed, and all its requirements.

    Args:
        application: name of the distribution, such as "fxlib-service".
        folder: folder of the distribution in a checkout.

    Raises:
        FxlibError: it or a requirement is not installed; the error says how to install them.
    """
    hint = f"Run: pip install {application} (in a checkout: pip install ./{folder})"
    needed = _requirements(application)
    if needed is None:
        raise FxlibError(f"{application} is not installed", hint=hint)
    for package in needed:
        if _requirements(package) is None:
            raise FxlibError(f"{package} is not installed, which {application} needs", hint=hint)


def _requirements(distribution: str) -> list[str] | None:
    """Return what an installed distribution requires, without extras; None if it is not installed."""
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        return None
    return [found[0] for line in lines if "extra ==" not in line and (found := _NAME.match(line)) is not None]
