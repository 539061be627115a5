"""Processes of tests that begin with torch and this library imported, which takes longer than what most of them do.

They are forked from one process that has imported all of it and has done nothing else, so that each is as fresh as one
that Python starts anew. What tests of starting itself are about is started by `subprocess`. Where tests run in several
processes, these are forked from it as well.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

_IMPORTED = [
    "fxlib_service.server",
    "fxlib_workers.agent",
    "fxlib.client.client",
    "fxlib.ps.local",
    "tests.shared.rpc_world",
    "tests.collectives.world",
]
_IMPORTED_BY_TESTS = ["fxlib.cli.main", "fxlib.inspection", "torch._dynamo"]
"""What most processes that run tests come to import besides, but for plugins of pytest, which imports these itself."""
_LAST = "tests.shared.set_aside"
"""What sets aside all that was imported, so that no process which is forked copies it to look for garbage there."""
_SHARED = "FXLIB_TEST_FORKS"
"""The environment variable that says where the process is that others are forked from."""


def forks() -> ForkServerContext:
    """Return the context of `multiprocessing` whose processes begin with these imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, _LAST])
    return context


def begin() -> None:
    """Start the process that these are forked from, for this process and those that it starts.

    It imports while this one goes on.
    """
    forks().set_forkserver_preload([*_IMPORTED, *_IMPORTED_BY_TESTS, _LAST])
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    os.environ[_SHARED] = f"{os.getpid()} {server._forkserver_alive_fd} {server._forkserver_address}"


def share() -> None:
    """Have processes forked from the one that the process which started this one has begun, if it has."""
    if _SHARED not in os.environ:
        return
    pid, alive, address = os.environ[_SHARED].split()
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(f"/proc/{pid}/fd/{alive}", os.O_WRONLY)
    mock.patch.object(server, "ensure_running").start()


class Module:
    """`python -m module arguments`, in this process's environment.

    Args:
        module: its name.
        arguments: those of its command line.
        log: the file to which its errors are written, and its output if that has no other one.
        out: the file to which its output is written.
        folder: the one that it works in; this process's own if none is given.
    """

    def __init__(
        self, module: str, *arguments: str, log: Path, out: Path | None = None, folder: Path | None = None
    ) -> None:
        self._process: ForkServerProcess = forks().Process(
            target=_run, args=(module, arguments, dict(os.environ), folder or Path.cwd(), (out or log, log))
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
        return self.wait(within_s)

    def wait(self, within_s: float = 200.0) -> int:
        """Wait until it has ended, and return its status."""
        self._process.join(within_s)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def until_written(self, ready: Path, within_s: float = 200.0) -> str:
        """Wait for the lines that it writes to a file, and return them."""
        limit = time.monotonic() + within_s
        while not ready.exists() or not ready.read_text().endswith("\n"):
            assert self.is_running(), "it ended"
            assert time.monotonic() < limit, "it does not come up"
            time.sleep(0.02)
        return ready.read_text()


def printed(program: str, folder: Path) -> str:
    """Run the text of a program, which is written to a folder; return what it prints.

    Raises:
        AssertionError: it fails; the message is what it wrote of that.
    """
    (folder / "program.py").write_text(program)
    out, log = folder / "program.out", folder / "program.log"
    assert Module("program", log=log, out=out, folder=folder).wait() == 0, log.read_text()
    return out.read_text()


def _run(
    module: str, arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path, files: tuple[Path, Path]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    # Its own processes are forked from where it is, and not from a process that imports all of it once more.
    mock.patch.object(forkserver._forkserver, "ensure_running").start()
    sys.path.insert(0, str(folder))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def python(folder: Path) -> Path:
    """Write a command to a folder, which runs a file of Python in a process that is forked."""
    if _SHARED not in os.environ:
        begin()
    code = "from tests.shared import forked; forked.python_c()"
    file = "import runpy; runpy.run_path('$2', run_name='__main__')"
    command = folder / "python"
    command.write_text(f'#!/bin/sh\n[ "$1" = -u ] && exec {sys.executable} -c "{code}" "{file}"\n')
    command.chmod(0o700)
    return command


def python_c() -> None:
    """Run a program, the last argument, as `python -c` does, in a process that is forked."""
    share()
    streams = [Connection(os.dup(each)) for each in range(3)]
    process = forks().Process(target=_run_program, args=(sys.argv[-1], dict(os.environ), *streams))
    process.start()
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    for each in streams:
        each.close()
    os.closerange(0, 2)  # whoever reads there is told when the other process has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other one is sent it, too
    process.join()
    sys.exit(process.exitcode)


def _run_program(program: str, environment: Mapping[str, str], *streams: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, each in enumerate(streams):
        os.dup2(each.fileno(), number)
        each.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.modules["__main__"] = main = ModuleType("__main__")
    try:
        exec(program, vars(main))  # noqa: S102 - as `python -c` does
    finally:
        atexit._run_exitfuncs()  # which `multiprocessing` leaves out
