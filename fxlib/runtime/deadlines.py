"""Deadlines of calls that share a server: no call may time out that would not have, issued one after another.

A blocking program gives each call its whole timeout, because nothing else of its own is in the server's queue. The same
call issued behind others waits for them first, and the RPC clock starts at issue; so its deadline is its own timeout
plus those of the calls in flight before it to the same server.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

from torch.distributed import rpc
from torch.distributed.rpc.constants import UNSET_RPC_TIMEOUT

NO_LIMIT = 0.0
"""What `torch.distributed.rpc` takes for "no timeout"."""


class Completing(Protocol):
    """What a future tells: that it is complete."""

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Call `callback(future)` once the future is complete, at once if it already is."""


class Deadlines:
    """Own timeouts, in seconds, of the calls in flight to each server. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._in_flight: dict[str, dict[int, float]] = {}

    @property
    def in_flight(self) -> int:
        """How many calls are in flight, whether or not anybody waits for them."""
        with self._lock:
            return sum(map(len, self._in_flight.values()))

    def deadline(self, server: str, timeout_s: float | None) -> float:
        """Seconds that a call to `server` may take from now; its own timeout as it is when nothing is ahead of it."""
        with self._lock:
            ahead = list(self._in_flight.get(server, {}).values())
        if not ahead:
            return UNSET_RPC_TIMEOUT if timeout_s is None else timeout_s
        own = _own(timeout_s)
        return NO_LIMIT if NO_LIMIT in (own, *ahead) else own + sum(ahead)

    def watch(self, server: str, timeout_s: float | None, future: Completing) -> None:
        """Count the call as in flight until its future completes, whether or not anybody waits for it."""
        ticket, own = next(self._tickets), _own(timeout_s)
        with self._lock:
            self._in_flight.setdefault(server, {})[ticket] = own

        def landed(_: object) -> None:
            with self._lock:
                del self._in_flight[server][ticket]

        future.add_done_callback(landed)


DEADLINES = Deadlines()
"""Of this process: what is in flight does not depend on the module that issued it."""


def _own(timeout_s: float | None) -> float:
    if timeout_s is None or timeout_s == UNSET_RPC_TIMEOUT:
        return float(rpc.get_rpc_timeout())
    return float(timeout_s)
