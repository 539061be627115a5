"""Keep the calls that were made ahead for one module: for which tensors, and which of them its forwards take."""

from __future__ import annotations

import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from fxlib import batch
from fxlib.analysis.effects.prologue import Way, meet
from fxlib.analysis.effects.resources import ServerState, states_of
from fxlib.errors import FxlibWarning
from fxlib.pipeline.by_keys import SAMPLED
from fxlib.pipeline.choice import Choice, InTurn, MeasuredChoice
from fxlib.pipeline.entry import Entry, modes
from fxlib.pipeline.leaves_pushes import LeavesPushes
from fxlib.pipeline.message import KeysOnce
from fxlib.pipeline.program import Program
from fxlib.pipeline.programs import Programs
from fxlib.pipeline.push_period import PushPeriod
from fxlib.pipeline.ready_results import Take, with_results
from fxlib.pipeline.request import BROKEN, SETTLE_S, Request, State, Travels, riders_of
from fxlib.pipeline.trainers import Trainers
from fxlib.pipeline.updates import Block, Updates
from fxlib.pipeline.watch import WATCH
from fxlib.reasons import Reason
from fxlib.runtime import CapturedModule
from fxlib.runtime.ahead import Rider
from fxlib.runtime.gradients.pushes import Push
from fxlib.runtime.submodules import local_modules
from fxlib.runtime.tracking.flow_control import FlowControl
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext

MOST_AHEAD = 64
"""Maximum number of batches, besides those that a loop asks for, for which anything is kept; a further one replaces the
oldest."""

MOST_BLOCKS = 4096
"""Maximum number of results whose rows are kept until the next push."""
MOST_IN_VAIN = 3
"""Number of times in a row that a read is wasted before it is left to its forward: a loop may push by itself."""


def prefetch(module: nn.Module, *inputs: Any, **kwargs: Any) -> bool:
    """Make the calls of a later `module(*inputs, **kwargs)` that may run ahead of it.

    This is for programs that own their loop; others use `fxlib.pipeline`. The later forward takes the results if it is
    called with these very tensors, unchanged. Reads of states that pushes write leave with the next
    `fxlib.push_gradients(module)`.

    Args:
        module: a captured module, original or rewritten. Nothing is fetched for any other module.
        inputs: the positional arguments of the later forward.
        kwargs: the keyword arguments of the later forward.

    Returns:
        Whether any call was made, or will be made after the next push.
    """
    captured = captured_in(module)
    return captured is not None and ahead_of(captured).add(inputs, kwargs) is not None


def captured_in(module: nn.Module) -> CapturedModule | None:
    """Return the captured module that a module is, or that it wraps; None if there is none."""
    return next((each for _, each in local_modules(module) if isinstance(each, CapturedModule)), None)


def ahead_of(module: CapturedModule) -> ModuleAhead:
    """Return the `ModuleAhead` of a module."""
    found = module._fxlib.ahead
    if not isinstance(found, ModuleAhead):
        found = module._fxlib.ahead = ModuleAhead(module)
    return found


class ModuleAhead(LeavesPushes):
    """All calls that were made ahead for one module; implements `fxlib.runtime.ahead.Ahead`."""

    def __init__(self, module: CapturedModule) -> None:
        super().__init__()
        self._module = module
        self._programs = Programs(module)
        self._entries: deque[Entry] = deque()
        self._running: dict[int, list[Entry | None]] = {}
        """The entries that were given to the running forwards of each thread, the innermost last."""
        self._loops = 0
        """Number of pipelines that are open over the module."""
        self._batches_before: list[int] = []
        """For each of them, the number of batches of the loop that was open before."""
        self._forgotten: list[Request] = []
        """Requests of batches whose step is over, which may still be in flight."""
        self._flow_controls: dict[tuple[int | None, int | None], FlowControl] = {}
        self._has_warned = False
        self._is_distributed = False
        """Whether a forward of the loop that began last ran in a context of distributed autograd."""
        self._period = PushPeriod()
        self._trainers = Trainers(module)
        self._choice: Choice = MeasuredChoice()
        self._asked_depth: int | None = 1
        self._stale_limits: list[int] = []
        """The `stale=` of each open pipeline."""
        self._most_stale = 0
        """Number of steps whose pushes a read may miss: the smallest that an open pipeline allows."""
        self._not_by_keys: dict[Node, str] = {}
        """Calls that are no longer repaired row by row, and why."""
        self._without_state: set[Node] = set()
        """Calls whose rows are no longer read with their state."""
        self._keys_once: defaultdict[Node, KeysOnce] = defaultdict(KeysOnce)
        self._blocks: list[Block] = []
        """The rows that forwards had since the last push, as the servers have them."""
        self._updates: Updates | None = None
        """The known results of the last pushes on rows; None if nothing is known."""
        self._in_vain: dict[Node, int] = {}
        """Number of times in a row that a call's read was overwritten before a forward took it, by the call's node."""
        self.taken = self.unused = 0
        """Number of calls whose result a forward has taken, and number of calls that were made but not taken."""
        self.staleness = Counter[int]()
        """Number of calls taken that read what pushes write, by the number of steps whose pushes they missed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # the fetched results belong to forwards of the module that was copied

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
        """Make the calls of a later forward that may be made now; return None if none can be made now or later."""
        program = None if self._is_distributed else self._programs.of(args, kwargs, self._choice)
        if program is None or not program.calls:
            return None
        if self._loops and self._choice.way is None and not self._most_stale:
            return None
        by_keys = self._choice.way is Way.BY_KEYS and not self._most_stale and not self._several_trainers
        updates = by_keys and self._choice.updates and self._loops > 0
        try:
            values = program.values(args, kwargs)
            noted = program.noted(values)
            with torch.no_grad(), self._own_calls(program):
                found = program.arguments(values)
        except Exception:  # noqa: BLE001 - its forward raises it where the program expects it
            return None
        requests = [
            Request(
                call,
                arguments,
                by_keys=by_keys and call.node not in self._not_by_keys,
                with_state=updates and call.node not in self._without_state,
                keys_once=self._keys_once[call.node],
            )
            if all(noted[each] is not None for each in needs)
            else None
            for call, arguments, needs in zip(program.calls, found, program.needs, strict=True)
        ]
        if not any(requests):
            return None
        entry = Entry(program, noted, requests)
        try:
            WATCH.add(self, program.contracts, program.methods)
            if len(self._entries) >= MOST_AHEAD + (self._asked_depth or 0):
                self.expire(self._entries[0])
            with self._preparing:
                self._entries.append(entry)
                self._make(entry, 1 + sum(not each.is_due for each in tuple(self._entries)), pushed=False)
        except BaseException:  # an interrupt: nobody would have the entry to withdraw it
            self.withdraw([entry])
            raise
        return entry

    def expire(self, entry: Entry) -> None:
        """Forget the calls that were made for a batch whose step is over."""
        if not self._takes_out(entry):
            return
        self._set_aside(entry)
        unused = sum(each.state is State.IN_FLIGHT for each in entry.waiting)
        self.unused += unused
        if entry.why_not and unused:
            self._warn(Reason.AHEAD_OTHER_INPUTS.sentence(entry.why_not))
        self._rest()

    @property
    def depth(self) -> int:
        """Number of batches that are fetched before their step, as the last loop to begin asked or as was chosen."""
        return self._choice.depth

    def open(
        self, depth: int | None, *, leaves_pushes: bool = False, trainers: int | None = None, stale: int = 0
    ) -> None:
        """Begin to watch the writes of this process, because a loop has begun.

        Args:
            depth: number of batches ahead of their step; None: it is chosen, by measuring, or 1 with stale reads.
            leaves_pushes: whether `push_gradients` returns before pushes were answered.
            trainers: number of processes that write to the servers; None if the program has not said.
            stale: number of steps whose pushes a read may miss; of several loops, the smallest holds for all.
        """
        self.settle_pushes()
        self._trainers.loop_began(trainers)
        self._is_distributed = False  # another loop, such as an evaluation, may run outside of such a context
        self._loops += 1
        self._leaving += leaves_pushes
        self._stale_limits.append(stale)
        self._most_stale = min(self._stale_limits)
        self._batches_before.append(self._batches)
        self._batches = 0
        self._asked_depth = depth if depth or not stale else 1  # stale reads are measured by nobody
        self._choice.loop_began(self._asked_depth)
        WATCH.add(self)

    def choose_by(self, kind: type[MeasuredChoice | InTurn]) -> None:
        """Use this kind of choice from now on; a present choice of the same kind stays."""
        if type(self._choice) is kind:
            return
        choice = self._choice = kind()
        self._programs.offer(choice)
        choice.loop_began(self._asked_depth)

    def close(self, *, leaves_pushes: bool = False, trainers: int | None = None, stale: int = 0) -> None:
        """Undo an `open` with the same arguments. An exception of a push in flight is kept until it can be raised."""
        try:
            self.settle_pushes()
        except Exception as error:  # noqa: BLE001 - a loop that is left by `break` raises nothing
            self._unraised = error
            warnings.warn(f"a push has failed that a loop left in flight: {error}", FxlibWarning, stacklevel=2)
        finally:  # after an interrupt, too
            self._trainers.loop_ended(trainers)
            self._loops -= 1
            self._batches = self._batches_before.pop()
            self._leaving -= leaves_pushes
            self._stale_limits.remove(stale)
            self._most_stale = min(self._stale_limits, default=0)
            self._forget_blocks()
            self._rest()

    @property
    def result_bytes(self) -> int:
        """Size in bytes of the results for one batch, as far as forwards have observed it."""
        return self._programs.result_bytes

    def passed(self, entry: Entry | None) -> None:
        """Note that the step of a loop's batch is over; `entry` has the calls that were made ahead for it, if any."""
        with self._preparing:
            self._period.step_over()
            self._batches += 1
            if self._period.steps is None and not self._most_stale:
                self._choice.step_ended()
        if entry is not None:
            self.expire(entry)

    def withdraw(self, entries: Iterable[Entry]) -> None:
        """Forget the calls that were made for batches that the loop will not see, and leave nothing in flight."""
        for entry in entries:
            if self._takes_out(entry):
                self.unused += sum(each.state is State.IN_FLIGHT for each in entry.waiting)
                self._set_aside(entry)
        until = time.monotonic() + SETTLE_S
        for each in self._forgotten:
            each.settle(until)
        self._forgotten.clear()
        self._rest()

    def settle(self) -> None:
        """Wait for all calls in flight, and forget them, because another graph runs from now on."""
        self.settle_pushes()
        self.withdraw(list(self._entries))
        self._forget_blocks()

    def drop(self) -> None:
        """Forget all results that were fetched, since the servers may hold other values."""
        if not self._others_push:
            self._pushing = None
        self._prepared.clear()
        self._forget_blocks()
        for each in self._waiting():
            each.drop()

    def about_to_write(self, states: frozenset[ServerState]) -> None:
        """Wait for the reads of states that a call is about to write, but for those that may run beside it."""
        self._forgotten = [each for each in self._forgotten if not each.is_over]
        for each in (*self._waiting(), *self._forgotten):
            each.make_way(states)

    def written(self, states: frozenset[ServerState]) -> None:
        """Forget reads of states that a call is about to write, unless it is a push of this step that they know."""
        own = self._pushing is not None and self._pushing == get_ident()
        self._blocks = [each for each in self._blocks if not meet(each.reads, states)]
        for entry in self._kept():
            for each in filter(None, entry.requests):
                if own and each in self._prepared and each.is_prepared:
                    continue
                if each.written(states):
                    self._made_in_vain(each)

    def _made_in_vain(self, request: Request) -> None:
        self.unused += 1
        self._in_vain[request.call.node] = self._in_vain.get(request.call.node, 0) + 1

    def synchronized(self) -> None:
        """Forget all results that were fetched, since another process may have written; count them as wasted."""
        self._forget_blocks()
        for entry in tuple(self._entries):
            for each in entry.waiting:
                if each.state is State.IN_FLIGHT or each.rides:
                    self._made_in_vain(each)
                    each.drop()

    # The methods below are called by `fxlib.runtime`.

    def over(
        self, module: Any, generated: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return a forward in which results that were fetched for these very arguments replace calls."""
        self._programs.ran(module, grad_enabled=torch.is_grad_enabled())
        running = self._running.setdefault(get_ident(), [])
        running.append(None)
        if self._entries and self._trainers.have_joined():
            self.synchronized()
        with self._preparing:
            found = self._matching(module, args, kwargs) if self._entries else None
            if found is None or not self._takes_out(found[0]):
                return generated
        entry, unchanged = found
        if not self._loops:
            self._period.step_over()
        if batch.in_autograd_context():
            self._is_distributed = True
            self.unused += sum(each.state is State.IN_FLIGHT for each in entry.waiting)
            self._set_aside(entry)
            self._warn(Reason.AHEAD_DISTRIBUTED.sentence())
            return generated
        running[-1] = entry
        return self._with_results(entry, unchanged, generated, args, kwargs)

    def passed_over(self, *, grad_enabled: bool) -> None:
        """Note that the original's forward runs, which takes nothing that was fetched."""
        self._programs.ran(None, grad_enabled=grad_enabled)

    def ended(self) -> None:
        """Note that the forward has ended, with or without an error."""
        thread = get_ident()
        running = self._running[thread]
        entry = running.pop()
        if not running:
            del self._running[thread]
        if entry is not None:
            for each in filter(None, entry.requests):
                if each.why_not_by_keys:
                    self._not_by_keys[each.call.node] = each.why_not_by_keys
                    if each.why_not_by_keys != BROKEN:
                        self._warn(each.why_not_by_keys)
                self._keep_rows(each)
            self.unused += sum(each.state is State.IN_FLIGHT for each in entry.waiting)
            self._set_aside(entry)
        self._rest()

    def _keep_rows(self, request: Request) -> None:
        """Keep the rows that a forward had, so that the push of their gradient can be computed on them."""
        if request.rows is None or request.state is not State.TAKEN:
            return
        blocks = request.rows.blocks()
        if request.why_not_with_state or (request.rows.known and not blocks):
            self._without_state.add(request.call.node)
        has_room = len(self._blocks) < MOST_BLOCKS
        if self._programs.grad_enabled and self._loops and has_room and not request.is_overwritten:
            self._blocks += blocks

    def riders(self, pushes: Sequence[Push]) -> Sequence[Rider]:
        """Return the reads that may travel with the next pushes."""
        WATCH.announce_call()  # another module's push that has failed is raised before these are sent
        with self._preparing:
            if self._left is None and not self._others_push:
                return self._prepare(pushes)
            self.drop()  # another thread makes pushes, too, so which of them come before a read is not known
            return []

    def _prepare(self, pushes: Sequence[Push]) -> Sequence[Rider]:
        travelling: list[Travels] = []
        several = self._several_trainers
        if several and not self._most_stale:
            self._trainers.warn()
        sample = self._period.pushes if self._period.pushes % SAMPLED == 0 else None
        blocks, self._blocks = self._blocks, []
        self._updates = Updates(pushes, blocks) if blocks and not several else None
        states = _written_by(pushes) if self._most_stale else frozenset()
        covered = self._period.covered(in_loop=self._loops > 0)
        self._prepared.clear()
        for before, entry in self._to_come():
            is_next = before < covered and not several
            for each in entry.waiting:
                self._prepared.add(each)
                if each.is_behind_push and not (self._most_stale and each.misses(states, most=self._most_stale)):
                    each.pushed(pushes, sample=sample if is_next else None, updates=self._updates)
                    if is_next:
                        travelling += each.to_travel()
        self._pushing, self._others_writes = get_ident(), WATCH.in_flight
        return riders_of(travelling)

    def pushing(self) -> None:
        """Update rows that were read ahead as the servers update them, while pushes are in flight."""
        waiting = [each for _, entry in self._to_come() for each in entry.waiting if each.is_updated]
        if not waiting and not self._leaving:
            return
        try:
            if self._updates is not None:
                self._updates.make()
        except Exception as problem:  # noqa: BLE001 - the rows are read again
            self._updates = None
            self._without_state |= {each.call.node for each in waiting}
            self._warn(Reason.AHEAD_NOT_UPDATED.sentence(f"{type(problem).__name__}: {problem}"))
        for each in waiting:
            each.updated(self._updates)

    def pushed(self) -> None:
        """Note that the pushes of a step were made, and make the reads that had to wait for them."""
        self.pushing()
        with self._preparing:
            self._step_pushed()
            if self._others_push:
                self.drop()
                return
            self._forget_blocks()
            self._prepared.clear()
            self._pushing = None
            for before, entry in self._to_come():
                self._make(entry, before, pushed=True)

    def _step_pushed(self) -> None:
        if self._loops and not self._most_stale:
            self._choice.step_ended()
        self._period.pushed(in_loop=self._loops > 0)

    @property
    def _several_trainers(self) -> bool:
        return self._trainers.are_several

    def _waiting(self) -> Iterator[Request]:
        return (each for entry in self._kept() for each in entry.waiting)

    def _kept(self) -> list[Entry]:
        """Return the entries of the forwards that run, and of those to come."""
        running = [entry for entries in tuple(self._running.values()) for entry in tuple(entries) if entry is not None]
        return [*running, *self._entries]

    def _takes_out(self, entry: Entry) -> bool:
        """Take an entry out of those to come; return whether it was there: another thread may have taken it."""
        try:
            self._entries.remove(entry)
        except ValueError:
            return False
        return True

    def _to_come(self) -> Iterator[tuple[int, Entry]]:
        """Yield each batch after the number of the loop's batches that precede it; this step's batch does not count."""
        before = 0
        for entry in tuple(self._entries):
            yield before, entry
            before += not entry.is_due

    def _make(self, entry: Entry, before: int, *, pushed: bool) -> None:
        """Make the calls of a batch that need not wait for a push; its forward comes after `before` others."""
        with self._own_calls(entry.program):
            WATCH.announce_call()  # in the call itself, another module's push that failed would be an error of that
            for each in entry.waiting:
                each.rides = False
                stale = self._most_stale > 0 and self._may_be_stale(each, before, pushed=pushed)
                if each.state is State.PARKED and self._may_leave(each, before, pushed=pushed, stale=stale):
                    self._leave(each, stale=stale)
                elif pushed and before < (self._period.steps or 1) and (again := each.repair()) is not None:
                    again.make()

    def _leave(self, request: Request, *, stale: bool) -> None:
        """Make a call; if pushes were left in flight, it may run beside them if its contract says so."""
        left = self._left
        if left is None or not request.call.concurrent or (request.rows is None and not stale):
            request.make(stale=stale)
            return
        request.make(beside=left.writes, stale=stale)
        self._prepared.add(request)
        if request.rows is None:
            request.misses(_written_by(left.pushes.pushes), most=self._most_stale)
        else:
            request.pushed(left.pushes.pushes, sample=None, updates=self._updates)
            request.updated(self._updates)

    def _may_leave(self, request: Request, before: int, *, pushed: bool, stale: bool) -> bool:
        """Whether a call need not wait for a push, and need not be left to its forward because others keep writing."""
        if request.is_behind_push and self._others_push:
            return False
        waits = request.is_behind_push and not stale and (request.rows is None or self._several_trainers)
        if waits and not self._is_free(before, pushed=pushed):
            return False
        return pushed or self._in_vain.get(request.call.node, 0) < MOST_IN_VAIN

    def _may_be_stale(self, request: Request, before: int, *, pushed: bool) -> bool:
        """Whether a call may leave although pushes are in flight or expected that it will miss."""
        if request.rows is not None or not request.is_behind_push:
            return False
        in_flight = self._left is not None
        if in_flight and not request.call.concurrent:
            return False
        return 0 < in_flight + self._period.pushes_before(before, pushed=pushed) <= self._most_stale

    def _is_free(self, before: int, *, pushed: bool) -> bool:
        """Whether no push is expected before the forward that comes after `before` others."""
        if self._several_trainers and not self._most_stale:
            return False
        return self._period.pushes_before(before, pushed=pushed) == 0

    def _matching(
        self, module: CapturedModule, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Entry, list[bool]] | None:
        now = None
        for entry in tuple(self._entries):
            if not entry.is_due:  # its batch may hold the tensors of the one before it
                continue
            now = now or modes()
            unchanged = entry.unchanged(module, args, kwargs, now)
            if unchanged is not None:
                return entry, unchanged
        return None

    def _with_results(
        self,
        entry: Entry,
        unchanged: Sequence[bool],
        generated: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Callable[..., Any]:
        program = entry.program
        taken_for: dict[Any, dict[int, Take]] = {}
        values = program.values(args, kwargs) if program.rechecks else None
        of_calls = zip(entry.requests, program.needs, program.positions, strict=True)
        for index, (request, needs, position) in enumerate(of_calls):
            if request is not None and self._may_be_taken(request) and all(unchanged[each] for each in needs):
                if index not in program.sizes and (size := request.size()) is not None:
                    program.sizes[index] = size
                take = partial(self._take, entry, request, needs, values)
                taken_for.setdefault(request.call.node.target, {})[position] = take
        return with_results(generated, taken_for) if taken_for else generated

    def _take(self, entry: Entry, request: Request, needs: Sequence[int], values: Any) -> Any:
        """Return a request's future for the running forward; None if the forward is to make the call itself.

        Args:
            entry: the entry of the request.
            request: a request that may be taken.
            needs: the indices of the inputs that the call's arguments depend on.
            values: the forward's inputs, if they are to be compared once more; else None.
        """
        if values is not None:
            still = entry.program.unchanged(entry.noted, values)
            if not all(still[each] for each in needs):
                return None
        future = request.take() if self._left is None else request.take_later(self.settle_pushes)
        if future is not None:
            self.taken += 1
            if request.is_behind_push:
                self.staleness[request.missed] += 1
            self._in_vain.pop(request.call.node, None)
        return future

    def _may_be_taken(self, request: Request) -> bool:
        """Whether a forward may have the result; for a read that travels with pushes in flight, this shows later."""
        if request.missed > self._most_stale:
            return False
        return request.state is State.IN_FLIGHT or (
            self._left is not None and request.rides and request.state is State.PARKED
        )

    @contextmanager
    def _own_calls(self, program: Program) -> Iterator[None]:
        """Return a context for calls of our own, which need not wait for pushes in flight.

        It is outside of any forward, and has the graph's own limits on calls in flight.
        """
        outer, THREAD.forward = THREAD.forward, ForwardContext()
        if program.limits is not None:
            THREAD.forward.flow_control = self._flow_control(program.limits)
        self._making = get_ident()
        try:
            yield
        finally:
            self._making = None
            THREAD.forward = outer

    def _flow_control(self, limits: tuple[int | None, int | None]) -> FlowControl:
        if limits not in self._flow_controls:
            self._flow_controls[limits] = FlowControl(*limits)
        return self._flow_controls[limits]

    def _set_aside(self, entry: Entry) -> None:
        """Keep the requests of a batch that are still in flight, for those who have to wait for them."""
        self._forgotten = [each for each in (*self._forgotten, *entry.waiting) if not each.is_over]

    def _forget_blocks(self) -> None:
        self._blocks, self._updates = [], None

    def _rest(self) -> None:
        if not self._entries and not self._running and not self._loops:
            WATCH.remove(self)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"what was fetched ahead for a batch was not used: {why}", FxlibWarning, stacklevel=4)


def _written_by(pushes: Sequence[Push]) -> frozenset[ServerState]:
    """Return the states that pushes write."""
    distinct = {(id(each.contract), each.server): each for each in pushes}
    return frozenset().union(*(states_of(each.contract, each.server)[1] for each in distinct.values()))
