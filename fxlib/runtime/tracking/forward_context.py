"""One forward of a captured module, as the operators that run in it see it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxlib import batch
from fxlib.runtime.tracking.autograd_node import Backward, Slot
from fxlib.runtime.tracking.flow_control import FlowControl
from fxlib.runtime.tracking.result_structure import mapped


@dataclass(slots=True, eq=False, kw_only=True)  # not frozen: that is slow to build, and a step builds many
class Tracked:
    """A remote result that takes a gradient, and the call that this gradient is to be sent with.

    `value` is the result with slots in place of the tensors that take a gradient; `index`, the call's place in program
    order; `together`: its gradient may share a message with others, and need not wait for those to other servers.
    """

    value: Any
    slots: Sequence[Slot]
    to: Any
    gradient: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout_s: float | None
    index: int
    together: bool = False

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has come that was not taken away."""
        return True in [slot.gradient is not None for slot in self.slots]  # sooner than `any`, and often asked

    def gradient_of_result(self) -> Any:
        """Return what has come: of a tensor its gradient, of a structure one like it, None for what has no gradient."""
        value = self.value
        return value.gradient if type(value) is Slot else mapped(value, _gradient)


def _gradient(each: Any) -> torch.Tensor | None:
    return each.gradient if isinstance(each, Slot) else None


@dataclass
class ForwardContext:
    """What operators note while one forward runs."""

    tracked: list[Tracked] = field(default_factory=list)
    refused: list[Exception] = field(default_factory=list)
    """Errors of calls that could not be issued, kept for their waits."""
    backward: Backward = field(default_factory=Backward)
    flow_control: FlowControl | None = None
    """What the forward may have in flight; None: anything."""

    @functools.cached_property
    def is_deaf(self) -> bool:
        """Whether gradients come to a context of distributed autograd: a forward begins and ends in one."""
        return batch.in_autograd_context()


class _Thread(threading.local):
    forward: ForwardContext | None = None


THREAD = _Thread()


def current_forward() -> ForwardContext | None:
    """Return the forward that this thread runs, the innermost of nested ones."""
    return THREAD.forward


def current_flow_control() -> FlowControl | None:
    """Return the limits of the forward that this thread runs; None if it has none."""
    forward = current_forward()
    return None if forward is None else forward.flow_control
