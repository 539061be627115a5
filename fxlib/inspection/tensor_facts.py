"""Facts about a value without its numbers: the shape, dtype and memory of each tensor in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxlib.utils.pytree import tensors_in

Size = int | torch.SymInt


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """The facts about one tensor. Sizes that vary between runs are symbols, with the given inputs' size as a hint."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: str
    bytes: Size
    """Bytes of its elements; elements of an expanded tensor count once."""
    memory: int
    """Number of the memory that the tensor lies in; tensors with the same number share their memory."""

    def __str__(self) -> str:
        """Return the facts in short, such as `float32[2, 3]`."""
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def distinct_tensors(value: Any) -> list[torch.Tensor]:
    """Return each tensor of a nested value once."""
    return list({id(each): each for each in tensors_in(value)}.values())


def facts_of(value: torch.Tensor) -> TensorFacts:
    """Return the facts about one tensor."""
    return TensorFacts(
        shape=tuple(value.shape),
        dtype=value.dtype,
        device=value.device.type,
        bytes=bytes_of(value),
        memory=memory_of(value),
    )


def bytes_of(value: torch.Tensor) -> Size:
    """Return the bytes of a tensor's elements; those of an expanded tensor count once."""
    return count_of(value) * value.element_size()


def count_of(value: torch.Tensor) -> Size:
    """Return how many elements a tensor has in memory; those of an expanded tensor count once."""
    if value.is_nested:
        return 0
    if value.layout is not torch.strided:
        return value.numel()
    count: Size = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if not (type(stride) is int and stride == 0):
            count *= size
    return count


def memory_of(value: torch.Tensor) -> int:
    """Return a key that tensors over the same memory share, for as long as one of them lives."""
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a tensor without storage: a sparse one, or a wrapper
        return id(value)


def held_bytes(value: torch.Tensor) -> Size:
    """Return the bytes of the whole storage that a tensor lies in."""
    try:
        return value.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return bytes_of(value)


def number(size: Size) -> int | None:
    """Return a size, or its hint if it is a symbol; None if only a run can determine it."""
    if isinstance(size, int):
        return size
    found = size.node.hint if size.node.has_hint() else None
    return None if found is None else int(found)
