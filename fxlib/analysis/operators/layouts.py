"""How a value lies in memory, according to the graph's metadata: shape, strides, dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.passes.shape_prop import TensorMetadata

Sizes = tuple[int | torch.SymInt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One strided tensor. Sizes may be symbolic; `offset`, in elements, and `device` are None where unknown."""

    shape: Sizes
    stride: Sizes
    dtype: torch.dtype
    offset: int | torch.SymInt | None = None
    device: torch.device | None = None

    def same_values(self, other: Layout) -> bool:
        """Return whether tensors of both have one shape, one dtype and one device."""
        devices = self.device == other.device or self.device is None or other.device is None
        return self.dtype == other.dtype and devices and same(self.shape, other.shape)

    def same_strides(self, other: Layout) -> bool:
        """Return whether both also have the same strides."""
        return same(self.stride, other.stride)

    @property
    def has_distinct_elements(self) -> bool:
        """Return whether each element is known to have memory of its own, unlike after `expand` or `unfold`."""
        both = zip(self.stride, self.shape, strict=True)
        dimensions = [(stride, size) for stride, size in both if isinstance(stride, int) and isinstance(size, int)]
        reach = 0
        for stride, size in sorted(dimensions):
            if size > 1 and stride <= reach:
                return False
            reach += (size - 1) * stride
        return len(dimensions) == len(self.shape)


def layout_of(node: Node) -> Layout | None:
    """Return the layout of a node's value, from `meta["val"]` or `meta["tensor_meta"]`; None if it is unknown."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    known = node.meta.get("tensor_meta")
    if value is not None or not isinstance(known, TensorMetadata) or known.is_quantized:
        return None
    return Layout(shape=tuple(known.shape), stride=tuple(known.stride), dtype=known.dtype)


def of_tensor(value: torch.Tensor) -> Layout | None:
    """Return the layout of a real or fake tensor; None if it has no strides, or needs more than strides to be read."""
    if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_conj() or value.is_neg():
        return None
    return Layout(
        shape=tuple(value.shape),
        stride=value.stride(),
        dtype=value.dtype,
        offset=value.storage_offset(),
        device=value.device,
    )


def same(ours: Sequence[int | torch.SymInt], theirs: Sequence[int | torch.SymInt]) -> bool:
    """Return whether sizes are equal for all values of the symbols in them."""
    if len(ours) != len(theirs):
        return False
    return all(one is other or _equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _equal(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    # The import loads sympy, which a symbolic size has loaded already.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(one == other)
