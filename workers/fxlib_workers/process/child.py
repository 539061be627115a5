"""A process under a keeper, and the lines of JSON that its worker and it exchange."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, Final, Self, cast

Message = Mapping[str, Any]

FOLDER: Final = "FXLIB_WORKER_FOLDER"
"""The variable that tells a child its folder."""

_CHANNEL: Final = "FXLIB_WORKER_CHANNEL"
_LONGEST_LINE: Final = 1 << 20

_NEEDED: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LC_*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "PYTHONHASHSEED", "PYTHONWARNINGS", "FXLIB_DISABLE"),
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "MALLOC_*", "TORCH_*", "PYTORCH_*", "ATEN_*", "ONEDNN_*", "DNNL_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "TP_*"),
)
"""The variables that libraries need. A worker's others may hold credentials, which no stranger's graph is to see."""


class ChildEndedError(Exception):
    """The child's end of the channel is closed: it ended, or was ended."""


class Channel:
    """One end of a socket that carries one JSON object a line. Not shared between threads, but for `send`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    @classmethod
    def inherited(cls) -> Self:
        """Return the child's own end."""
        return cls(socket.socket(fileno=int(os.environ.pop(_CHANNEL))))

    def send(self, **message: object) -> None:
        """Write one message.

        Raises:
            ChildEndedError: nobody holds the other end.
        """
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChildEndedError from error

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None if none is complete in time.

        Raises:
            ChildEndedError: nobody holds the other end.
            ValueError: what came is not a message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                return None
            data = self._read()
            if len(self._received) > _LONGEST_LINE:
                raise ValueError("the line does not end")
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """Let the other end know that there is nobody any more."""
        self._socket.close()

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            raise ChildEndedError from error
        if not data:
            raise ChildEndedError
        return data


class Child:
    """`python -m MODULE` under a keeper.

    It ends, with all that it started and with its folder, when `end` is called or when this process ends, however.

    Args:
        module: what to run.
        root: the worker's folder; the child gets one of its own in it, and loses it when it ends.
        environment: variables besides those that are kept of this process's own.
        keeps: names of further ones to keep, or patterns of them (`AWS_*`).
    """

    def __init__(self, module: str, root: Path, environment: Mapping[str, str], *, keeps: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        self.folder = Path(tempfile.mkdtemp(dir=root, prefix=""))
        self.channel = Channel(ours)
        with theirs:
            number = theirs.fileno()
            self._keeper = subprocess.Popen(
                [*_python("fxlib_workers.process.reaper"), str(self.folder), str(root), str(number), *_python(module)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                pass_fds=[number],
                env={
                    **kept(more=keeps),
                    **environment,
                    _CHANNEL: str(number),
                    FOLDER: str(self.folder),
                    "PYTHONPATH": _search_path(),
                },
                start_new_session=True,
            )
        self._lifeline = cast("IO[bytes]", self._keeper.stdin)

    @property
    def pid(self) -> int:
        """The keeper's process id."""
        return self._keeper.pid

    def status(self, timeout_s: float = 30.0) -> int:
        """Wait for the keeper, and return the exit status of what it kept; 128 and more: ended by a signal."""
        return self._keeper.wait(timeout_s)

    def end(self) -> None:
        """End the child and all that it started; returns when nothing of it is left."""
        self.channel.close()
        with contextlib.suppress(BrokenPipeError, ValueError):  # the keeper ended by itself, or was told before
            self._lifeline.write(b".")
            self._lifeline.flush()
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()
        try:
            self._keeper.wait(15.0)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()


def kept(environment: Mapping[str, str] = os.environ, more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that a child of a worker inherits.

    Args:
        environment: the worker's.
        more: names that are kept, too, or patterns of them (`AWS_*`).
    """
    patterns = (*_NEEDED, *more)
    return {name: value for name, value in environment.items() if any(fnmatchcase(name, each) for each in patterns)}


def _python(module: str) -> Sequence[str]:
    # -P: what happens to lie in the working directory must not be imported in a module's stead.
    return (sys.executable, "-P", "-m", module)


def _search_path() -> str:
    """Return this process's own search path: where the operator's modules are, and these."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
