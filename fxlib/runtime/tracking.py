"""Letting a remote result take a gradient, and noting where this is to go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from fxlib.errors import ContractError
from fxlib.runtime.fans import Arrival, Slot
from fxlib.runtime.flight import Flight, Tracked, current_flight
from fxlib.runtime.gradients import as_it_is
from fxlib.runtime.structure import mapped

Destination: TypeAlias = tuple[Any, str, tuple[Any, ...], Mapping[str, Any], float | None, int]
"""To whom a gradient goes, the function that takes it, its other arguments, its timeout in seconds, and its place in
program order."""


def track(result: Any, push: Destination, *, early: bool) -> Any:
    """Return a result of which each tensor that may take a gradient takes one, in the same memory.

    Raises:
        ContractError: there is no tensor in the result.
    """
    if not torch.is_grad_enabled():
        return result
    flight = current_flight() or Flight()  # of which nobody asks, then
    if type(result) is torch.Tensor:
        if not _may_take_a_gradient(result):
            return result
        outputs, arrival = flight.fans.spread(push[-1], (result,))
        _note(flight, arrival.slots[0], arrival, push, early=early)
        return outputs[0]
    found = _tensors(result, where=push[1])
    taking = {key: each for key, each in found.items() if _may_take_a_gradient(each)}
    if not taking:
        return result
    outputs, arrival = flight.fans.spread(push[-1], list(taking.values()))
    slots: dict[int, Slot] = dict(zip(taking, arrival.slots, strict=True))
    tracked = dict(zip(taking, outputs, strict=True))
    _note(flight, mapped(result, lambda each: slots.get(id(each))), arrival, push, early=early)
    return mapped(result, lambda each: tracked.get(id(each), each))


def _may_take_a_gradient(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())


def _tensors(result: Any, where: str) -> dict[int, torch.Tensor]:
    """Return the tensors in a result by their id: one that it holds twice has one gradient."""
    found: dict[int, torch.Tensor] = {}
    mapped(result, lambda each: found.setdefault(id(each), each) if isinstance(each, torch.Tensor) else None)
    if not found:
        raise ContractError(
            f"the result is a {type(result).__name__} without tensors, and only a tensor has a gradient to push",
            where=where,
            hint="Return a tensor, or a tuple, list or dict with tensors, or drop gradient= from the contract.",
        )
    return found


def _note(flight: Flight, value: Any, arrival: Arrival, push: Destination, *, early: bool) -> None:
    to, gradient, args, kwargs, timeout_s, index = push
    flight.tracked.append(
        Tracked(
            value=value,
            arrival=arrival,
            to=to,
            gradient=gradient,
            args=as_it_is(args),
            kwargs=as_it_is(kwargs) if kwargs else kwargs,
            timeout_s=timeout_s,
            index=index,
            early=early,
        )
    )
