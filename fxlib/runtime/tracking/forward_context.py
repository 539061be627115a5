"""The context of one running forward of a captured module, which its operators read and write."""

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

_PLAIN = frozenset({torch.Tensor, bool, int, float, complex, str, bytes, type(None)})
_LIBRARIES = frozenset({"builtins", "torch", "numpy", "collections"})


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
        """Whether a gradient has come and was not cleared."""
        return True in [slot.gradient is not None for slot in self.slots]  # faster than `any`, and asked often

    def gradient_of_result(self) -> Any:
        """Return the gradient that has come, in the structure of the result; None stands where there is none."""
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
    own_code: str = ""
    """The class of a result that is the program's own, whose methods may run in mid-step; empty if there is none."""
    flow_control: FlowControl | None = None
    """The limits on what the forward may have in flight; None if there are none."""

    @functools.cached_property
    def in_distributed_autograd(self) -> bool:
        """Whether the forward runs in a context of distributed autograd, to which its gradients then go."""
        return batch.in_autograd_context()


class _Thread(threading.local):
    forward: ForwardContext | None = None


THREAD = _Thread()


def current_forward() -> ForwardContext | None:
    """Return the forward that this thread runs, the innermost of nested ones."""
    return THREAD.forward


def received(result: Any) -> Any:
    """Return a remote result; of one whose class is the program's own, the forward that runs takes note.

    Its methods run wherever the forward uses it, and may change what the graph takes for granted.
    """
    kind = type(result)
    if kind in _PLAIN:
        return result
    if kind in (tuple, list):
        for each in result:
            received(each)
    elif kind is dict:
        for each in result.values():
            received(each)
    elif kind.__module__.partition(".")[0] not in _LIBRARIES and THREAD.forward is not None:
        THREAD.forward.own_code = kind.__name__
    return result


def current_flow_control() -> FlowControl | None:
    """Return the limits of the forward that this thread runs; None if it has none."""
    forward = current_forward()
    return None if forward is None else forward.flow_control
