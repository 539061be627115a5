"""Differences of two values, in bits or beyond a bound, and the contents of any tensor as plain tensors.

Plain tensors are dense, strided, and of torch's own class.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree

from fxlib.errors import PassError

_SHOWN_CHARS = 200

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far apart two figures may be: `|a - b| <= atol + rtol * |b|`. If both are zero, the bits must be the same.

    Integers and flags must always be equal, since they count something, or point somewhere.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        """Reject invalid bounds."""
        if not (0 <= self.rtol < math.inf and 0 <= self.atol < math.inf):
            raise PassError("a tolerance is a finite number, and not negative", where="verify")

    @property
    def is_exact(self) -> bool:
        """Whether only the same bits will do."""
        return self.rtol == 0 and self.atol == 0

    def __str__(self) -> str:
        """Return the bound in words."""
        return "bit for bit" if self.is_exact else f"within rtol={self.rtol:g}, atol={self.atol:g}"


def difference(one: object, other: object, tolerance: Tolerance) -> str:
    """Describe how two values differ beyond the tolerance; "" if they do not."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return "" if _alike(one, other, tolerance) else f"{_shown(one)} and {_shown(other)}"
    if kind(one) != kind(other):
        return f"{kind(one)} and {kind(other)}"
    if same_bits(one, other):
        return ""
    if not _wrap_alike(one, other):
        return "they wrap tensors differently"
    # With a tolerance, what a sparse tensor stores, and where, does not count, but what it represents.
    ours, theirs = map(plain_parts if tolerance.is_exact else _compared_parts, (one, other))
    if _shapes(ours) != _shapes(theirs):
        return "they store different positions"
    wrong = sum(int(_beyond(*pair, tolerance).sum()) for pair in zip(ours, theirs, strict=True))
    if not wrong:
        return ""
    elements = sum(part.numel() for part in ours)
    return f"{wrong} of {elements} elements differ, by {largest_difference(one, other):.3g} at most"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one kind hold the same bits; NaNs are like other bits, and -0 differs from 0."""
    if kind(one) != kind(other):
        return False
    ours, theirs = plain_parts(one), plain_parts(other)
    same = _shapes(ours) == _shapes(theirs) and all(
        torch.equal(_bits(mine), _bits(its)) for mine, its in zip(ours, theirs, strict=True) if mine.numel()
    )
    return same and _wrap_alike(one, other)


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two elements; infinity if two differ of which one is not finite."""
    if kind(one) != kind(other) or not _has_values(one) or not _wrap_alike(one, other):
        return math.inf
    ours, theirs = (_numbers(each).to(torch.complex128) for each in (one, other))
    if ours.shape != theirs.shape:
        return math.inf
    unlike = ~torch.isclose(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)
    differences = (ours - theirs)[unlike].abs()
    return float(differences.nan_to_num(nan=math.inf, posinf=math.inf).max()) if differences.numel() else 0.0


def _alike(one: object, other: object, tolerance: Tolerance) -> bool:
    """Return whether two values other than tensors are the same; numbers are compared as in tensors."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)) and isinstance(other, (float, complex)):
        ours, theirs = (torch.tensor(each, dtype=torch.complex128) for each in (one, other))
        exact = tolerance.is_exact
        return _packed(one) == _packed(other) if exact else not bool(_beyond(ours, theirs, tolerance))
    if isinstance(one, (set, frozenset)) and isinstance(other, (set, frozenset)):
        return _members(one) == _members(other)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(one, (numpy.ndarray, numpy.generic)) and not one.dtype.hasobject:
        return _same_array(one, other, tolerance)
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - of an array of objects, for one: what cannot be compared is not known to be the same
        return False


def _same_array(one: Any, other: Any, tolerance: Tolerance) -> bool:
    """Return whether two arrays or numbers of NumPy are the same; figures are compared as in tensors."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.tobytes() == other.tobytes():
        return True
    if tolerance.is_exact or one.dtype.kind not in "fc":
        return False
    ours, theirs = (torch.tensor(each.tolist(), dtype=torch.complex128) for each in (one, other))
    return not bool(_beyond(ours, theirs, tolerance).any())


def _members(values: AbstractSet[object]) -> set[tuple[type, object]]:
    """Return the members of a set with their classes, and numbers by their bits: 1, 1.0 and True are equal."""
    return {(type(each), _packed(each) if isinstance(each, (float, complex)) else each) for each in values}


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _packed(number: complex) -> bytes:
    return struct.pack("<dd", number.real, number.imag)


def _shapes(parts: list[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(part.dtype, part.shape) for part in parts]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _beyond(one: torch.Tensor, other: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """Return which elements of two plain tensors differ."""
    if one.numel() == 0:
        return torch.zeros(0, dtype=torch.bool)
    if tolerance.is_exact or not _has_figures(one):
        return (_bits(one) != _bits(other)).reshape(one.numel(), -1).any(1)
    wide = torch.complex128 if one.is_complex() else torch.float64
    return ~torch.isclose(one.to(wide), other.to(wide), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


def kind(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype, layout, shape and device in words, and whether its memory was freed."""
    nested = tensor.is_nested  # the shape of such a tensor names its offsets, or is unknown
    shape = "nested" if nested else f"of shape {tuple(tensor.shape)}"
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype}{layout} {shape} on {tensor.device}{', freed' if is_freed(tensor) else ''}"


def largest_error(value: object, reference: object) -> float:
    """Return the largest relative error of any tensor of a nest (see `relative_error`); infinity for another nest."""
    ours, theirs = pytree.tree_leaves(value), pytree.tree_leaves(reference)
    if len(ours) != len(theirs):
        return math.inf
    return max(map(relative_error, ours, theirs), default=0.0)


def relative_error(value: object, reference: object) -> float:
    """Return the largest difference between two tensors, over the largest magnitude in the reference.

    This is the error in the maximum norm: N. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition,
    2002, section 6.2. Measured per element, a rounded value that should be zero would make the error arbitrarily large.

    Returns:
        0 if the values are the same, including NaN and infinities. Infinity if no bound could hold: the dtypes or
        shapes differ, values other than floating-point numbers differ, or a value is finite on one side only.
    """
    if not (isinstance(value, torch.Tensor) and isinstance(reference, torch.Tensor)):
        return 0.0 if _alike(value, reference, Tolerance()) else math.inf
    if value.dtype != reference.dtype or value.is_nested != reference.is_nested:
        return math.inf
    if not (_has_values(value) and _has_values(reference)):
        return 0.0 if same_bits(value, reference) else math.inf
    if not _has_figures(reference):
        return 0.0 if same_bits(value.detach().cpu(), reference.detach().cpu()) else math.inf
    wide = torch.complex128 if reference.is_complex() else torch.float64
    ours, theirs = (_numbers(each).cpu().to(wide) for each in (value, reference))
    if ours.shape != theirs.shape or not _count_alike(value, reference) or not _wrap_alike(value, reference):
        return math.inf
    unequal = ~torch.isclose(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)
    if not bool(unequal.any()):
        return 0.0
    if not bool((ours[unequal].isfinite() & theirs[unequal].isfinite()).all()):
        return math.inf
    scale = float(theirs[theirs.isfinite()].abs().max())
    return float((ours - theirs)[unequal].abs().max()) / scale if scale else math.inf


def wraps(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class wraps other tensors."""
    return _python_dispatch.is_traceable_wrapper_subclass(tensor)


def unwrapped(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor wraps, at any depth; a tensor that wraps none is returned itself."""
    if not wraps(tensor):
        return [tensor]
    return [part for value in _flattened(tensor)[0] if isinstance(value, torch.Tensor) for part in unwrapped(value)]


def _flattened(tensor: torch.Tensor) -> tuple[list[object], object]:
    """Return what a tensor wraps, tensors for the most part, and its context: a scale, say, or placements on ranks."""
    with torch._C.DisableTorchFunctionSubclass():
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [getattr(tensor, name) for name in names], context


def _wrap_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same, at any depth, apart from the tensors that they wrap."""
    if not (wraps(one) and wraps(other)):
        return wraps(one) == wraps(other)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        # A context may say whether the tensor takes a gradient, which is no part of its value.
        one, other = (each.detach() if each.requires_grad else each for each in (one, other))
    (ours, context), (theirs, its) = _flattened(one), _flattened(other)
    (mine, form), (others, other_form) = pytree.tree_flatten(context), pytree.tree_flatten(its)
    # Nested tensors wrap one more once they were asked for the greatest length of a row, which does not count.
    pairs = [*zip(mine, others, strict=False), *zip(ours, theirs, strict=False)]
    return form == other_form and all(
        _wrap_alike(*pair) if all(isinstance(each, torch.Tensor) for each in pair) else _alike(*pair, Tolerance())
        for pair in pairs
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether memory that a tensor views was freed, as FSDP does between uses; who reads it kills the process.

    Sparse, nested and quantized tensors are taken to have theirs.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            part.layout is torch.strided
            and not (part.is_nested or part.is_quantized)
            and part.untyped_storage().nbytes() < bytes_viewed(part)
            for part in unwrapped(tensor)
        )


def bytes_viewed(tensor: torch.Tensor) -> int:
    """Return how many bytes of its storage a strided tensor needs, from the first one on."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.itemsize


def _has_values(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or is_freed(tensor))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor consists of, without gradients; one on the meta device, or freed, has none.

    A sparse tensor consists of indices and values, coalesced; a quantized one of integers, scales and zero points; a
    nested one of values and sizes; a subclass that wraps others of the parts of these.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        there = filter(_has_values, unwrapped(tensor))
        return [part.detach().resolve_conj().resolve_neg() for each in there for part in _parts(each)]


def _compared_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that are compared with a tolerance: of a wrapper or nested tensor those that it holds.

    Empty ones hold nothing: the greatest length of a nested tensor's rows, for one, which it notes when it is asked.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if wraps(tensor):
            there = filter(_has_values, unwrapped(tensor))
            return [part for each in there for part in _compared_parts(each) if part.numel()]
        return plain_parts(tensor) if tensor.is_nested else [_numbers(tensor)]


def _count_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the integers in two wrapper or nested tensors are the same, as the ends of rows are."""
    if not (wraps(other) or other.is_nested):
        return True
    ours, theirs = _compared_parts(one), _compared_parts(other)
    return _shapes(ours) == _shapes(theirs) and all(
        same_bits(mine, its) for mine, its in zip(ours, theirs, strict=True) if not _has_figures(its)
    )


def _has_figures(part: torch.Tensor) -> bool:
    return part.is_floating_point() or part.is_complex()


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers that a tensor represents, as one plain tensor: dense, and dequantized."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if wraps(tensor) or tensor.is_nested:
            flat = [part.reshape(-1) for part in plain_parts(tensor) if _has_figures(part)]
            return torch.cat(flat) if flat else torch.empty(0)
        if tensor.is_quantized:
            return tensor.dequantize()
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        return dense.detach().resolve_conj().resolve_neg()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_nested:
        return [tensor.values(), tensor._nested_tensor_size()]
    if tensor.is_quantized:
        return [tensor.int_repr(), *_scales(tensor)]
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in _COMPRESSED:
        return [*(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]), tensor.values()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _scales(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [torch.tensor([tensor.q_scale()], dtype=torch.float64), torch.tensor([tensor.q_zero_point()])]
    return [
        tensor.q_per_channel_scales(),
        tensor.q_per_channel_zero_points(),
        torch.tensor([tensor.q_per_channel_axis()]),
    ]
