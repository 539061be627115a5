"""Let a remote result take a gradient, and note the server to which that is pushed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from fxlib.errors import ContractError
from fxlib.runtime.tracking.autograd_node import Slot, as_it_is, is_tracked, tracked
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext, Tracked, current_forward
from fxlib.runtime.tracking.result_structure import mapped
from fxlib.utils.pytree import leaves

Destination: TypeAlias = tuple[Any, str, tuple[Any, ...], Mapping[str, Any], float | None, int]
"""The server to which a gradient goes, the function that takes it, its other arguments, its timeout in seconds, and the
call's index in program order."""

_TRANSFORMED = "a transform of torch.func takes the gradients of a forward, and brings none to the servers"


def track(result: Any, push: Destination, *, together: bool) -> Any:
    """Return a result in the same memory, each tensor of which takes a gradient if its dtype allows that.

    Raises:
        ContractError: there is no tensor in the result.
    """
    forward = current_forward() or ForwardContext()  # outside of a forward, nobody reads the notes
    if not _may_track():
        if torch.is_grad_enabled():
            forward.untracked = _TRANSFORMED
        return result
    if type(result) is torch.Tensor:
        if not _may_take_a_gradient(result):
            return result
        output, slot = _made(result, forward)
        _note(forward, slot, (slot,), push, together=together)
        return output
    found = _tensors(result, where=push[1])
    taking = {key: each for key, each in found.items() if _may_take_a_gradient(each)}
    if not taking:
        return result
    made = {key: _tracked(forward, [each])[0] for key, each in taking.items()}
    outputs = {key: output for key, (output, _) in made.items()}
    slots = {key: slot for key, (_, slot) in made.items()}
    _note(forward, mapped(result, lambda each: slots.get(id(each))), tuple(slots.values()), push, together=together)
    return mapped(result, lambda each: outputs.get(id(each), each))


def track_together(result: Any, push: Destination) -> Any:
    """Do what `track` does for a result that travels with others, with few steps if it came in a message with these.

    Raises:
        ContractError: there is no tensor in the result.
    """
    forward = THREAD.forward
    made = forward.made.pop(id(result), None) if forward is not None and _may_track() else None
    if forward is None or made is None or result.requires_grad:
        return track(result, push, together=True)
    _, output, slot = made
    _note(forward, slot, (slot,), push, together=True)
    return output


def _made(result: torch.Tensor, forward: ForwardContext) -> tuple[torch.Tensor, Slot]:
    """Return the stand-in for a result and its gradient's slot; make them for all results that came with it."""
    made, key = forward.made, id(result)
    if key not in made:
        message = forward.came_with.pop(key, _no_message)()
        came = {} if message is None else {id(each): each for each in message.outcomes}
        together = [each for each in came.values() if type(each) is torch.Tensor and _may_take_a_gradient(each)]
        for other in came:
            forward.came_with.pop(other, None)
        if len(together) < 2:
            return _tracked(forward, [result])[0]
        for each, (output, slot) in zip(together, _tracked(forward, together), strict=True):
            forget = partial(made.pop, id(each))  # it is called with the reference, which pop takes as its default
            made[id(each)] = weakref.ref(each, forget), output, slot
    _, output, slot = made.pop(key)
    return output, slot


def _no_message() -> None:
    """Return no message; it stands for the message of results that came by themselves."""


def _tracked(forward: ForwardContext, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, Slot]]:
    return tracked(tensors, forward.backward, in_distributed_autograd=forward.in_distributed_autograd)


def keep_gradients(value: Any) -> None:
    """Have tracked results among the leaves of a value keep their gradients in `grad`, as leaves of autograd do.

    A program that pushes by a loop of its own looks for them there.
    """
    for _, each in leaves(value):
        if isinstance(each, torch.Tensor) and is_tracked(each):
            each.retain_grad()


def _may_track() -> bool:
    """Return whether gradients are recorded that reach a tape; a transform of `torch.func` brings none there."""
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


def _may_take_a_gradient(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())


def _tensors(result: Any, where: str) -> dict[int, torch.Tensor]:
    """Return the tensors in a result by their ids; a tensor that the result holds twice has one gradient."""
    found: dict[int, torch.Tensor] = {}
    mapped(result, lambda each: found.setdefault(id(each), each) if isinstance(each, torch.Tensor) else None)
    if not found:
        raise ContractError(
            f"the result is a {type(result).__name__} without tensors, and only a tensor has a gradient to push",
            where=where,
            hint="Return a tensor, or a tuple, list or dict with tensors, or drop gradient= from the contract.",
        )
    return found


def _note(forward: ForwardContext, value: Any, slots: Sequence[Slot], push: Destination, *, together: bool) -> None:
    to, gradient, args, kwargs, timeout_s, index = push
    forward.tracked.append(
        Tracked(
            value=value,
            slots=slots,
            to=to,
            gradient=gradient,
            args=as_it_is(args),
            kwargs=as_it_is(kwargs) if kwargs else kwargs,
            timeout_s=timeout_s,
            index=index,
            together=together,
        )
    )
