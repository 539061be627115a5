"""A child process below a reaper, and the lines of JSON that the worker and the child exchange."""

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
"""The environment variable that holds a child's folder."""

CHANNEL: Final = "FXLIB_WORKER_CHANNEL"
"""The environment variable that holds the number of a child's socket."""

COMPILER_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable for the folder that torch makes when its compiler is imported, and never deletes."""

_STATUS_S: Final = 30.0
_LONGEST_LINE: Final = 1 << 20
"""The longest message that is read, in bytes."""

_NEEDED: Final = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LC_*"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "PYTHONHASHSEED", "PYTHONWARNINGS", "FXLIB_DISABLE"),
    COMPILER_CACHE,
    *("OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "MALLOC_*", "TORCH_*", "PYTORCH_*", "ATEN_*", "ONEDNN_*", "DNNL_*"),
    *("CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "TP_*"),
)
"""The variables that libraries need. A worker's other variables may hold credentials, which no stranger's graph may
see."""


class ChildEndedError(Exception):
    """The child's end of the channel is closed, since the child ended or was ended."""


class Channel:
    """One end of a socket that carries one JSON object in each line. Only `send` may be called from several threads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    @classmethod
    def inherited(cls) -> Self:
        """Return the child's own end."""
        return cls(inherited_socket())

    def send(self, **message: object) -> None:
        """Write one message.

        Raises:
            ChildEndedError: the other end is closed.
        """
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChildEndedError from error

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None if none is complete in time.

        Raises:
            ChildEndedError: the other end is closed.
            ValueError: the received line is not a message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left_s)[0]:
                return None
            data = self._read()
            if len(self._received) > _LONGEST_LINE:
                raise ValueError(f"a message is longer than {_LONGEST_LINE} bytes")
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return _message(line)

    def fileno(self) -> int:
        """Return the number of the open socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end, which the other end notices."""
        self._socket.close()

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            raise ChildEndedError from error
        if not data:
            raise ChildEndedError
        return data


def _message(line: bytes) -> Message:
    try:
        message = json.loads(line.decode())  # json would guess the encoding of bytes
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a message is no object of JSON")  # noqa: TRY004 - as for text that is not JSON
    return message


class Child:
    """`python -m MODULE` below a reaper.

    When `end` is called, or when this process ends in any way, the child ends with all processes that it started, and
    its folder is deleted.

    Args:
        module: the name of the module to run.
        root: the worker's folder; the child's own folder is made in it, and deleted when the child ends.
        environment: variables that are set for the child.
        keep_variables: names, or patterns of names (`AWS_*`), of variables that it inherits in addition to those that
            libraries need.
        arguments: the module's command line.
        kind: the kind of socket that the child inherits; `channel` needs a stream.
    """

    def __init__(
        self,
        module: str,
        root: Path,
        environment: Mapping[str, str],
        *,
        keep_variables: Sequence[str] = (),
        arguments: Sequence[str] = (),
        kind: socket.SocketKind = socket.SOCK_STREAM,
    ) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, kind)
        self.folder = Path(tempfile.mkdtemp(dir=root, prefix=""))
        self.channel = Channel(self.socket)
        with theirs:
            number = theirs.fileno()
            self._reaper = subprocess.Popen(
                [
                    *python("fxlib_workers.process.reaper"),
                    str(self.folder),
                    str(root),
                    str(number),
                    *python(module),
                    *arguments,
                ],
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                pass_fds=[number],
                env={
                    **inherited_variables(more=keep_variables),
                    **environment,
                    CHANNEL: str(number),
                    FOLDER: str(self.folder),
                    "PYTHONPATH": search_path(),
                },
                start_new_session=True,
            )
        self._lifeline = cast("IO[bytes]", self._reaper.stdin)

    @property
    def pid(self) -> int:
        """The reaper's process id."""
        return self._reaper.pid

    def status(self) -> int:
        """Wait for the child and return its exit status; 128 and more mean that a signal ended it."""
        return self._reaper.wait(_STATUS_S)

    def end(self) -> None:
        """End the child and all processes that it started, and return when they are gone."""
        self.channel.close()
        with contextlib.suppress(BrokenPipeError, ValueError):  # the reaper has ended on its own, or was asked before
            self._lifeline.write(b".")
            self._lifeline.flush()
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()
        try:
            self._reaper.wait(15.0)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            self._reaper.wait()


def inherited_socket() -> socket.socket:
    """Return the socket that this process has inherited from the one that started it."""
    return socket.socket(fileno=int(os.environ.pop(CHANNEL)))


def inherited_variables(environment: Mapping[str, str] = os.environ, more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that a child of a worker inherits.

    Args:
        environment: the worker's own environment.
        more: names, or patterns of names (`AWS_*`), of further variables.
    """
    patterns = (*_NEEDED, *more)
    return {name: value for name, value in environment.items() if any(fnmatchcase(name, each) for each in patterns)}


def python(module: str) -> Sequence[str]:
    """Return the command that runs a module."""
    # -P: a file that happens to be in the working directory must not be imported instead of a module.
    return (sys.executable, "-P", "-m", module)


def search_path() -> str:
    """Return this process's search path, which has the operator's modules and this package."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
