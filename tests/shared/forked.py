"""Processes of tests that begin with torch and this library imported, which takes longer than what most of them do.

They are forked from one process that has imported all of it and has done nothing else, so that each is as fresh as one
that Python starts anew. What tests of starting itself are about is started by `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

_IMPORTED = ["fxlib_service.server", "fxlib.ps.local", "tests.shared.rpc_world", "tests.collectives.world"]


def forks() -> ForkServerContext:
    """Return the context of `multiprocessing` whose processes begin with these imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class Module:
    """`python -m module arguments`, in this process's environment."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        self._process: ForkServerProcess = forks().Process(
            target=_run, args=(module, arguments, dict(os.environ), Path.cwd(), log)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def end(self, number: signal.Signals = signal.SIGTERM, within_s: float = 200.0) -> int:
        """Send it a signal, unless it has ended; wait until it has, and return its status."""
        if self._process.is_alive():
            os.kill(self.pid, number)
        self._process.join(within_s)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def until_written(self, ready: Path, within_s: float = 200.0) -> str:
        """Wait for a file that it writes as a whole, and return what is in it."""
        limit = time.monotonic() + within_s
        while not ready.exists():
            assert self.is_running(), "it ended"
            assert time.monotonic() < limit, "it does not come up"
            time.sleep(0.02)
        return ready.read_text()


def _run(module: str, arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path, log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(written, stream)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
