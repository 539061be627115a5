"""One forward of a captured module, as the operators that run in it see it; and the tape of gradients it leaves."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

UNPUSHED_FORWARDS = 256
"""Forwards whose gradients are kept for a program that has never pushed any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """A remote result that takes a gradient, and the call that this gradient is to be sent with.

    `index` is the call's place in program order.
    """

    leaf: torch.Tensor
    to: Any
    gradient: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout_s: float | None
    index: int

    @property
    def dead(self) -> bool:
        """Whether no gradient can arrive any more: neither an autograd graph nor the program holds the leaf."""
        held_by_graph = self.leaf._use_count() > 1  # type: ignore[attr-defined]
        held_by_program = sys.getrefcount(self.leaf) > 2  # the entry's own reference and this call's
        return self.leaf.grad is None and not held_by_graph and not held_by_program


@dataclass(slots=True)
class Flight:
    """What operators note while one forward runs."""

    tracked: list[Tracked] = field(default_factory=list)
    refused: list[Exception] = field(default_factory=list)
    """Errors of calls that could not be issued, kept for their waits."""


class _Thread(threading.local):
    flight: Flight | None = None


THREAD = _Thread()


def current_flight() -> Flight | None:
    """Return the forward that this thread runs, the innermost of nested ones."""
    return THREAD.flight


class Tape:
    """Remote results of past forwards whose gradients are still to be pushed, oldest first.

    What can no longer receive a gradient (an evaluation, a forward without backward) is forgotten at the next forward.
    A program that pushes may accumulate over as many forwards as it likes. One that has never pushed keeps the last
    `UNPUSHED_FORWARDS`, and is warned when it loses more, so that memory stays bounded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forwards: deque[list[Tracked]] = deque()
        self._pushes = False
        self.untracked = ""
        """Why a forward since the last push tracked no gradients though it should have; empty if none did."""

    def __len__(self) -> int:
        return len(self._forwards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tape:
        return Tape()  # the leaves belong to forwards of the module that was copied

    def add(self, tracked: list[Tracked]) -> None:
        """Append one forward."""
        with self._lock:
            while self._forwards and all(entry.dead for entry in self._forwards[-1]):
                self._forwards.pop()
            self._forwards.append(sorted(tracked, key=lambda entry: entry.index))
            lost = not self._pushes and len(self._forwards) > UNPUSHED_FORWARDS
            if lost:
                self._forwards.popleft()
        if lost:
            _warn_of_loss()

    def take(self) -> list[Tracked]:
        """Return all that is to be pushed, forward by forward, in program order, and forget it."""
        with self._lock:
            self._pushes = True
            forwards, self._forwards, self.untracked = self._forwards, deque(), ""
        return [entry for forward in forwards for entry in forward]


def _warn_of_loss() -> None:
    warnings.warn(
        f"gradients of remote results older than {UNPUSHED_FORWARDS} forwards are dropped: "
        "nothing pushes them. Call fxlib.push_gradients(module) after backward, or run the forward in torch.no_grad().",
        RuntimeWarning,
        stacklevel=2,
    )
