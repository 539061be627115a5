"""Remote results as autograd sees them: one node for several of them, which takes all their gradients at once.

A node for each result, and a hook on each, cost the trainer more than all else that is done for a gradient. So the
results whose gradients leave together, as the forward before showed them, are the outputs of one node. It is there from
the first of them on; those still to come are given their memory when they arrive.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from fxlib import batch
from fxlib.runtime.gradients import copied, owned

Looks: TypeAlias = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
"""What autograd must know of tensors to take gradients of them."""

_AT_ONCE = 2**64 - 1
"""The number of a node that runs as soon as its gradients are there: autograd's own, of what adds up in a leaf."""
_ROOT = torch.empty(0, requires_grad=True)
"""What makes autograd record the node. It gets no gradient."""


@dataclass(slots=True, eq=False)
class Slot:
    """Where the gradient of one tensor arrives. What backward brings again is added to it."""

    gradient: torch.Tensor | None = None
    strides: tuple[int, ...] | None = None
    """Those of the gradient, in elements; None if it is contiguous."""

    def add(self, gradient: torch.Tensor, references: int) -> None:
        """Take a gradient that has come.

        Args:
            gradient: as backward brought it.
            references: what `sys.getrefcount` said of it in `Fan.take`.
        """
        if self.gradient is not None:
            self.gradient = self.gradient + gradient
        elif gradient.requires_grad:  # with a graph of its own it is the program's, who asked for it, to copy
            self.gradient = gradient
        elif references == _references_of_backwards_own() and gradient._use_count() == 1:  # type: ignore[attr-defined]
            self.gradient = owned(gradient, self.strides)
        else:  # a hook keeps it, it is another tensor's gradient, too, or it is what the program gave to `backward`
            self.gradient = copied(gradient, self.strides)


class Fan:
    """The results of one node. It lives as long as gradients may still come: autograd alone holds it.

    Args:
        slots: where their gradients arrive.
        deaf: whether none shall: distributed autograd keeps gradients in a context of its own.
    """

    __slots__ = ("__weakref__", "_deaf", "_slots", "came")

    def __init__(self, slots: Sequence[Slot], *, deaf: bool) -> None:
        self._slots = slots
        self._deaf = deaf
        self.came: Callable[[], None] | None = None
        """To be called when a backward has brought what it has for the slots."""

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Put the gradients of a backward, None for what took no part, into their slots."""
        if self._deaf:
            return
        for slot, gradient in zip(self._slots, gradients, strict=True):
            if gradient is not None:
                slot.add(gradient, sys.getrefcount(gradient))
        if self.came is not None:
            self.came()


class _Spread(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, fan: Fan, tensors: Sequence[torch.Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.fan = fan
        return tuple(tensors)

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.fan.take(gradients)
        return None, None, None


@dataclass(slots=True, eq=False)
class _Probe(Slot):
    """A slot that only learns how often what it is given is referred to."""

    references: int = 0

    @override
    def add(self, gradient: torch.Tensor, references: int) -> None:
        self.references = references


@functools.cache
def _references_of_backwards_own() -> int:
    """Return what `sys.getrefcount` says in `Fan.take` of a gradient that nobody but the backward holds.

    It depends on the ways of Python and of torch, so it is tried out.
    """
    probe = _Probe()
    with torch.inference_mode(mode=False), torch.enable_grad():
        (output,) = _Spread.apply(_ROOT, Fan([probe], deaf=False), [torch.empty(1)])  # type: ignore[no-untyped-call]
        (output * 2.0).backward()
    return probe.references


@dataclass(frozen=True, slots=True, eq=False)
class Kin:
    """Results whose gradients leave together: by the index of each, what its tensors look like."""

    looks: Mapping[int, Looks]


@dataclass(slots=True, eq=False)
class Arrival:
    """Where the gradients of one result arrive. It holds none of the result's tensors, nor the fan."""

    slots: Sequence[Slot]
    looks: Looks | None
    """None: the result cannot join a fan that is there before it."""
    fan: weakref.ref[Fan]


_Outputs: TypeAlias = tuple[Sequence[torch.Tensor], Arrival]


class Fans:
    """The fans of one forward.

    Args:
        kin: of results by their index, as the forward before showed them.
    """

    def __init__(self, kin: Mapping[int, Kin]) -> None:
        self._kin = kin
        self._deaf: bool | None = None
        self._begun: set[Kin] = set()
        self._prepared: dict[int, _Outputs] = {}

    def spread(self, index: int, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Arrival]:
        """Return outputs of a fan in the memory of a result's tensors, which take no gradient yet.

        The outputs may be written to.
        """
        made = self._awaited(index)
        if made is not None and _look_like(tensors, made[1].looks):
            for output, tensor in zip(made[0], tensors, strict=True):
                output.data = tensor
        else:
            alone = [each.detach() for each in tensors]
            made = self._spread({index: (alone, _looks_of(tensors))})[index]
        for slot, tensor in zip(made[1].slots, tensors, strict=True):
            if tensor.layout is torch.strided and not tensor.is_contiguous():
                slot.strides = torch.empty_like(tensor).stride()  # as the tensor's, where that has no gaps or overlaps
        return made

    def _awaited(self, index: int) -> _Outputs | None:
        """Return what was prepared for a result, once; None if nothing was."""
        kin = self._kin.get(index)
        if kin is not None and kin not in self._begun:
            self._begun.add(kin)
            self._prepared |= self._spread({each: (_stand_ins(looks), looks) for each, looks in kin.looks.items()})
        return self._prepared.pop(index, None)

    def _spread(self, results: Mapping[int, tuple[Sequence[torch.Tensor], Looks | None]]) -> dict[int, _Outputs]:
        _references_of_backwards_own()  # tried out here, since within a backward the first one would wait for another
        if self._deaf is None:  # a forward begins and ends in one context
            self._deaf = batch.in_autograd_context()
        return _spread(results, deaf=self._deaf)


def _looks_of(tensors: Sequence[torch.Tensor]) -> Looks | None:
    for each in tensors:
        if type(each) is not torch.Tensor or each.layout is not torch.strided:
            return None
    return tuple([(each.shape, each.dtype, each.device) for each in tensors])


def _look_like(tensors: Sequence[torch.Tensor], looks: Looks | None) -> bool:
    if looks is None or len(tensors) != len(looks):
        return False
    for each, (shape, dtype, device) in zip(tensors, looks, strict=True):
        if type(each) is not torch.Tensor or each.layout is not torch.strided:
            return False
        if each.shape != shape or each.dtype is not dtype or each.device != device:
            return False
    return True


def _spread(results: Mapping[int, tuple[Sequence[torch.Tensor], Looks | None]], *, deaf: bool) -> dict[int, _Outputs]:
    tensors = [each for found, _ in results.values() for each in found]
    slots = [Slot() for _ in tensors]
    fan = Fan(slots, deaf=deaf)
    outputs = _Spread.apply(_ROOT, fan, tensors)  # type: ignore[no-untyped-call]
    outputs[0].grad_fn._set_sequence_nr(_AT_ONCE)
    known, begin = weakref.ref(fan), 0
    made: dict[int, _Outputs] = {}
    for index, (found, looks) in results.items():
        own = slice(begin, begin := begin + len(found))
        made[index] = outputs[own], Arrival(slots[own], looks, known)
    return made


def _stand_ins(looks: Looks) -> list[torch.Tensor]:
    """Return tensors of next to no memory in the place of those that are still to come."""
    return [torch.empty_strided(shape, (0,) * len(shape), dtype=dtype, device=device) for shape, dtype, device in looks]
