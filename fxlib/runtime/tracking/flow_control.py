"""Flow control for each server: limits on what one forward has in flight, and deadlines of calls that share a server.

A schedule keeps the limits by its order, as far as sizes were known when it was made. Here each issue is held back
until enough of the earlier calls to its server have been answered. Answers arrive without the forward's help, so no
issue is held forever; a call that is larger than the limit goes alone.

No call may time out that would not have timed out if calls were issued one after another. A blocking program gives each
call its whole timeout, because nothing else of its own is in the server's queue. The same call issued behind others
waits for them first, and the RPC clock starts at issue; so its deadline is its own timeout plus those of the calls in
flight before it to the same server. A call that exceeds it raises what it would have raised with its own timeout.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT

from fxlib import batch
from fxlib.batch.known_rows import KnownRows

NO_LIMIT = 0.0
"""The timeout, in seconds, that `torch.distributed.rpc` takes for "no timeout"."""


class Future(Protocol):
    """The part of a call in flight that flow control uses."""

    def done(self) -> bool:
        """Return whether the call has been answered."""

    def wait(self) -> Any:
        """Block until the call has been answered, and return its result."""


InFlight = TypeVar("InFlight", bound=Future)


@dataclass(slots=True)
class _Call:
    """A call in flight, and the bytes that it counts for."""

    function: str
    size: int
    future: Future


@dataclass(slots=True)
class _Server:
    """The calls in flight to one server, in the order of their issues, and the bytes of them all."""

    calls: deque[_Call] = field(default_factory=deque)
    size: int = 0


class FlowControl:
    """The calls that one forward has in flight to each server, and its limits; only the forward's thread uses this."""

    def __init__(self, calls: int | None, size: int | None) -> None:
        """Begin with nothing in flight."""
        self._most_calls = calls
        self._most_bytes = size
        self._servers: dict[str, _Server] = {}

    def start(self, server: str, function: str, sent: object, issue: Callable[[], InFlight]) -> InFlight:
        """Issue a call to a server as soon as the limits admit it, and return its future."""
        found = self._servers.setdefault(server, _Server())
        out = tensor_bytes(sent)
        self._prune(found)
        while found.calls and not self._admits(found, out + _RETURNED.get(function, 0)):
            with contextlib.suppress(Exception):  # the call's own wait raises it
                found.calls[0].future.wait()
            self._prune(found)
        future = issue()
        call = _Call(function, out + _RETURNED.get(function, 0), future)
        found.calls.append(call)
        found.size += call.size
        return future

    def _admits(self, server: _Server, size: int) -> bool:
        if self._most_calls is not None and len(server.calls) >= self._most_calls:
            return False
        return self._most_bytes is None or server.size + size <= self._most_bytes

    @staticmethod
    def _prune(server: _Server) -> None:
        for _ in range(len(server.calls)):
            call = server.calls.popleft()
            if not call.future.done():
                server.calls.append(call)
                continue
            server.size -= call.size
            with contextlib.suppress(Exception):  # the call's own wait raises it
                _RETURNED[call.function] = max(_RETURNED.get(call.function, 0), tensor_bytes(call.future.wait()))


def tensor_bytes(value: object) -> int:
    """Return the bytes of all tensors in nested tuples, lists and dicts, and in rows that came with their state."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout not in _SPARSE else _sparse_bytes(value)
    if isinstance(value, KnownRows):
        return tensor_bytes(value.tensors)
    if isinstance(value, (tuple, list)):
        return sum(map(tensor_bytes, value))
    return sum(map(tensor_bytes, value.values())) if isinstance(value, Mapping) else 0


def _sparse_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of values and indices in the COO format, which is close enough for other sparse formats."""
    values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return values.nbytes + 8 * tensor._nnz() * tensor.ndim


_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_RETURNED: dict[str, int] = {}
"""The size of the largest result of each function that a limited forward has seen, in bytes."""


class _Completing(Protocol):
    """The part of a future that tells whether it is complete."""

    def done(self) -> bool:
        """Return whether the future is complete."""


class Deadlines:
    """The own timeouts, in seconds, of the calls in flight to each server. Threads may share it.

    It asks futures whether they are complete when the next call goes to their server: callbacks would run in a thread
    of the RPC layer, and take the interpreter's lock from the trainer's thread for every answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: dict[str, dict[int, tuple[_Completing, float]]] = {}
        self._answered: dict[int, float] = {}
        """The timeouts of calls that were found complete before anybody waited for them, by the ids of their futures; a
        later future with such an id begins in flight."""

    @property
    def in_flight(self) -> int:
        """The number of calls in flight, whether or not anybody waits for them."""
        with self._lock:
            return sum(len(self._pruned(server)) for server in self._in_flight)

    def deadline(self, server: str, timeout_s: float | None) -> float:
        """Return the seconds that a call to `server` may take from now; its own timeout if no call is ahead of it."""
        with self._lock:
            ahead = [own for _, own in self._pruned(server).values()] if self._in_flight.get(server) else []
        if not ahead:
            return UNSET_RPC_TIMEOUT if timeout_s is None else timeout_s
        own = own_timeout(timeout_s)
        return NO_LIMIT if NO_LIMIT in (own, *ahead) else own + sum(ahead)

    def watch(self, server: str, timeout_s: float | None, future: _Completing) -> None:
        """Count the call as in flight until its future is complete, whether or not anybody waits for it."""
        own = own_timeout(timeout_s)
        with self._lock:
            self._in_flight.setdefault(server, {})[id(future)] = future, own

    def forget(self, future: _Completing) -> float:
        """Let go of a future that is complete, and of its result; return its own timeout, `NO_LIMIT` if not known."""
        with self._lock:
            for calls in self._in_flight.values():
                if (found := calls.pop(id(future), None)) is not None:
                    return found[1]
            return self._answered.pop(id(future), NO_LIMIT)

    def _pruned(self, server: str) -> dict[int, tuple[_Completing, float]]:
        calls = self._in_flight[server]
        for key in [key for key, (future, _) in calls.items() if future.done()]:
            _, self._answered[key] = calls.pop(key)
        return calls


DEADLINES = Deadlines()
"""The deadlines of this process, which all modules share: a call is in flight whichever module issued it."""


def in_own_time(error: Exception, timeout_s: float | None) -> Exception:
    """Return a timeout as a call with this timeout, in seconds, raises it with no time but its own.

    Other errors are returned as they are, and so is every error of a call without a limit.
    """
    if not str(error).startswith(f"{batch.TIMED_OUT}RPC ran for more than set timeout ("):
        return error
    own = own_timeout(timeout_s)
    return error if own == NO_LIMIT else RuntimeError(batch.timeout_text(own))


def own_timeout(timeout_s: float | None) -> float:
    """Return the timeout of a call in seconds; None stands for the default of the RPC layer, and 0 is no limit."""
    if timeout_s is None or timeout_s == UNSET_RPC_TIMEOUT:
        return float(rpc.get_rpc_timeout())
    return float(timeout_s)
