"""One call that runs ahead of its forward: parked until it may leave, in flight, taken by the forward or dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from fxlib import batch
from fxlib.analysis.effects.prologue import CallAhead, Way, meet
from fxlib.analysis.effects.resources import ServerState, contract_of_call
from fxlib.pipeline.watch import WATCH
from fxlib.runtime import functions, ops
from fxlib.runtime.ahead import Rider
from fxlib.runtime.ops.batches import IN_ORDER, BatchInFlight, issue_batch
from fxlib.runtime.ops.deadlines import DEADLINES, NO_LIMIT, own_timeout
from fxlib.runtime.ops.operators import is_this_process, server_name
from fxlib.runtime.tracking.flow_control import tensor_bytes

_SETTLE_S = 5.0
"""Time for which the end of a loop waits for one read of its in flight, in seconds: a server may hang."""
_LOOK_S = 2e-4


class State(Enum):
    """What has become of a request."""

    PARKED = "it may not leave yet"
    IN_FLIGHT = "it was made, and its result may be taken"
    DROPPED = "its forward makes the call"
    TAKEN = "its forward has it"


class Request:
    """One call, with its arguments as the prologue made them.

    Attributes:
        call: the call, as the analysis knows it.
        state: see `State`.
    """

    __slots__ = ("_arguments", "_future", "call", "state")

    def __init__(self, call: CallAhead, arguments: tuple[Any, ...]) -> None:
        self.call = call
        self.state = State.PARKED
        self._arguments = arguments
        self._future: Any = None

    @property
    def server(self) -> str:
        """Name of the server."""
        return server_name(self._arguments[0])

    @property
    def is_behind_push(self) -> bool:
        """Whether a push of its module writes what it reads."""
        return self.call.way is Way.BEHIND_PUSH

    @property
    def is_batch(self) -> bool:
        """Whether it is a message of several calls."""
        return self.call.node.target is issue_batch

    def make(self) -> None:
        """Make the call now, unless a write in flight may change what it reads."""
        self.state = State.IN_FLIGHT  # from here on, a write of another thread's drops it
        if is_this_process(self._arguments[0]) or WATCH.is_being_written(self.call.reads):
            self.drop()
            return
        issue: Callable[..., Any] = issue_batch if self.is_batch else ops.issue_call
        self._future = issue(*self._arguments)

    def written(self, states: frozenset[ServerState]) -> bool:
        """Drop the result if a write may change what was read, and return whether that is so."""
        if self.state is not State.IN_FLIGHT or not meet(self.call.reads, states):
            return False
        self.drop()
        return True

    def park(self) -> None:
        """Wait for the next chance to leave; what was read is forgotten."""
        if self.state is not State.TAKEN:
            self.state, self._future = State.PARKED, None

    def drop(self) -> None:
        """Leave the call to its forward."""
        if self.state is not State.TAKEN:
            self.state, self._future = State.DROPPED, None

    def size(self) -> int | None:
        """Return the bytes of the result; None while there is none."""
        future = self._future.future if isinstance(self._future, BatchInFlight) else self._future
        if future is None or not future.done():
            return None
        try:
            return tensor_bytes(future.wait())
        except Exception:  # noqa: BLE001 - the forward makes the call again
            return None

    def settle(self) -> None:
        """Wait for what is in flight, within reason, so that the loop leaves nothing behind."""
        future = self._future.future if isinstance(self._future, BatchInFlight) else self._future
        until = time.monotonic() + _SETTLE_S
        while future is not None and not future.done() and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def take(self) -> Any:
        """Return what stands for the issue of the call in its forward; None where the forward has to make it."""
        if self.state is not State.IN_FLIGHT:
            return None
        future, self._future = self._future, None
        self.state = State.TAKEN
        if self.is_batch:
            return _TakenBatch(future, self._arguments)
        return _Taken(future, partial(ops.remote_call, *self._arguments))

    def as_call(self) -> batch.Call | None:
        """Return the call as one of a message; None where it cannot travel in one."""
        if is_this_process(self._arguments[0]):
            return None
        if not self.is_batch:
            contract = contract_of_call(self.call.node)
            _, name, args, kwargs, _ = self._arguments
            batchable = contract is not None and contract.batchable and not name.startswith(".")
            return (functions.resolve(name), args, kwargs) if batchable else None
        _, calls, _, batched_by = self._arguments
        found = [(functions.resolve(name), args, kwargs) for name, args, kwargs in calls]
        if batched_by == IN_ORDER:
            return None
        if batched_by is None:
            return batch.run, (found,), {}
        return batch.run_batched, (functions.resolve(batched_by), found), {}

    @property
    def timeout_s(self) -> float:
        """How long the server may take for it, in seconds; 0 is no limit."""
        count = len(self._arguments[1]) if self.is_batch else 1
        return own_timeout(self._arguments[2 if self.is_batch else 4]) * count

    def deliver(self, outcome: Any) -> None:
        """Take what a message brought for the call."""
        if self.state is not State.PARKED:
            return
        self.state = State.IN_FLIGHT
        if outcome is None or batch.failed(outcome) or WATCH.is_being_written(self.call.reads):
            self.drop()
            return
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(outcome)
        self._future = future
        if self.is_batch:
            flying = BatchInFlight(*self._arguments[:3], in_order=False)
            flying.future = future
            self._future = flying


def riders_of(requests: Sequence[Request]) -> list[Rider]:
    """Return the requests that may travel behind pushes, as what travels: those to one server together."""
    by_server: dict[str, list[tuple[Request, batch.Call]]] = {}
    for each in requests:
        if (call := each.as_call()) is not None:
            by_server.setdefault(each.server, []).append((each, call))
    return [_rider(server, found) for server, found in by_server.items()]


def _rider(server: str, found: Sequence[tuple[Request, batch.Call]]) -> Rider:
    timeouts = [request.timeout_s for request, _ in found]
    timeout_s = NO_LIMIT if NO_LIMIT in timeouts else sum(timeouts)
    if len(found) == 1:
        ((request, call),) = found
        return Rider(server=server, call=call, timeout_s=timeout_s, deliver=request.deliver)
    requests = [request for request, _ in found]

    def deliver(outcome: Any) -> None:
        answered = outcome if isinstance(outcome, list) and len(outcome) == len(requests) else [None] * len(requests)
        for request, each in zip(requests, answered, strict=True):
            request.deliver(each)

    together: batch.Call = (batch.run, ([call for _, call in found],), {})
    return Rider(server=server, call=together, timeout_s=timeout_s, deliver=deliver)


class _Taken:
    """A call that was made ahead, in the place of one that its forward has just issued."""

    __slots__ = ("_again", "_future")

    def __init__(self, future: Any, again: Callable[[], Any]) -> None:
        self._future, self._again = future, again

    def wait(self) -> Any:
        """Return the result; if there is none, what the call brings that is made now, as the program makes it."""
        with suppress(Exception):  # whatever it was, the program has not asked yet
            return self._future.wait()
        DEADLINES.forget(self._future)
        return self._again()

    def done(self) -> bool:
        """Whether the call has been answered."""
        return bool(self._future.done())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(future)` once the call has been answered."""
        self._future.add_done_callback(callback)


class _TakenBatch(BatchInFlight):
    """Calls that were made ahead in one message; if one failed, all are made again, as the program makes them."""

    def __init__(self, flying: BatchInFlight, arguments: tuple[Any, ...]) -> None:
        super().__init__(*arguments[:3], in_order=False)
        self.future, self.refused = flying.future, flying.refused

    @override
    def _receive(self) -> list[Any]:
        if self.refused is not None:
            return super()._receive()
        assert self.future is not None  # noqa: S101 - it was sent
        landed: list[Any] = []
        with suppress(Exception):  # the single calls tell what is wrong
            landed = self.future.wait()
        DEADLINES.forget(self.future)
        return landed if landed and not any(map(batch.failed, landed)) else self._one_by_one()
