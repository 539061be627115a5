"""The autograd node of remote results' tensors, which receives their gradients and passes nothing on.

The arguments of a tracked call are kept as they were, and gradients in memory that nobody else can write to.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from typing_extensions import override

from fxlib.utils.pytree import mapped

_PLAIN = frozenset({str, int, float, bool, type(None)})
_AT_ONCE = 2**64 - 1
"""The sequence number of a node that runs as soon as its gradient is there; autograd's accumulators have the same."""
_FEWEST = 2
"""Number of gradients from which on they are copied together."""
_SMALL_BYTES = 64 * 1024
"""Largest gradient, in bytes, that is copied without a look at whether it has memory of its own."""
_ROOT = torch.empty(0, device="cpu", requires_grad=True)
"""The input that makes autograd record the node; it receives no gradient."""


def as_it_is(value: Any) -> Any:
    """Return a value like this one that does not change when the program later writes to its tensors."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return tuple([each if type(each) in _PLAIN else as_it_is(each) for each in value])
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.requires_grad else value.clone()
    if kind is list:
        return [each if type(each) in _PLAIN else as_it_is(each) for each in value]
    if kind is dict:
        return {name: as_it_is(each) for name, each in value.items()}
    try:
        return mapped(lambda each: as_it_is(each) if isinstance(each, torch.Tensor) else each, value)
    except RecursionError:  # an object holds itself
        return value


def owned(gradient: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Return a gradient in memory that nobody else can write to: its own memory, or else a copy's.

    A gradient owns its memory if no other tensor and no other object refers to the storage. The caller has made sure
    that nobody else holds `gradient` itself.

    Args:
        gradient: the gradient as backward brought it.
        strides: the strides of the result, in elements: those of the tensor whose gradient it is, as torch does for
            leaves; None if that tensor is contiguous.
    """
    if gradient.layout is torch.strided and (
        gradient.is_contiguous() if strides is None else gradient.stride() == strides
    ):
        storage = gradient.untyped_storage()
        by_tensors = torch._C._storage_Use_Count(storage._cdata) - 1  # without the reference of `storage`
        if by_tensors == 1 and sys.getrefcount(storage) == _references_of_a_tensors_own():
            return gradient
    return _copied(gradient, strides)


def _copied(gradient: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Return a copy of a gradient with these strides; None means contiguous."""
    if gradient.layout is not torch.strided:
        return gradient.detach().clone()
    if strides is None:
        return gradient.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _copied_together(slots: Sequence[Slot], gradients: tuple[Any, ...]) -> list[tuple[Slot, torch.Tensor]] | None:
    """Return copies of the gradients of results that came together, made in one call; None if they need a closer look.

    To copy a small gradient takes less time than to find out whether that is necessary.
    """
    if set(map(type, gradients)) != {torch.Tensor}:
        return None
    if set(map(_KIND, gradients)) != {(False, torch.strided)} or max(map(_BYTES, gradients)) > _SMALL_BYTES:
        return None
    if any(slot.strides is not None or slot.in_distributed_autograd for slot in slots):
        return None
    copies = torch._foreach_clone(gradients)
    return list(zip(slots, copies, strict=True)) if all(map(torch.Tensor.is_contiguous, copies)) else None


_KIND: Callable[[torch.Tensor], tuple[bool, torch.layout]] = attrgetter("requires_grad", "layout")
_BYTES: Callable[[torch.Tensor], int] = attrgetter("nbytes")


@functools.cache
def _references_of_a_tensors_own() -> int:
    """Return `sys.getrefcount` of a storage to which only one tensor and a local variable refer.

    This depends on the version of torch: in some, the tensor refers to the storage's Python object, too.
    """
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


class Backward:
    """Delivers gradients to the results of one forward; autograd's nodes alone keep it alive.

    Gradients arrive at the end of a backward. If a backward raises, none arrive, since the number that it had computed
    by then depends on the order in which the forward ran.
    """

    __slots__ = ("__weakref__", "_came", "_moved", "renew")

    def __init__(self) -> None:
        self.renew: Callable[[], Mapping[Slot, Slot]] | None = None
        """A function that returns new slots for those so far, whose gradients a push has taken; called once."""
        self._moved: Mapping[Slot, Slot] = {}
        """The slots that take gradients in place of the nodes' own, if a push has taken those of the latter."""
        self._came: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
        """The gradients so far, by torch's number for the running backward; backwards may run inside one another."""

    def bring(self, came: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        """Deliver gradients at the end of the backward that runs now."""
        running = torch._C._current_graph_task_id()
        if running not in self._came:
            self._came[running] = []
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._over, running))
        self._came[running] += came

    def _over(self, running: int) -> None:
        came = self._came.pop(running)
        if self.renew is not None:
            slots, self.renew = self.renew(), None
            self._moved = {own: slots[so_far] for own, so_far in self._moved.items()} or slots
        if self._moved:
            came = [(self._moved.get(slot, slot), gradient) for slot, gradient in came]
        for slot, gradient in came:
            slot.gradient = gradient if slot.gradient is None else _sum(slot.gradient, gradient)


def _sum(before: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of gradients as autograd forms it in leaves: torch adds no dense tensor to a sparse one."""
    if gradient.layout is torch.strided and before.layout is not torch.strided:
        return gradient + before
    return before + gradient


@dataclass(slots=True, eq=False)
class Slot:
    """The place at which the gradient of one tensor arrives; further gradients are added to it."""

    gradient: torch.Tensor | None = None
    strides: tuple[int, ...] | None = None
    """The strides of the gradient, in elements; None if it is contiguous."""
    in_distributed_autograd: bool = False
    """Whether distributed autograd runs the backward; it keeps gradients in its own context, and none arrives here."""

    def own(self, gradient: torch.Tensor, references: int) -> torch.Tensor:
        """Return a gradient in memory that nobody else can write to.

        Args:
            gradient: the gradient as backward brought it.
            references: its `sys.getrefcount` in the node's backward.
        """
        if gradient.requires_grad:  # it has a graph for which the program asked, and is the program's to copy
            return gradient
        if references == _references_of_backwards_own() and gradient._use_count() == 1:  # type: ignore[attr-defined]
            return owned(gradient, self.strides)
        # A hook keeps it, or it is another tensor's gradient, too, or the program gave it to `backward`.
        return _copied(gradient, self.strides)


def tracked(
    tensors: Sequence[torch.Tensor], backward: Backward, *, in_distributed_autograd: bool
) -> list[tuple[torch.Tensor, Slot]]:
    """Return tensors in the same memory that take gradients and may be written to, and where their gradients arrive.

    They have one node, whose Python runs once for all of them.

    Args:
        tensors: tensors that take no gradient yet; they came together, and the program sees none of their hooks.
        backward: delivers the gradients; the new node holds it.
        in_distributed_autograd: see `Slot`.
    """
    _references_of_backwards_own()  # measured here: within a backward, the first use would wait for another backward
    return _tracked(tensors, backward, [Slot(None, None, in_distributed_autograd) for _ in tensors])


def is_tracked(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a result of `tracked`, and has not been written to since."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == _NAME


def _tracked(
    tensors: Sequence[torch.Tensor], backward: Backward, slots: Sequence[Slot]
) -> list[tuple[torch.Tensor, Slot]]:
    for tensor, slot in zip(tensors, slots, strict=True):
        if tensor.layout is torch.strided and not tensor.is_contiguous():
            slot.strides = torch.empty_like(tensor).stride()  # these are the tensor's if it has no gaps or overlaps
    given = [tensor.detach() for tensor in tensors], slots, backward
    outputs: tuple[torch.Tensor, ...] = _Take.apply(_ROOT, given)  # type: ignore[no-untyped-call]
    node: Any = outputs[0].grad_fn
    node._set_sequence_nr(_AT_ONCE)
    return list(zip(outputs, slots, strict=True))


class _Take(torch.autograd.Function):
    """The node: it returns tensors as they are, and its backward delivers their gradients."""

    @override
    @staticmethod
    def forward(
        ctx: Any, root: torch.Tensor, given: tuple[Sequence[torch.Tensor], Sequence[Slot], Backward]
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        tensors, ctx.slots, ctx.brings = given
        return tuple(tensors)

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        own = _copied_together(ctx.slots, gradients) if len(gradients) >= _FEWEST else None
        if own is None:
            own = [
                (slot, slot.own(gradient, sys.getrefcount(gradient)))
                for slot, gradient in zip(ctx.slots, gradients, strict=True)
                if gradient is not None and not slot.in_distributed_autograd
            ]
        if own:
            ctx.brings.bring(own)
        return None, None


_NAME = f"{_Take.__name__}Backward"


@dataclass(slots=True, eq=False)
class _Probe(Slot):
    """A slot that only records the reference count of the gradient that it is given."""

    references: int = 0

    @override
    def own(self, gradient: torch.Tensor, references: int) -> torch.Tensor:
        self.references = references
        return gradient


@functools.cache
def _references_of_backwards_own() -> int:
    """Return `sys.getrefcount`, in the node's backward, of a gradient that only the backward holds.

    The number depends on the versions of Python and torch, so it is measured.
    """
    probe = _Probe()
    with torch.inference_mode(mode=False), torch.enable_grad():
        ((output, _),) = _tracked([torch.empty(1, device="cpu")], Backward(), [probe])
        (output * 2.0).backward()
    return probe.references
