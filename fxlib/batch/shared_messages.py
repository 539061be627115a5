"""Values that share a message, as each would have been sent alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.rpc import internal

_PLAIN = frozenset({str, int, float, bool, type(None)})
_LARGE_BYTES = 8 * 1024


def as_sent(value: Any) -> Any:
    """Return a result as it would have been sent at once, and raise where it cannot be sent."""
    if type(value) in _PLAIN:
        return value
    if type(value) is torch.Tensor:
        return copied(value, {})
    told, tensors = _serialized(value)
    memo: dict[int, Any] = {}
    return internal.deserialize(told, [copied(each, memo) for each in tensors])


def sendable(value: Any) -> Any:
    """Return a result, and raise where it cannot be sent: else the whole message could not, with all before it."""
    if type(value) not in _PLAIN and type(value) is not torch.Tensor:
        _serialized(value)
    return value


def _serialized(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    try:
        told, tensors = internal.serialize(value)
    except Exception as error:  # of whatever kind: that of a single call is a RuntimeError
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return told, tensors


def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a tensor as it would have been sent: gaps and repetitions in memory travel, and so does what overlaps.

    Args:
        tensor: of a value.
        memo: of `copy.deepcopy`, for all tensors of the value, which share memory in the copy where they did before.
    """
    if tensor.layout is not torch.strided:
        return tensor.clone()
    held, used = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
    if held >= _LARGE_BYTES and held >= 2 * used:  # `torch.distributed.rpc` sends a piece of something large alone
        return tensor.clone()
    made: torch.Tensor = copy.deepcopy(tensor if tensor.is_leaf else tensor.detach(), memo)
    return made if made.requires_grad == tensor.requires_grad else made.requires_grad_()
