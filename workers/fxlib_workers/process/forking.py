"""The client's side of forked children, which a fork server (`process.fork_server`) forks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fxlib_workers.process.child import Channel, Child
from fxlib_workers.process.containment import Containment

_LONGEST_MESSAGE: Final = 1 << 16
_CLOSED: Final = "the process that forks others ended"
_MALFORMED: Final = "the process that forks others said what it never says"


SINGLE_THREADED: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables of a fork server. numpy's pool would start threads on import; torch's starts them on first use."""

_END_S: Final = 15.0
_STATUS_S: Final = 30.0


class ForkError(OSError):
    """A fork server cannot be started, or has ended."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A child that is being forked.

    Attributes:
        forked: its process id, once it runs; raises `ForkError` if it never will.
        ended: its exit status, or the negative number of the signal that ended it.
    """

    forked: Future[int]
    ended: Future[int]


class ForkServer:
    """Sends requests to a fork server. Its methods return at once and may be called from several threads.

    Args:
        control: the socket for requests, which is closed when the fork server ends.
        on_end: a function that is called when the fork server ends.

    Attributes:
        ready: done when it serves; raises `ForkError` if it never will.
    """

    def __init__(self, control: socket.socket, on_end: Callable[[], object] = lambda: None) -> None:
        self._control = control
        self._on_end = on_end
        self._lock = threading.Lock()
        self._forks: dict[str, Fork] = {}
        self._why = ""
        self.ready: Future[None] = Future()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether the fork server has ended."""
        return bool(self._why)

    def fork(
        self, key: str, connection: socket.socket, *, name: str, containment: Containment, network: str = ""
    ) -> Fork:
        """Request a child that serves a connection; see `process.fork_server`."""
        request = {"fork": key, "name": name, "containment": containment.dumps(), "network": network}
        fork = Fork(Future(), Future())
        with self._lock:
            if not self._why:
                self._forks[key] = fork
                with contextlib.suppress(OSError):  # it has ended, which the listening thread finds out
                    socket.send_fds(self._control, [json.dumps(request).encode()], [connection.fileno()])
                return fork
        fork.forked.set_exception(ForkError(self._why))
        return fork

    def end(self, keys: Sequence[str]) -> None:
        """Kill children, with all processes that they started."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"end": keys}).encode())

    def close(self) -> None:
        """End the fork server, with all its children."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        why = _CLOSED
        with contextlib.suppress(OSError):
            while data := self._control.recv(_LONGEST_MESSAGE):
                why = self._heard(data) or why
                if why == _MALFORMED:
                    break
        with self._lock:
            self._why = why
            left, self._forks = list(self._forks.values()), {}
            self._control.close()
        self._on_end()
        begun: list[Future[Any]] = [self.ready, *(fork.forked for fork in left)]
        for waiting in begun:
            if not waiting.done():
                waiting.set_exception(ForkError(why))
        for fork in left:
            fork.ended.set_exception(ForkError(why))

    def _heard(self, data: bytes) -> str:
        """Handle a message. If it says that the fork server ends, or is not a valid message, return why."""
        try:
            message = json.loads(data.decode())
        except (ValueError, RecursionError):
            return _MALFORMED
        match message:
            case {"ready": True, **more} if not (more or self.ready.done()):
                self.ready.set_result(None)
            case {"failed": str(why), **more} if not more:
                return str(why)
            case {"forked": str(key), "pid": int(pid), **more} if not more and self._began(key) is False and pid > 0:
                self._forks[key].forked.set_result(pid)
            case {"ended": str(key), "status": int(status), **more} if not more and self._began(key):
                with self._lock:
                    fork = self._forks.pop(key)
                fork.ended.set_result(status)
            case _:
                return _MALFORMED
        return ""

    def _began(self, key: str) -> bool | None:
        """Return whether a child runs; None if nobody asked for it, or if it has ended."""
        return self._forks[key].forked.done() if key in self._forks else None


class ForkedChild:
    """A child below a fork server, with the channel to it.

    Args:
        server: the fork server.
        name: the child's name in the kernel.
        containment: the policy by which the child is contained.
    """

    def __init__(self, server: ForkServer, name: str, containment: Containment) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._server = server
        self._key = uuid.uuid4().hex
        with theirs:
            self._fork = server.fork(self._key, theirs, name=name, containment=containment)

    def status(self) -> int:
        """Wait for the child and return its exit status; 128 and more mean that a signal ended it.

        Raises:
            ForkError: its fork server ended.
        """
        status = self._fork.ended.result(_STATUS_S)
        return status if status >= 0 else 128 - status

    def end(self) -> None:
        """End the child with all processes that it started, and return when it is gone."""
        self.channel.close()
        self._server.end([self._key])
        with contextlib.suppress(ForkError):
            self._fork.ended.result(_END_S)


class Forker:
    """Forks children that run `main` of one module, from a fork server below a reaper.

    The fork server is started before the first child, and restarted if it has ended.

    Args:
        module: the name of the module.
        root: the worker's folder.
        keep_variables: names, or patterns of names, of variables that the children see in addition to those that
            libraries need.
    """

    def __init__(self, module: str, root: Path, *, keep_variables: Sequence[str] = ()) -> None:
        self._module = module
        self._root = root
        self._keep_variables = keep_variables
        self._lock = threading.Lock()
        self._process: Child | None = None
        self._server: ForkServer | None = None

    def start(self) -> ForkServer:
        """Start the fork server unless it is running; return at once, while it imports the module."""
        with self._lock:
            if self._server is None or self._server.closed:
                self._end()
                self._process = Child(
                    "fxlib_workers.process.fork_server",
                    self._root,
                    SINGLE_THREADED,
                    keep_variables=self._keep_variables,
                    arguments=[self._module],
                    kind=socket.SOCK_SEQPACKET,
                )
                self._server = ForkServer(self._process.socket)
            return self._server

    def fork(self, name: str, containment: Containment) -> ForkedChild:
        """Fork a child; return at once, even if the fork server is still starting."""
        return ForkedChild(self.start(), name, containment)

    def end(self) -> None:
        """End the fork server and all children."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._server is not None and self._process is not None:
            self._server.close()
            self._process.end()
            self._server = self._process = None
