"""Remember the gradients that a module's forwards leave behind until the program pushes them."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from fxlib.errors import FxlibWarning
from fxlib.runtime.gradients.pushes import Push, pushes_of
from fxlib.runtime.tracking.autograd_node import Backward, Slot
from fxlib.runtime.tracking.forward_context import Tracked
from fxlib.runtime.tracking.result_structure import mapped

UNPUSHED_FORWARDS = 256
"""Number of forwards whose gradients are kept for a program that has never pushed any."""
OWN_LOOP_FORWARDS = 8
"""Number of forwards after which a program that gets remote results, but never pushes, is told how to push."""
_FEW_FORWARDS = 4
"""Number of forwards below which it is not worth looking for dead ones."""


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """The pushes of one forward, in program order, and the backward that may still bring gradients for them."""

    number: int
    """The place of the forward among those on the tape so far, counted from 1."""
    pushes: Sequence[Push]
    backward: weakref.ref[Backward]

    @property
    def has_gradient(self) -> bool:
        return any(push.call.has_gradient for push in self.pushes)

    @property
    def is_dead(self) -> bool:
        """Whether no gradient has come, and none can arrive any more."""
        return self.backward() is None and not self.has_gradient


def _renew(tape: weakref.ref[Tape], taken: _Forward) -> dict[Slot, Slot]:
    """Put a forward back whose gradients were taken, without these; return the places of its gradients by theirs.

    The pushes that were taken keep their gradients: messages may be under way that would have to be sent again.
    """
    slots = {slot: replace(slot, gradient=None) for push in taken.pushes for slot in push.call.slots}
    pushes = [replace(push, call=_moved(push.call, slots)) for push in taken.pushes]
    if (found := tape()) is not None:
        found.put_back(_Forward(taken.number, pushes, taken.backward))
    return slots


def _moved(call: Tracked, slots: dict[Slot, Slot]) -> Tracked:
    value = mapped(call.value, lambda each: slots[each] if isinstance(each, Slot) else each)
    return replace(call, value=value, slots=tuple([slots[each] for each in call.slots]))


class Tape:
    """Remote results of past forwards whose gradients are still to be pushed, oldest first.

    Results that can no longer receive a gradient (an evaluation's, or a forward's without backward) are forgotten at
    the next forward, or a few forwards later. A program that pushes may accumulate over as many forwards as it likes.
    One that has never pushed keeps the last `UNPUSHED_FORWARDS`, and is warned when it loses more, so that memory stays
    bounded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forwards: deque[_Forward] = deque()
        self._count = 0
        self._pushes = self._told = False
        self._dense_below = _FEW_FORWARDS
        """Number of forwards from which on dead ones among them are looked for."""
        self._pushes_one = True
        """Whether each push so far was of one forward."""
        self.untracked = ""
        """Why a forward since the last push tracked no gradients though it should have; empty if none did."""

    def __len__(self) -> int:
        return len(self._forwards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tape:
        return Tape()  # tracked results belong to forwards of the module that was copied

    def add(self, tracked: Sequence[Tracked], backward: Backward, *, returned: bool = False) -> None:
        """Append a forward that has just ended; `returned` says whether the program got tracked results."""
        pushes = pushes_of(sorted(tracked, key=attrgetter("index")))
        with self._lock:
            self._count += 1
            forward = _Forward(self._count, pushes, weakref.ref(backward))
            while self._forwards and self._forwards[-1].is_dead:
                self._forwards.pop()
            if len(self._forwards) >= self._dense_below:  # seldom: a long accumulation holds many that are alive
                self._forwards = deque([each for each in self._forwards if not each.is_dead])
                self._dense_below = max(_FEW_FORWARDS, 2 * len(self._forwards))
            self._forwards.append(forward)
            lost = not self._pushes and len(self._forwards) > UNPUSHED_FORWARDS
            own_loop = returned and not self._pushes and len(self._forwards) > OWN_LOOP_FORWARDS
            if lost:
                self._forwards.popleft()
        if lost:
            _warn_of_loss()
        if own_loop and not self._told:
            self._told = True
            _warn_of_own_loop()

    def take(self) -> list[Push]:
        """Return the results with a gradient to push, forward by forward, in program order, and forget the gradients.

        A gradient that comes later, by a backward that is still possible, is returned the next time.
        """
        forwards = self._taken()
        if len(forwards) > 1:
            if self._pushes and self._pushes_one:
                _warn_of_several(len(forwards))
            self._pushes_one = False
        self._pushes = True
        return [push for forward in forwards for push in forward.pushes if push.call.has_gradient]

    def drop(self) -> None:
        """Forget the gradients so far."""
        self._taken()

    def _taken(self) -> Sequence[_Forward]:
        """Take the forwards with a gradient; what stays is those whose backward may bring more."""
        taken: list[_Forward] = []
        with self._lock:
            forwards, self._forwards, self.untracked = self._forwards, deque(), ""
            for forward in forwards:
                backward = forward.backward()
                if forward.has_gradient:
                    taken.append(forward)
                    if backward is not None:
                        backward.renew = partial(_renew, weakref.ref(self), forward)
                elif backward is not None:
                    self._forwards.append(forward)
        return sorted(taken, key=attrgetter("number"))  # some were put back behind others

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let a block make forwards and backwards whose gradients nobody pushes; what is on the tape now stays."""
        kept = vars(self).copy()
        vars(self).update(vars(Tape()))
        try:
            yield
        finally:
            vars(self).update(kept)

    def put_back(self, forward: _Forward) -> None:
        """Keep a forward once more, whose backward brings gradients after others were taken."""
        with self._lock:
            self._forwards.append(forward)


def _warn_of_several(forwards: int) -> None:
    warnings.warn(
        f"fxlib.push_gradients sends the gradients of {forwards} forwards, where it sent those of one so far. Where "
        "a step was skipped or failed, call fxlib.drop_gradients(module), or its gradients go with those of the next.",
        FxlibWarning,
        stacklevel=4,
    )


def _warn_of_own_loop() -> None:
    warnings.warn(
        "the module returns remote results, whose gradients are in their grad after backward, and nothing pushes those "
        "that it keeps. If the program pushes them by a loop of its own, call fxlib.push_gradients(module) in place of "
        "the loop: a rewritten module sends one message to each server. Or declare no gradient= for these functions.",
        FxlibWarning,
        stacklevel=7,
    )


def _warn_of_loss() -> None:
    warnings.warn(
        f"gradients of remote results older than {UNPUSHED_FORWARDS} forwards are dropped: "
        "nothing pushes them. Call fxlib.push_gradients(module) after backward, or run the forward in torch.no_grad().",
        RuntimeWarning,
        stacklevel=2,
    )
