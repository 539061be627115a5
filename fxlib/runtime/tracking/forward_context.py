"""The context of one running forward of a captured module, which its operators read and write."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias
from weakref import ReferenceType

import torch

from fxlib import batch
from fxlib.runtime.tracking.autograd_node import Backward, Slot
from fxlib.runtime.tracking.flow_control import FlowControl
from fxlib.runtime.tracking.result_structure import mapped

_PLAIN = frozenset({torch.Tensor, bool, int, float, complex, str, bytes, type(None)})
_LIBRARIES = frozenset({"builtins", "torch", "numpy", "collections"})


@dataclass(slots=True, eq=False, kw_only=True)  # a frozen one would be slow to build, and a step builds many
class Tracked:
    """A remote result that takes a gradient, and the call with which this gradient is to be sent.

    `value` is the result with slots in place of the tensors that take a gradient. `index` is the call's position in
    program order. `together` says whether its gradient may share a message with others, and need not wait for those to
    other servers.
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
        """Whether a gradient has arrived and was not cleared."""
        if len(self.slots) == 1:  # this is asked often
            return self.slots[0].gradient is not None
        return any(slot.gradient is not None for slot in self.slots)

    def gradient_of_result(self) -> Any:
        """Return the gradient that has arrived, in the structure of the result, with None for parts without one."""
        value = self.value
        return value.gradient if type(value) is Slot else mapped(value, _gradient)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments of the call, the gradient last."""
        return (*self.args, self.gradient_of_result())


def _gradient(each: Any) -> torch.Tensor | None:
    return each.gradient if isinstance(each, Slot) else None


Made: TypeAlias = tuple[ReferenceType[torch.Tensor], torch.Tensor, Slot]
"""A reference to a result, the tensor that stands for it, and the slot at which its gradient arrives. It ends with the
result: a later object may have the same id, and memory is held no longer than the graph holds it."""


class Message(Protocol):
    """A message whose results came together."""

    outcomes: list[Any]


class Check(Protocol):
    """A function that is called when code of the program's own has run.

    Args:
        name: the name of the code's node.
        values: a function that returns the values of the nodes so far, by name.

    Returns:
        The outcome of the forward, if another graph went on; None if nothing was changed.
    """

    def __call__(self, name: str, values: Callable[[], Mapping[str, Any]]) -> WentOn | None:
        """Check what the graph takes for granted."""


class WentOn(BaseException):
    """Holds the result of a forward, or its error, after another graph went on to the forward's end."""

    def __init__(self, result: Any, error: BaseException | None = None) -> None:
        super().__init__()
        self.result, self.error = result, error

    def end(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


@dataclass
class ForwardContext:
    """The notes of operators while one forward runs."""

    grad_enabled: bool = True
    """The grad mode of the caller."""
    tracked: list[Tracked] = field(default_factory=list)
    untracked: str = ""
    """The reason why remote results take no gradients though some are recorded; empty if there is none."""
    refused: list[Exception] = field(default_factory=list)
    """The errors of calls that could not be issued, which their waits raise."""
    fetched: dict[int, tuple[Any, Any, float | None]] = field(default_factory=dict)
    """The futures of fetches in flight, with the RRef and the timeout, by the id of the future."""
    expects_objects: bool = True
    """Whether results of the program's own classes are taken as they are, because the graph checks after their methods,
    or because nobody checks."""
    check: Check | None = None
    """The function to call when code of the program's own has run in mid-step; None if there is nothing to check."""
    flow_control: FlowControl | None = None
    """The limits on what the forward may have in flight; None if there are none."""
    shares_nodes: bool = False
    """Whether results that came in one message may share a node, since the program sees none of their hooks."""
    came_with: dict[int, Callable[[], Message | None]] = field(default_factory=dict)
    """The message in which a result came, by its id; None once the graph has taken all results out of it."""
    made: dict[int, Made] = field(default_factory=dict)
    """The stand-ins for results that may still be tracked, by the ids of the results."""

    # These are made on first use: most forwards never need them.
    @functools.cached_property
    def backward(self) -> Backward:
        """The object that delivers gradients to the results of the forward."""
        return Backward()

    @functools.cached_property
    def in_distributed_autograd(self) -> bool:
        """Whether the forward runs in a context of distributed autograd, to which its gradients then go."""
        return batch.in_autograd_context()


class _Thread(threading.local):
    """The innermost forward that each thread runs."""

    forward: ForwardContext | None = None


THREAD = _Thread()


def current_forward() -> ForwardContext | None:
    """Return the forward that this thread runs, the innermost of nested ones."""
    return THREAD.forward


class ObjectReceived(BaseException):
    """Ends generated code at a remote result of the program's own class, whose methods may run in mid-step."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def received(result: Any) -> Any:
    """Return a remote result as it is.

    Raises:
        ObjectReceived: a part of it is of a class of the program's own, which the forward does not expect.
    """
    if type(result) in _PLAIN:
        return result
    if THREAD.forward is not None and not THREAD.forward.expects_objects and _has_object(result):
        raise ObjectReceived(result)
    return result


def _has_object(result: Any) -> bool:
    kind = type(result)
    if isinstance(result, (tuple, list)) and (kind in (tuple, list) or hasattr(kind, "_make")):
        return any(map(_has_object, result))
    if kind is dict:
        return any(map(_has_object, result.values()))
    return kind not in _PLAIN and kind.__module__.partition(".")[0] not in _LIBRARIES


def current_flow_control() -> FlowControl | None:
    """Return the limits of the forward that this thread runs; None if it has none."""
    forward = current_forward()
    return None if forward is None else forward.flow_control
