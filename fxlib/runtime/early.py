"""Whether, and when, gradients leave from inside backward.

The program as written pushes when it calls `fxlib.push_gradients`. Sending earlier is the same program only where each
step is "forward, one backward, push". So the first such step is watched, and pushed as written; those after it are sent
early, and watched still. What a step shows in time ends early sending for good, with a warning; what it shows after
something was sent is an error, since servers cannot take a gradient back.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from fxlib.errors import FxlibError, FxlibWarning
from fxlib.runtime import ops
from fxlib.runtime.convoy import Convoy
from fxlib.runtime.fans import Fan, Kin
from fxlib.runtime.flight import Tracked
from fxlib.runtime.pushes import Push, pushes_of
from fxlib.runtime.record import Recording, current_recording
from fxlib.runtime.underway import UNDERWAY

_INDEX = attrgetter("index")


@dataclass(slots=True, eq=False)
class Group:
    """Pushes of one forward whose order matters to a server, in program order. They are sent together, or none is."""

    pushes: list[Push]
    awaited: set[int] = field(init=False)
    """Ids of what may yet bring gradients. A result that was not used is in nobody's backward."""
    may_leave: bool = field(init=False)
    is_one_fan: bool = field(init=False)
    """Whether its gradients arrive together."""
    sent: bool = False

    def __post_init__(self) -> None:
        """Look at what the group holds. A call to this very process may touch what the program goes on with."""
        fans = {id(known): known for known in [push.call.arrival.fan for push in self.pushes]}
        self.awaited = {key for key, known in fans.items() if known() is not None}
        self.is_one_fan = len(fans) == 1
        at_home = any(map(ops.is_this_process, {push.server for push in self.pushes}))
        self.may_leave = not at_home and False not in [push.call.early for push in self.pushes]


@dataclass(eq=False)
class Forward:
    """The tracked results of one forward, in program order, and in which group each is that may leave early."""

    pushes: list[Push]
    groups: dict[Push, Group] = field(default_factory=dict)
    recording: Recording | None = None

    @classmethod
    def of(cls, tracked: Sequence[Tracked]) -> Forward:
        """Take over what a forward tracked."""
        return cls(pushes=pushes_of(sorted(tracked, key=_INDEX)))

    @property
    def early(self) -> bool:
        """Whether some gradients may leave early."""
        return True in [push.call.early for push in self.pushes]

    @property
    def dead(self) -> bool:
        """Whether no gradient can arrive any more."""
        return all(push.call.dead for push in self.pushes)


@dataclass(slots=True)
class _Step:
    """What has happened since the last push."""

    backward: int | None = None
    """The backward, by torch's number of its graph task, that gradients have come from."""
    source: weakref.ref[Forward] | None = None
    """The forward that they belong to."""
    servers: set[str] = field(default_factory=set)
    held: bool = False
    """Whether its gradients are not to leave before the program pushes them."""
    sent: bool = False
    refused: bool = False
    """Whether the program was told that something was sent too early."""


class EarlyPushes:
    """One module's gradients, from the end of a forward to the push. Called from the program's and autograd's threads.

    It never waits for anything: hooks of autograd must not.
    """

    def __init__(self) -> None:
        self.kin: Mapping[int, Kin] = {}
        """Of results by their index: with which of the next forward their gradients are to arrive."""
        self.thread: int | None = None
        """The program's thread that runs the forwards."""
        self._lock = threading.RLock()
        self._step = _Step()
        self._armed = False
        self._declined = False

    def begin(self) -> None:
        """A forward of the module begins.

        Raises:
            FxlibError: gradients of the forward before it were sent, and never pushed.
        """
        if self._step.backward is not None:
            what = "a forward began before fxlib.push_gradients was called for the backward before it"
            self._stray(what, by=threading.get_ident())

    def watch(self, forward: Forward, *, alone: bool) -> None:
        """Follow the gradients of a forward that has just ended; `alone`: no other one waits for gradients."""
        if forward.early and not self._declined:
            self._expect(forward, alone=alone)
        if forward.groups:
            held = weakref.ref(forward)  # a fan holds what it calls, and the forward may hold the fan's last result
            for known, pushes in _by_fan(forward.pushes):
                if (fan := known()) is not None:
                    fan.came = self._arrival(held, pushes)

    def _expect(self, forward: Forward, *, alone: bool) -> None:
        own = threading.get_ident()
        if self.thread not in (None, own):
            self._stray("forwards of the module run in several threads", by=own)
        elif True in [push.call.has_gradient for push in forward.pushes]:
            self._stray("gradients came while the forward was still running")
        else:
            self.thread = own
            self._step.held |= not alone
            forward.recording = current_recording()
            groups = _groups(forward.pushes)
            forward.groups = {push: group for group in groups for push in group.pushes}
            leaving = [group for group in groups if group.may_leave]
            if not all(group.is_one_fan for group in leaving):
                self.kin = _kin(leaving)

    def close(self) -> None:
        """The program pushes: the step is over."""
        with self._lock:
            step, self._step = self._step, _Step()
            self._armed = self._armed or (step.backward is not None and not self._declined)
        self._leave(step)

    def called(self, server: str, thread: int) -> None:
        """Another module calls a server that gradients have come for: part of `Sender`."""
        self._stray(f"another captured module called {server!r} between backward and fxlib.push_gradients", by=thread)

    def _arrival(self, held: weakref.ref[Forward], places: Sequence[int]) -> Callable[[], None]:
        def came() -> None:
            if (forward := held()) is not None:
                self._arrive(forward, [forward.pushes[place] for place in places])

        return came

    def _arrive(self, forward: Forward, pushes: Sequence[Push]) -> None:
        came = [push for push in pushes if push.call.has_gradient]
        with self._lock:
            if [push for push in came if push.convoy is not None]:
                self._stray("another backward reached them")
            if self._declined or not self._is_expected(forward, came):
                return
            new = {push.server for push in came} - self._step.servers
            self._step.servers |= new
        for server in new:
            self._meet_rivals(server)
        with self._lock:
            for group in dict.fromkeys([forward.groups[push] for push in pushes]):
                group.awaited.discard(id(pushes[0].call.arrival.fan))
                if not group.awaited and self._may_send(group):
                    self._send(forward, group)

    def _meet_rivals(self, server: str) -> None:
        rivals = UNDERWAY.open(server, self)
        for rival in rivals:
            rival.called(server, self.thread or 0)
        for rival in rivals:
            self._stray(f"another captured module has gradients for {server!r}, too", by=rival.thread)

    def _is_expected(self, forward: Forward, came: Sequence[Push]) -> bool:
        """Whether gradients come as in a step that is one forward and one backward."""
        step, backward = self._step, torch._C._current_graph_task_id()
        if step.backward is None:
            step.backward, step.source = backward, weakref.ref(forward)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        if True in [push.call.carries_graph for push in came]:
            self._stray("a backward kept a graph of its gradients (create_graph=True)")
        elif step.backward != backward or True in [push.arrived for push in came]:
            self._stray("several backwards reached the gradients of one step")
        elif step.source is None or step.source() is not forward:
            self._stray("one backward went through several forwards")
        for push in came:
            push.arrived = True
        return not self._declined

    def _may_send(self, group: Group) -> bool:
        return self._armed and not self._declined and not self._step.held and group.may_leave and not group.sent

    def _backward_over(self) -> None:
        """Send what waits for gradients that will not come: their results took no part."""
        with self._lock:
            forward = None if self._step.source is None else self._step.source()
            for group in () if forward is None else dict.fromkeys(forward.groups.values()):
                if forward is not None and self._may_send(group):
                    self._send(forward, group)

    def _send(self, forward: Forward, group: Group) -> None:
        leaving = [push for push in group.pushes if push.arrived]
        if not leaving:
            return
        group.sent = self._step.sent = True
        convoy = Convoy(leaving, forward.recording)
        for push in leaving:
            push.convoy = convoy
            push.gradient = push.call.gradient_of_result()
            push.call.forget()  # a later backward must not add to what is under way
        convoy.start()

    def _leave(self, step: _Step) -> None:
        for server in step.servers:
            UNDERWAY.close(server, self)

    def _stray(self, what: str, *, by: int | None = None) -> None:
        """Send nothing early any more, since a step was not the one that allows it.

        Args:
            what: has happened.
            by: the thread that did it. What another thread than the program's does comes in no order with it, unless
                the two agree on one: so nothing sent is too early for sure, and a warning is all.

        Raises:
            FxlibError: something was sent already.
        """
        apart = by is not None and self.thread not in (None, by)
        with self._lock:
            known, self._declined = self._declined, True
            raises = self._step.sent and not apart and not self._step.refused
            self._step.refused |= raises
        if not apart:
            self._leave(self._step)
        if raises:
            raise FxlibError(
                f"gradients of remote results left from inside backward, and then {what}; the program as captured "
                "would have pushed them later, so its servers would hold something else now",
                where="send_gradients",
                hint="Call fxlib.push_gradients right after each backward, say so in the workload (accumulation=), or "
                "leave the pass send_gradients out of the recipe.",
            )
        if not known:
            warnings.warn(
                f"gradients of remote results are pushed by fxlib.push_gradients alone from now on: {what}"
                + (", in another thread" if apart else ""),
                FxlibWarning,
                stacklevel=2,
            )


def _groups(pushes: Sequence[Push]) -> list[Group]:
    """Return the pushes of each server; all in one group where one may write on any server, as far as is known."""
    if None in [push.contract for push in pushes]:
        return [Group(pushes=list(pushes))]
    by_server: dict[str, list[Push]] = {}
    for push in pushes:
        by_server.setdefault(push.server, []).append(push)
    return [Group(pushes=each) for each in by_server.values()]


def _by_fan(pushes: Sequence[Push]) -> list[tuple[weakref.ref[Fan], list[int]]]:
    """Return the places of the pushes whose gradients each fan brings."""
    places: dict[int, list[int]] = {}
    for place, push in enumerate(pushes):
        places.setdefault(id(push.call.arrival.fan), []).append(place)
    return [(pushes[each[0]].call.arrival.fan, each) for each in places.values()]


def _kin(groups: Sequence[Group]) -> dict[int, Kin]:
    """Return, by index, the results whose gradients leave together."""
    found: dict[int, Kin] = {}
    for group in groups:
        looks = {
            push.call.index: push.call.arrival.looks for push in group.pushes if push.call.arrival.looks is not None
        }
        found |= dict.fromkeys(looks, Kin(looks))
    return found
