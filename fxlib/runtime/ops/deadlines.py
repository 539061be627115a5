"""Deadlines of calls that share a server: no call may time out that would not have, issued one after another.

A blocking program gives each call its whole timeout, because nothing else of its own is in the server's queue. The same
call issued behind others waits for them first, and the RPC clock starts at issue; so its deadline is its own timeout
plus those of the calls in flight before it to the same server.
"""

from __future__ import annotations

import threading
from typing import Protocol

from torch.distributed import rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT

NO_LIMIT = 0.0
"""What `torch.distributed.rpc` takes for "no timeout"."""


class Completing(Protocol):
    """A future, as far as it tells whether it is complete."""

    def done(self) -> bool:
        """Whether it is complete."""


class Deadlines:
    """Own timeouts, in seconds, of the calls in flight to each server. Safe to share between threads.

    Futures are asked, when the next call goes to their server: a callback of theirs would run in a thread of the RPC
    layer, and take the interpreter's lock from the trainer's for every answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: dict[str, dict[int, tuple[Completing, float]]] = {}

    @property
    def in_flight(self) -> int:
        """How many calls are in flight, whether or not anybody waits for them."""
        with self._lock:
            return sum(len(self._pruned(server)) for server in self._in_flight)

    def deadline(self, server: str, timeout_s: float | None) -> float:
        """Seconds that a call to `server` may take from now; its own timeout as it is when nothing is ahead of it."""
        with self._lock:
            ahead = [own for _, own in self._pruned(server).values()] if self._in_flight.get(server) else []
        if not ahead:
            return UNSET_RPC_TIMEOUT if timeout_s is None else timeout_s
        own = own_timeout(timeout_s)
        return NO_LIMIT if NO_LIMIT in (own, *ahead) else own + sum(ahead)

    def watch(self, server: str, timeout_s: float | None, future: Completing) -> None:
        """Count the call as in flight until its future is complete, whether or not anybody waits for it."""
        own = own_timeout(timeout_s)
        with self._lock:
            self._in_flight.setdefault(server, {})[id(future)] = future, own

    def forget(self, future: Completing) -> None:
        """Let go of a future that is complete, and of its result."""
        with self._lock:
            for calls in self._in_flight.values():
                if calls.pop(id(future), None) is not None:
                    return

    def _pruned(self, server: str) -> dict[int, tuple[Completing, float]]:
        calls = self._in_flight[server]
        for key in [key for key, (future, _) in calls.items() if future.done()]:
            del calls[key]
        return calls


DEADLINES = Deadlines()
"""Of this process: what is in flight does not depend on the module that issued it."""


def own_timeout(timeout_s: float | None) -> float:
    """Return the timeout of a call in seconds, where None stands for that of the RPC layer; 0 is no limit."""
    if timeout_s is None or timeout_s == UNSET_RPC_TIMEOUT:
        return float(rpc.get_rpc_timeout())
    return float(timeout_s)
