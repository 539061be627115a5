"""Make one call ahead of its forward: it is parked until it may leave, then in flight, then taken or dropped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch

from fxlib import batch
from fxlib.analysis.effects.prologue import CallAhead, Way, meet
from fxlib.analysis.effects.resources import ServerState
from fxlib.errors import FxlibError
from fxlib.pipeline.by_keys import Arguments, KeysBroken, NotByKeys, Repair, Rows
from fxlib.pipeline.message import KeysOnce, Message
from fxlib.pipeline.taken import LaterBatch, LaterCall, TakenBatch, TakenCall
from fxlib.pipeline.updates import Updates
from fxlib.pipeline.watch import WATCH
from fxlib.reasons import Reason
from fxlib.runtime import ops
from fxlib.runtime.ahead import Rider
from fxlib.runtime.gradients.pushes import Push
from fxlib.runtime.ops.batches import BatchInFlight, NamedCall
from fxlib.runtime.ops.timeline import calls_in, current_recording
from fxlib.runtime.tracking.flow_control import NO_LIMIT, tensor_bytes

_LOG = logging.getLogger(__name__)

SETTLE_S = 5.0
"""Time in seconds that the end of a loop waits for its reads in flight, since a server may hang."""
_LOOK_S = 2e-4
MOST_REPAIRS = 64
"""Number of pushes whose changes are kept apart from a result; with a further one, it is read anew."""
BROKEN = "it does not keep its contract"
"""Reason why a call is no longer read by keys, once an error has reported it."""


class State(Enum):
    """The state of a request."""

    PARKED = "it may not leave yet"
    IN_FLIGHT = "it was made, and its result may be taken"
    DROPPED = "its forward makes the call"
    TAKEN = "its forward has it"


_READ = (State.IN_FLIGHT, State.TAKEN)


class Request:
    """One call, with its arguments as the prologue made them.

    Attributes:
        call: the call, as the analysis knows it.
        state: see `State`.
        rows: its rows, if it is read by keys; None if it is not, or if this batch has no such keys.
        rides: whether it travels with pushes that are being made.
        missed: number of steps whose pushes it may have missed, though they may change what it reads.
        why_not_by_keys: why its result can no longer be repaired row by row; empty if it can.
        why_not_with_state: why its rows are no longer read with their state; empty if they can be.
        is_updated: whether its rows are about to be updated in the same way as the current pushes update them.
        is_overwritten: whether what it has read is out of date by now.
    """

    __slots__ = (
        "_end_spans",
        "_flying",
        "_is_counted",
        "_message",
        "_others",
        "call",
        "is_overwritten",
        "is_updated",
        "missed",
        "rides",
        "rows",
        "state",
        "why_not_by_keys",
        "why_not_with_state",
    )

    def __init__(
        self,
        call: CallAhead,
        arguments: tuple[Any, ...],
        *,
        by_keys: bool = True,
        with_state: bool = False,
        keys_once: KeysOnce | None = None,
    ) -> None:
        self.call = call
        self.state = State.PARKED
        self.rides = False
        self.why_not_by_keys = self.why_not_with_state = ""
        self.is_updated = self.is_overwritten = False
        self.missed = 0
        self._is_counted = False
        """Whether `missed` counts the current pushes."""
        self._message = message = Message(call.node, arguments, keys_once)
        self._flying: Any = None
        """The future of its message, or its batch in flight; None before that is made, and once taken or forgotten."""
        self._end_spans: list[Callable[[], None]] = []
        """Functions that end its spans in flight while it travels behind a push."""
        self._others: list[Any] = []
        """Messages that read rows again, and those whose result is not wanted any more."""
        self.rows: Rows | None = None
        if by_keys and call.way is Way.BY_KEYS:
            contracts = [each for each in call.contracts if each is not None]
            try:
                positions = message.with_keys_once(contracts)
                origins = message.with_state(contracts) if with_state else []
                sent = [(args, kwargs) for _, args, kwargs in message.calls]
                self.rows = Rows(call.reads, sent, contracts, origins, positions)
            except NotByKeys:
                message.as_written()

    @property
    def server(self) -> str:
        """Name of the server."""
        return self._message.server

    @property
    def is_behind_push(self) -> bool:
        """Whether a push of its module writes a state that it reads."""
        return self.call.way in (Way.BEHIND_PUSH, Way.BY_KEYS)

    def make(self, beside: Collection[object] = (), *, stale: bool = False) -> None:
        """Make the call now, unless a write in flight other than those in `beside` may change what it reads.

        Args:
            beside: writes in flight, in the form of `Watch.in_flight`.
            stale: whether pushes are expected before its forward, which it will miss.
        """
        self.state = State.IN_FLIGHT  # from here on, a write by another thread drops it
        if self._message.stays_here or WATCH.is_being_written(self.call.reads, but=beside):
            self.drop()
            return
        end_spans = self.begin_spans(Way.STALE if stale else self.way)
        self._flying = self._message.issue()
        _ended_by(self._flying, end_spans)

    @property
    def way(self) -> Way | None:
        """The way in which it runs ahead; for a call that may be read by keys, this depends on the batch's keys."""
        return Way.BEHIND_PUSH if self.is_behind_push and self.rows is None else self.call.way

    def begin_spans(self, way: Way | None, indices: Iterable[int] | None = None) -> list[Callable[[], None]]:
        """Tell a recording, if any, that some or all of its calls are in flight; return the functions that end that."""
        recording = current_recording()
        if recording is None or way is None:
            return []
        names = calls_in(self.call.node)
        chosen = names if indices is None else [names[index] for index in indices]
        return [recording.begin_flight(name, self.server, way.value) for name in chosen]

    def written(self, states: frozenset[ServerState]) -> bool:
        """Drop the result if a write may change what was read; return whether it was dropped."""
        under_way = self.state in _READ or (self.rides and self.state is State.PARKED)
        if not under_way or not meet(self.call.reads, states):
            return False
        self.is_overwritten = True
        self.drop()
        return self.state is State.DROPPED

    def pushed(self, pushes: Sequence[Push], *, sample: int | None, updates: Updates | None) -> None:
        """Note, before the pushes of a step are made, which rows they change, or forget the result of the read.

        Args:
            pushes: the pushes of the step.
            sample: see `Rows.pushed`.
            updates: the known results of the pushes on rows.
        """
        if self.rows is None or self.state is not State.IN_FLIGHT or self.rows.repairs >= MOST_REPAIRS:
            if not self.call.concurrent:
                self._await()
            self.park()
            return
        self.is_updated = updates is not None and self.rows.may_be_updated(updates)
        try:
            if not self.is_updated:
                self.rows.pushed(pushes, sample=sample)
            elif sample is not None:
                self.rows.sample(sample)
        except NotByKeys:
            self.park()
            self.rows = None
            self._message.as_written()
            return
        if not self.rows.is_concurrent:
            self._await()

    def misses(self, states: frozenset[ServerState], *, most: int) -> bool:
        """Count a step's pushes, which are about to be made, as missed, unless it has missed the `most` allowed.

        Args:
            states: the states that the pushes write.
            most: the number of steps whose pushes it may miss.

        Returns:
            Whether its result may still be taken; else it has to be read behind these pushes.
        """
        self._is_counted = False
        if self.state is not State.IN_FLIGHT or self.rows is not None:
            return False
        if meet(self.call.reads, states):
            if self.missed >= most:
                return False
            self.missed += 1
            self._is_counted = True
            if not self.call.concurrent:
                self._await()
        return True

    def updated(self, updates: Updates | None) -> None:
        """Take over the rows as the current pushes change them; None if that cannot be known after all."""
        if not self.is_updated:
            return
        if updates is None or self.rows is None:
            self.park()
        else:
            self.rows.updated(updates)
        self.is_updated = False  # until here, no forward of another thread takes them

    @property
    def is_prepared(self) -> bool:
        """Whether it knows the current pushes, and which of its rows they change, or may miss them."""
        return self.rides or (self.state is State.IN_FLIGHT and (self.rows is not None or self._is_counted))

    def to_travel(self) -> list[Travels]:
        """Return the parts that may travel with the next pushes: the whole call, some rows again, or nothing."""
        if self.state is State.PARKED:
            self.rides = True
            self._end_spans = self.begin_spans(Way.BEHIND_PUSH)
            return [self]
        again = self.repair()
        return [] if again is None else [again]

    def _await(self) -> None:
        """Wait for the result of the read, since reads of this state may not run concurrently with pushes."""
        for future in self._futures():
            with suppress(Exception):  # the forward makes the call again
                future.wait()

    def repair(self) -> Reread | None:
        """Return the rows that have to be read again; None if there are none."""
        if self.rows is None or self.state is not State.IN_FLIGHT:
            return None
        found = self.rows.to_read_again()
        return None if found is None else Reread(self, *found)

    def park(self) -> None:
        """Forget the result of the read, and wait for the next chance to leave."""
        if self.state is not State.TAKEN:
            self._forget()
            self.state = State.PARKED
            self.missed, self._is_counted, self.is_overwritten = 0, False, False
            if self.rows is not None:
                self.rows.forget()

    def drop(self) -> None:
        """Leave the call to its forward."""
        if self.state is not State.TAKEN:
            self._forget()
            self.state = State.DROPPED

    def size(self) -> int | None:
        """Return the size of the result in bytes; None while there is none."""
        future = _future_of(self._flying)
        if future is None or not future.done():
            return None
        try:
            return tensor_bytes(future.wait())
        except Exception:  # noqa: BLE001 - the forward makes the call again
            return None

    @property
    def is_over(self) -> bool:
        """Whether all of its messages were answered."""
        return _is_done(self._flying) and all(map(_is_done, self._others))

    def settle(self, until: float) -> None:
        """Wait for its messages in flight, until a time of `time.monotonic` at most."""
        while not self.is_over and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def make_way(self, states: frozenset[ServerState]) -> None:
        """Wait for its messages before a write, if it may not run beside one that changes what it reads."""
        if (self._flying or self._others) and not self.call.concurrent and meet(self.call.reads, states):
            self._await()

    def _futures(self) -> Iterator[Any]:
        """Yield the futures of all messages that were sent, forgotten or not."""
        for each in (self._flying, *self._others):
            if (future := _future_of(each)) is not None:
                yield future

    def _forget(self) -> None:
        """Forget the result, but not that its message may still be in flight."""
        if self._flying is not None:
            self._others = [each for each in (*self._others, self._flying) if not _is_done(each)]
            self._flying = None

    def take(self) -> Any:
        """Return the future that replaces the call's issue in its forward; None if the forward has to make the call."""
        if self.state is not State.IN_FLIGHT:
            return None
        if self.rows is not None and (self.is_updated or len(self.rows.changed)):
            self.drop()
            return None
        flying, self._flying = self._flying, None
        if flying is None:  # another thread has just dropped it
            return None
        self.state = State.TAKEN
        merged = self._merged if self.rows is not None and self.rows.is_merged else None
        if self._message.is_batch:
            return TakenBatch(flying, self._message.arguments, merged, self._made_again)
        return TakenCall(flying, self._make_again, merged)

    def _make_again(self) -> Any:
        """Make the call as the program makes it."""
        self._made_again()
        return ops.remote_call(*self._message.arguments)

    def _made_again(self) -> None:
        """Note that the message that was sent has failed."""
        if self._message.failed():
            self.why_not_with_state = "it failed"

    def take_later(self, settle: Callable[[], None]) -> Any:
        """Return the future that replaces the call's issue while pushes are in flight; its wait settles these first."""
        arguments = self._message.arguments
        if self._message.is_batch:
            return LaterBatch(self.take, settle, arguments)
        return LaterCall(self.take, settle, partial(ops.remote_call, *arguments))

    def _merged(self, results: Sequence[Any]) -> list[Any] | None:
        """Return results that contain the rows that were read again; None if that is impossible.

        Raises:
            FxlibError: a row has changed that no push was meant to change.
        """
        assert self.rows is not None  # noqa: S101 - it was asked
        try:
            return self.rows.merged(results)
        except NotByKeys as problem:
            self.why_not_by_keys = Reason.AHEAD_NO_ROWS.sentence(str(problem))
        except KeysBroken as broken:
            self.why_not_by_keys = BROKEN
            name = self._message.calls[broken.args[0]][0]
            raise FxlibError(
                f"a row of {name} has changed that no push was to change, so that rows may have been stale",
                where=f"server {self.server!r}",
                hint="keys= or update= of it, or of what takes its gradient, is not so: fxlib.check_keys tests it.",
            ) from None
        except Exception:  # noqa: BLE001 - the call itself is made again
            _LOG.debug("rows could not be read again", exc_info=True)
        return None

    def as_call(self) -> batch.Call | None:
        """Return the call as part of a message; None if it cannot travel in one."""
        return None if self._message.stays_here else self._message.as_call()

    @property
    def timeout_s(self) -> float:
        """Time limit for the server, in seconds; 0 means no limit."""
        return self._message.timeout_s

    def deliver(self, outcome: Any) -> None:
        """Take the part of a message's answer that belongs to the call."""
        if self.state is not State.PARKED:
            return
        for end_span in self._end_spans:
            end_span()
        self.state = State.IN_FLIGHT
        if outcome is None or batch.failed(outcome) or WATCH.is_being_written(self.call.reads):
            self.drop()
            return
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(outcome)
        self._flying = future
        if self._message.is_batch:
            flying = BatchInFlight(*self._message.arguments[:3], in_order=False)
            flying.future = future
            self._flying = flying


class Reread:
    """Rows of a request that are read again after the pushes that change them."""

    def __init__(self, request: Request, repair: Repair, calls: Sequence[tuple[int, Arguments]]) -> None:
        self._request = request
        self._repair = repair
        self._message = message = request._message
        self._sent: list[NamedCall] = [(message.calls[index][0], *arguments) for index, arguments in calls]
        self.server, self.timeout_s, self.reads = request.server, request.timeout_s, request.call.reads
        self._end_spans = request.begin_spans(Way.BEHIND_PUSH, (index for index, _ in calls))

    def as_call(self) -> batch.Call | None:
        """Return it as one call of a message; None if it cannot travel in one."""
        return self._message.as_call(self._sent)

    def deliver(self, outcome: Any) -> None:
        """Take the part of a message's answer that belongs to it."""
        request = self._request
        for end_span in self._end_spans:
            end_span()
        if request.state is not State.IN_FLIGHT or request.rows is None:
            return
        if outcome is None or batch.failed(outcome) or WATCH.is_being_written(self.reads):
            request.drop()
            return
        results = outcome if self._message.is_batch else [outcome]
        request.rows.read_again(self._repair, lambda: _succeeded(results))

    def make(self) -> None:
        """Read the rows now, unless a write in flight may change them."""
        request = self._request
        if request.rows is None or WATCH.is_being_written(self.reads):
            request.drop()
            return
        flying = self._message.issue(self._sent)
        request._others.append(flying)
        _ended_by(flying, self._end_spans)
        if self._message.is_batch:
            request.rows.read_again(self._repair, lambda: [flying.result(index) for index in range(len(flying))])
        else:
            request.rows.read_again(self._repair, lambda: [flying.wait()])


def _future_of(sent: Any) -> Any:
    """Return the future of a call or a batch that was sent; None if none was, or the batch could not be."""
    return sent.future if isinstance(sent, BatchInFlight) else sent


def _is_done(sent: Any) -> bool:
    """Return whether a message that was sent, if it was, has been answered."""
    future = _future_of(sent)
    return future is None or bool(future.done())


def _ended_by(sent: Any, end_spans: Sequence[Callable[[], None]]) -> None:
    """Have spans in flight end when a call or a batch is answered."""
    future = _future_of(sent)
    if future is None:
        return
    for end_span in end_spans:
        future.add_done_callback(lambda _, end_span=end_span: end_span())


def _succeeded(outcomes: Sequence[Any]) -> Sequence[Any]:
    if batch.any_failed(outcomes):
        raise NotByKeys("rows could not be read again")
    return outcomes


class Travels(Protocol):
    """A read that may travel behind pushes."""

    @property
    def server(self) -> str:
        """Name of the server."""

    @property
    def timeout_s(self) -> float:
        """Time limit for the server, in seconds; 0 means no limit."""

    def as_call(self) -> batch.Call | None:
        """Return it as one call of a message; None if it cannot travel in one."""

    def deliver(self, outcome: Any) -> None:
        """Take the part of a message's answer that belongs to it; None if there is none."""


def riders_of(requests: Sequence[Travels]) -> list[Rider]:
    """Return the reads that may travel behind pushes, those to one server together."""
    by_server: dict[str, list[tuple[Travels, batch.Call]]] = {}
    for each in requests:
        if (call := each.as_call()) is not None:
            by_server.setdefault(each.server, []).append((each, call))
    return [_rider(server, found) for server, found in by_server.items()]


def _rider(server: str, found: Sequence[tuple[Travels, batch.Call]]) -> Rider:
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
