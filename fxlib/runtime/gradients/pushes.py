"""Push gradients: one by one, as the program says, or in one message to each server, to all servers in parallel.

A push that travels with others is made where the program makes it, in `fxlib.push_gradients`, and has been answered
when that returns: after every statement of the program, servers hold what they hold in the blocking program. This saves
round trips, and servers work at the same time. Pushes to one server are made in program order, but those to different
parts of its state side by side; a push that does not travel is made after all earlier ones and before all later ones.
"""

from __future__ import annotations

import math
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_signal  # signal.signal calls this, and makes enums of numbers at twice the cost
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from types import FrameType
from typing import Any

from torch.distributed import rpc

from fxlib import batch
from fxlib.errors import ContractError
from fxlib.runtime import functions
from fxlib.runtime.ahead import Rider, was_left
from fxlib.runtime.ops import operators
from fxlib.runtime.ops.batches import is_refusal, tell_of_refusal
from fxlib.runtime.ops.timeline import Recording
from fxlib.runtime.tracking.flow_control import DEADLINES, NO_LIMIT, in_own_time, own_timeout
from fxlib.runtime.tracking.forward_context import Tracked
from fxlib.spec.contract import Contract, contract_of


@dataclass(slots=True, eq=False)  # a frozen one would be slow to build, and a step builds many
class Push:
    """The push of one gradient."""

    call: Tracked
    server: str
    function: Callable[..., Any] | None
    """The function that takes the gradient; None if this process does not know it."""
    contract: Contract | None
    """The contract that the function declares."""

    @property
    def travels(self) -> bool:
        """Whether the push may be in flight beside pushes to other servers: it touches only its own server's state."""
        return self.call.together and self.contract is not None

    @property
    def batchable(self) -> bool:
        """Whether the push may share a message with other pushes."""
        return self.contract is not None and self.contract.batchable


def pushes_of(tracked: Iterable[Tracked]) -> list[Push]:
    """Return the pushes of tracked results."""
    known: dict[str, tuple[Callable[..., Any] | None, Contract | None]] = {}
    found: list[Push] = []
    for each in tracked:
        if each.gradient not in known:
            known[each.gradient] = _resolved(each.gradient)
        found.append(Push(each, operators.server_name(each.to), *known[each.gradient]))
    return found


def _resolved(gradient: str) -> tuple[Callable[..., Any] | None, Contract | None]:
    try:
        function = functions.resolve(gradient)
    except ContractError:
        return None, None
    return function, contract_of(function)


def _nothing() -> None:
    pass


def push_all(
    pushes: Sequence[Push],
    recording: Recording | None,
    riders: Sequence[Rider] = (),
    meanwhile: Callable[[], None] = _nothing,
) -> None:
    """Make pushes, and return when all have been answered.

    Args:
        pushes: the pushes of results that have a gradient, in program order.
        recording: the recording of the step, if there is one.
        riders: reads that may travel behind the last pushes, at most one for each server. No outcome is delivered for
            those that cannot.
        meanwhile: a function that is called once the last messages were sent, if some are still unanswered.

    Raises:
        Exception: the error of the first failing push in program order. On its server and part, no later push is made;
            a note on the error names the later pushes that were made elsewhere.
    """
    # A call to this very process may touch objects that the program uses next.
    at_home = set(filter(operators.is_this_process, {push.server for push in pushes}))
    travelling = [push.travels and push.server not in at_home for push in pushes]
    left = len(pushes)
    for travels, each in groupby(zip(travelling, pushes, strict=True), itemgetter(0)):
        group = [push for _, push in each]
        left -= len(group)
        if travels:
            _push_side_by_side(group, recording, () if left else riders, _nothing if left else meanwhile)
        else:
            for push in group:
                _push(push, recording)


def _push(push: Push, recording: Recording | None) -> None:
    call = push.call
    with nullcontext() if recording is None else recording.span("push", call.gradient, push.server):
        operators.remote_call(call.to, call.gradient, call.arguments, call.kwargs, call.timeout_s)


def _push_side_by_side(
    pushes: Sequence[Push],
    recording: Recording | None,
    riders: Sequence[Rider] = (),
    meanwhile: Callable[[], None] = _nothing,
) -> None:
    with nullcontext() if recording is None else recording.span("push"), uninterrupted():
        round_ = _Round(pushes, recording, riders)
        round_.begin()
        meanwhile()
        outcomes = round_.outcomes()
    _raise_first(pushes, outcomes)


class PushesInFlight:
    """Pushes that were sent and have not been waited for yet.

    Attributes:
        pushes: the pushes.
    """

    def __init__(self, pushes: Sequence[Push], recording: Recording | None, riders: Sequence[Rider]) -> None:
        self.pushes = pushes
        with nullcontext() if recording is None else recording.span("push"), uninterrupted():
            self._round = _Round(pushes, recording, riders)
            self._round.begin()

    def finish(self, recording: Recording | None) -> None:
        """Wait for the answers.

        Raises:
            Exception: the error that `push_all` would raise.
        """
        with nullcontext() if recording is None else recording.span("push"), uninterrupted():
            outcomes = self._round.outcomes()
        _raise_first(self.pushes, outcomes)


def may_be_left(pushes: Sequence[Push]) -> bool:
    """Return whether pushes may be waited for later: each server gets one message, and none goes to this process."""
    if not all(push.travels and not operators.is_this_process(push.server) for push in pushes):
        return False
    servers = {push.server for push in pushes}
    of_servers = ([push for push in pushes if push.server == server] for server in servers)
    return bool(pushes) and all(len(list(grouped_in_messages(each))) == 1 for each in of_servers)


def _raise_first(pushes: Sequence[Push], outcomes: Mapping[Push, Any]) -> None:
    if _FAILURES.isdisjoint(map(type, outcomes.values())):
        return
    failed = next(push for push in pushes if _is_failure(outcomes.get(push)))
    try:
        _raise(outcomes[failed])
    except Exception as error:
        behind = [push for push in pushes[pushes.index(failed) + 1 :] if push in outcomes]
        if made := [push for push in behind if not _is_failure(outcomes[push])]:
            others = ", ".join(f"{push.call.gradient} on {push.server!r} (call {push.call.index})" for push in made)
            error.add_note(f"fxlib.push_gradients: pushes behind the one that failed were made with it: {others}")
        raise


class _Round:
    """Pushes to several servers; each server gets its next message when the one before has succeeded.

    After the first failure, no further message is sent, and those in flight are waited for.
    """

    def __init__(self, pushes: Sequence[Push], recording: Recording | None, riders: Sequence[Rider] = ()) -> None:
        self._riders = {each.server: each for each in riders}
        by_server: dict[str, list[Push]] = {}
        for push in pushes:
            by_server.setdefault(push.server, []).append(push)
        self._to_come = {server: deque(grouped_in_messages(each)) for server, each in by_server.items()}
        self._recording = recording
        self._outcomes: dict[Push, Any] = {}
        self._in_flight: deque[PushMessage] | None = None

    def begin(self) -> None:
        """Send each server its first message."""
        self._in_flight = deque(filter(None, map(self._next, self._to_come)))

    def outcomes(self) -> dict[Push, Any]:
        """Return the outcomes of the pushes that were made."""
        if self._in_flight is None:
            self.begin()
        in_flight = self._in_flight or deque()
        while in_flight:
            message = in_flight.popleft()
            self._receive(message)
            if (following := self._next(message.server)) is not None:
                in_flight.append(following)
        return self._outcomes

    def _next(self, server: str) -> PushMessage | None:
        """Send a server's next message, if there is one."""
        to_come = self._to_come[server]
        while to_come:
            pushes = to_come.popleft()
            last = not to_come and pushes[0].batchable
            rider = self._riders.pop(server, None) if last and self._riders else None
            try:
                return PushMessage(pushes, self._recording, rider)
            except Exception as error:  # noqa: BLE001 - the program's push raises it, whatever it is
                if was_left(error):  # none of these is to blame
                    self._note({pushes[0]: Raised(error)})
                elif rider is not None:
                    to_come.appendleft(pushes)
                elif len(pushes) > 1:  # one of them is to blame, and the ones before it are not
                    to_come.extendleft([push] for push in reversed(pushes))
                else:
                    self._note({pushes[0]: Raised(error)})
        return None

    def _receive(self, message: PushMessage) -> None:
        if outcomes := message.outcomes():
            self._note(outcomes)
        else:
            self._to_come[message.server].extendleft([push] for push in reversed(message.pushes))

    def _note(self, outcomes: Mapping[Push, Any]) -> None:
        self._outcomes |= outcomes
        if not _FAILURES.isdisjoint(map(type, outcomes.values())):
            for each in self._to_come.values():
                each.clear()


def _is_failure(outcome: Any) -> bool:
    return type(outcome) in _FAILURES


def _raise(outcome: Any) -> None:
    if isinstance(outcome, Raised):
        raise outcome.error
    batch.result(outcome)


def grouped_in_messages(pushes: Iterable[Push]) -> Iterator[list[Push]]:
    """Group adjacent pushes that may share a message into lists; all are for one server."""
    for batchable, group in groupby(pushes, key=attrgetter("batchable")):
        if batchable:
            yield list(group)
        else:
            yield from ([push] for push in group)


class PushMessage:
    """Pushes to one server in one message: those to different parts of its state side by side, others in order.

    Args:
        pushes: the pushes, in program order.
        recording: the recording of the step, if there is one.
        rider: reads that the server makes when the pushes have succeeded.

    Raises:
        Exception: whatever `rpc_async` raises at once.
    """

    def __init__(self, pushes: Sequence[Push], recording: Recording | None, rider: Rider | None = None) -> None:
        self.pushes = pushes
        self._rider = rider
        self.server = pushes[0].server
        self._chains = _chains(pushes)
        self._end_flights: list[Callable[[], None]] = []
        if recording is not None:
            self._end_flights = [recording.begin_flight(each.call.gradient, self.server) for each in pushes]
        self._future: Any = self._send()

    def outcomes(self) -> dict[Push, Any]:
        """Wait for the answer, and return the outcomes; pushes after a failure have none.

        There are no outcomes at all if the server refused the message, and all of its pushes are to be made singly.
        """
        try:
            answer = self._future.wait()
        except Exception as error:  # noqa: BLE001 - the program's push raises it
            if (len(self.pushes) > 1 or self._rider is not None) and is_refusal(error):
                tell_of_refusal(self.server, error)
                return {}
            first = self.pushes[0]
            return {first: Raised(in_own_time(error, first.call.timeout_s))}
        finally:
            DEADLINES.forget(self._future)
            for end_flight in self._end_flights:
                end_flight()
        if self._rider is not None:
            answer, *read = answer
            if read:
                self._rider.deliver(read[0])
        if len(self.pushes) == 1:
            return {self.pushes[0]: answer}
        if len(self._chains) == len(self.pushes):
            return dict(zip([push for (push,) in self._chains], answer, strict=True))
        answers = [answer] if len(self._chains) == 1 else answer
        found: dict[Push, Any] = {}
        for chain, answer in zip(self._chains, answers, strict=True):
            # A chain of one is the call itself; in longer ones, the outcomes end with the first failure.
            found |= zip(chain, [answer] if len(chain) == 1 or batch.failed(answer) else answer, strict=False)
        return found

    def _send(self) -> operators.Future:
        first = self.pushes[0].call
        if len(self.pushes) == 1 and self._rider is None:
            return operators.start_call(first.to, first.gradient, first.arguments, first.kwargs, first.timeout_s)
        calls = [_call(chain[0]) if len(chain) == 1 else _in_order(chain) for chain in self._chains]
        sent = calls[0] if len(calls) == 1 else (batch.run, (calls,), {})
        limit = _limit_of(self._chains)
        if (rider := self._rider) is not None:
            sent = (batch.run_in_order, ([sent, rider.call],), {})
            limit = NO_LIMIT if NO_LIMIT in (limit, rider.timeout_s) else limit + rider.timeout_s
        deadline = DEADLINES.deadline(self.server, limit)
        function, args, _ = sent
        future: operators.Future = rpc.rpc_async(first.to, function, args=args, timeout=deadline)
        DEADLINES.watch(self.server, limit, future)
        return future


@dataclass(frozen=True, slots=True)
class Raised:
    """An outcome that was raised in this process."""

    error: Exception


_FAILURES: frozenset[type] = frozenset({Raised, batch.Failure})


def _chains(pushes: Sequence[Push]) -> list[list[Push]]:
    """Divide pushes into chains that need not wait for each other; each chain keeps program order."""
    states: dict[int, frozenset[str]] = {}
    chains: dict[tuple[frozenset[str], Hashable], list[Push]] = {}
    for push in pushes:
        contract, call = push.contract, push.call
        part = None if contract is None else contract.part_of(call.args, call.kwargs)
        if part is None:  # it may touch every part
            return [list(pushes)]
        if (state := states.get(id(contract))) is None:
            state = states[id(contract)] = _state_of(contract)
        chains.setdefault((state, part), []).append(push)
    touched = set(states.values())
    overlap = sum(map(len, touched)) > len(frozenset().union(*touched))
    return [list(pushes)] if overlap else list(chains.values())


def _state_of(contract: Contract | None) -> frozenset[str]:
    return frozenset() if contract is None else contract.reads | contract.writes


def _call(push: Push) -> batch.Call:
    call = push.call
    return push.function or functions.resolve(call.gradient), call.arguments, dict(call.kwargs)


def _in_order(chain: Sequence[Push]) -> batch.Call:
    return batch.run_in_order, (list(map(_call, chain)), _limit_s(chain)), {}


def _limit_s(chain: Sequence[Push]) -> float:
    """Return the time limit of each push, in seconds; if the limits differ, only the message has one."""
    limits = {own_timeout(each) for each in {push.call.timeout_s for push in chain}}
    return limits.pop() if len(limits) == 1 else NO_LIMIT


def _limit_of(chains: Sequence[Sequence[Push]]) -> float:
    """Return the time limit of a message, in seconds: that of the longest chain of pushes that wait for one another.

    If chains run side by side, as many at a time as a server has threads, one more round is added: the first ones may
    run one after another or on few threads, until one has lasted long.
    """
    timeouts = {push.call.timeout_s for chain in chains for push in chain}
    own = {each: own_timeout(each) for each in timeouts}
    if NO_LIMIT in own.values():
        return NO_LIMIT
    rounds = 1 if len(chains) == 1 else 1 + math.ceil(len(chains) / batch.THREADS)
    if len(own) == 1:
        return rounds * max(map(len, chains)) * own.popitem()[1]
    return rounds * max([sum([own[push.call.timeout_s] for push in chain]) for chain in chains])


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run the block to its end, and only then the handlers of signals: a Ctrl-C raises KeyboardInterrupt after it.

    Python runs signal handlers only in the main thread: in other threads there is nothing to put off. Handlers that are
    not Python's, such as the system's default for SIGTERM, act at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    handlers: dict[signal.Signals, Any] = {}
    try:
        for number in _SIGNALS:
            if callable(handler := getsignal(number)):
                handlers[number] = handler
                set_signal(number, note)
        yield
    finally:
        for number, handler in reversed(handlers.items()):  # SIGINT last: its handler may raise from here on
            set_signal(number, handler)
        for received, frame in came:
            handlers[signal.Signals(received)](received, frame)
