"""Record the timeline of a run: when each call was issued, in flight and waited for, on the trainer's thread.

Without a recording, a forward pays one look at a thread-local variable. With one, it runs the same generated code
object over globals in which the operators of calls are timed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch.fx import GraphModule, Node

from fxlib.runtime.ops import calls, operators
from fxlib.runtime.ops.registry import REACHING, is_batch, waits_of
from fxlib.spec.report import Span, Timeline

BLOCKED = frozenset(("call", "wait"))
"""Kinds of spans in which the trainer's thread stands still for a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    """The calls of one message between its issue and its answer."""

    names: tuple[str, ...]
    to: str
    start_s: float


class Recording:
    """The spans of one thread's run; its `timeline` is complete once the recording has ended."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._step_s: float | None = None

    @property
    def timeline(self) -> Timeline:
        """The timeline recorded so far: spans in the order of their starts, in seconds from the recording's start."""
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span.start_s)
        return Timeline(spans=tuple(spans), step_s=self.now_s if self._step_s is None else self._step_s)

    @contextmanager
    def span(self, kind: str, name: str = "", to: str = "") -> Iterator[None]:
        """Record the block as one span, such as "backward" or "optimizer"."""
        start = self.now_s
        try:
            yield
        finally:
            self.note(kind, name, to, start)

    def note(self, kind: str, name: str, to: str, start_s: float) -> None:
        """Record a span that ends now."""
        end = self.now_s
        with self._lock:
            if self._step_s is None:
                self._spans.append(Span(kind=kind, name=name, to=to, start_s=start_s, end_s=end))

    def begin_flight(self, name: str, to: str, kind: str = "in_flight") -> Callable[[], None]:
        """Begin a span in flight; the function that is returned ends it, and may be called on any thread."""
        start = self.now_s
        return lambda: self.note(kind, name, to, start)

    @property
    def now_s(self) -> float:
        """The seconds since the recording's start."""
        return time.perf_counter() - self._start

    def finish(self) -> None:
        """Fix the length of the step."""
        self._step_s = self.now_s

    def instrument(self, module: GraphModule, generated: Callable[..., Any]) -> Callable[..., Any]:
        """Return `generated` with its calls, issues and waits timed under their names in `module`'s graph."""
        code: FunctionType = generated  # type: ignore[assignment]
        nodes = {role: deque(filter(test, module.graph.nodes)) for role, test in _ROLES.items()}
        names: dict[str, Any] = dict(code.__globals__)
        for name, value in code.__globals__.items():
            operator = getattr(value, "stands_for", value)  # a call that was made ahead stands for a call of the graph
            for role, targets in _targets().items():
                if callable(operator) and operator in targets:
                    names[name] = self._timed(role, operator, value, nodes[role])
        return FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)

    def _timed(
        self, role: str, operator: Callable[..., Any], run: Callable[..., Any], nodes: deque[Node]
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            # The forward is straight-line code: the next use of an operator is its next node.
            node = next(each for each in nodes if each.target is operator)
            nodes.remove(node)
            name, to = call_name(node), reached(node, args, kwargs)
            start = self.now_s
            with self.span(role, name, to):
                result = run(*args, **kwargs)
            if role == "issue" and not getattr(result, "ran_ahead", False):
                self._note_issued(result, _InFlight(names=calls_in(node), to=to, start_s=start))
            elif role == "wait" and args:
                self._note_answered(id(args[0]))
            return result

        return timed

    def _note_issued(self, future: Any, flight: _InFlight) -> None:
        key = id(future)  # the future lives until its wait, so its id is unique
        self._in_flight[key] = flight
        if hasattr(future, "add_done_callback"):
            future.add_done_callback(lambda _: self._note_answered(key))

    def _note_answered(self, key: int) -> None:
        # This runs at completion or at the wait's return, whichever is first: callbacks run in a thread of their own.
        if (flight := self._in_flight.pop(key, None)) is not None:
            for name in flight.names:
                self.note("in_flight", name, flight.to, flight.start_s)


class _Thread(threading.local):
    """The recording that each thread makes."""

    recording: Recording | None = None


_THREAD = _Thread()
_ROLES = {"call": calls.is_call, "issue": calls.is_issue, "wait": calls.is_wait}


def current_recording() -> Recording | None:
    """Return the recording that this thread makes."""
    return _THREAD.recording


def span(kind: str) -> AbstractContextManager[None]:
    """Return a block that the recording of this thread, if there is one, notes as one span, such as "backward"."""
    recording = current_recording()
    return nullcontext() if recording is None else recording.span(kind)


@contextmanager
def record(recording: Recording | None = None) -> Iterator[Recording]:
    """Record the calls of the captured modules that this thread runs in the block, in `recording` or a new one.

    >>> with record() as recording:
    ...     module(batch)
    >>> recording.timeline
    """
    outer, recording = _THREAD.recording, recording or Recording()
    _THREAD.recording = recording
    try:
        yield recording
    finally:
        recording.finish()
        _THREAD.recording = outer


def exposed_s(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of a step for which the trainer's thread stood still in each call, by the call's name."""
    exposed: dict[str, float] = {}
    for span in timeline.spans:
        if span.kind in BLOCKED:
            exposed[span.name] = exposed.get(span.name, 0.0) + (span.end_s - span.start_s) / timeline.steps
    return exposed


def call_name(node: Node) -> str:
    """Return the name of the call as captured, which an issue and its wait share."""
    known = node.meta.get("call")
    if isinstance(known, str):
        return known
    issue = node.args[0] if calls.is_wait(node) and node.args else None
    return call_name(issue) if isinstance(issue, Node) else node.name


def calls_in(issue: Node) -> tuple[str, ...]:
    """Return the name of each call that an issue, or a call in its blocking form, starts."""
    waits = waits_of(issue) if is_batch(issue) else None
    return (call_name(issue),) if waits is None else tuple(map(call_name, waits))


def _targets() -> dict[str, set[Callable[..., Any]]]:
    kinds = calls.kinds()
    return {
        "call": {kind.blocking for kind in kinds if kind.blocking is not None},
        "issue": {each for kind in kinds for each in (kind.issue, kind.start) if each is not None},
        "wait": {kind.wait for kind in kinds},
    }


def reached(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the name of the worker that a call or an issue with these arguments reaches; empty if none."""
    if node.target in REACHING and args:
        return operators.server_name(args[0])
    kind = None if calls.is_wait(node) else calls.kind_of(node)
    if kind is calls.COLLECTIVE:
        return f"process group {args[1][-1]}"
    if kind is None or not kind.is_client:
        return ""
    to = kind.destination(args, kwargs)
    return to if isinstance(to, str) else kind.reached(node)  # an object's own words would name its address
