"""Child processes that do not outlive this one."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_PR_SET_PDEATHSIG = 1


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command `python -m module ARGS`."""
    # -P: a folder called like the module, where the command was given, is the user's own.
    return [sys.executable, "-P", "-m", module, *arguments]


class Child:
    """`python -m module ARGS`, ended when the `with` block is, and by the kernel if this process is killed."""

    def __init__(self, module: str, arguments: Sequence[str], *, grace_s: float = 15.0) -> None:
        """Start it.

        Args:
            module: the package to run.
            arguments: its command line.
            grace_s: how long it may take to end after SIGTERM, in seconds, before it is killed.
        """
        self.module, self._grace_s = module, grace_s
        self._process = subprocess.Popen(
            command(module, arguments),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,  # what it writes is for the log; this process's output is for programs
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
        """Its process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; negative for a signal; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Ask it to end, wait, and kill it if it does not."""
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
