"""Facts about writing in place that torch publishes: variants, inverses of views, operators that read no memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.layouts import layout_of

Overload = OpOverload[..., Any]
_aten = torch.ops.aten

SCATTERS: dict[object, Overload] = {
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.select_scatter.default: _aten.select.int,
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.as_strided_scatter.default: _aten.as_strided.default,
}
"""Operators that return a copy of their first argument with a part replaced by the second, and the view that this part
is."""

ABSOLUTE: frozenset[object] = frozenset(
    {_aten.as_strided.default, _aten.as_strided_scatter.default, _aten.sym_storage_offset.default}
)
"""Views whose offset counts from the beginning of the tensor's storage, not of the tensor."""

_ROUNDED_FIRST: dict[object, Overload] = {_aten.mul.Scalar: _aten.mul_.Tensor}
"""Operators whose variant rounds a number to a short dtype before it computes, and what to use instead."""

_OTHER_VALUES = frozenset({"_conj", "_neg_view", "_conj_physical"})
"""Views of the same memory whose values differ."""


@functools.cache
def variant_of(target: object) -> Overload | None:
    """Return the overload that does the work of `target` in place, with the same arguments; None if there is none.

    Its name is that of `target` with an underscore, its arguments have the same types, and it writes only the first.
    Variants of views change the tensor instead of its values, and do not count.
    """
    if not isinstance(target, OpOverload) or target.namespace not in {"aten", "prims"} or _is_annotated(target):
        return None
    if target in _ROUNDED_FIRST:
        return _ROUNDED_FIRST[target]
    packet = getattr(getattr(torch.ops, target.namespace), f"{name_of(target)}_", None)
    if packet is None:
        return None
    overloads = [getattr(packet, name) for name in packet.overloads()]
    found = [each for each in overloads if _matches(target._schema, each._schema)]
    return found[0] if len(found) == 1 and torch.Tag.inplace_view not in found[0].tags else None


@functools.cache
def is_view(target: object) -> bool:
    """Return whether an operator only makes views of its first argument, and reads none of its memory.

    Composite operators (`reshape`) may copy, whatever their schema says.
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten" or name_of(target) in _OTHER_VALUES:
        return False
    if name_of(target) in words.UNSAFE_VIEWS:
        return True
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return _is_annotated(target) and not composite and torch.Tag.inplace_view not in target.tags


def name_of(target: Overload) -> str:
    """Return an operator's name without namespace and overload."""
    return target._schema.name.split("::")[1]


@functools.cache
def gives_truths(target: object) -> bool:
    """Return whether the result is a truth value per element, which the variant writes as a number."""
    return isinstance(target, OpOverload) and name_of(target) in words.TRUTHS


@functools.cache
def measures_only(target: object) -> bool:
    """Return whether an operator reads none of its arguments' memory."""
    return isinstance(target, OpOverload) and target.namespace == "aten" and name_of(target) in words.MEASURING


def is_exact(node: Node) -> bool:
    """Return whether the bits of a node's result do not depend on the layout of its arguments.

    With `alpha` and other options, and for complex numbers, an operator rounds more than once.
    """
    target = node.target
    if not isinstance(target, OpOverload) or name_of(target) not in words.EXACT or target._schema.is_mutable:
        return False
    if node.kwargs.get("alpha", 1) != 1 or not {"rounding_mode", "decimals"}.isdisjoint(node.kwargs):
        return False
    if name_of(target).startswith("clamp") and len(node.all_input_nodes) > 1:  # it is `maximum` then
        return False
    layouts = map(layout_of, node.all_input_nodes)
    return not any(each is not None and each.dtype.is_complex for each in layouts)


def commutes(node: Node) -> bool:
    """Return whether a node's result has the same bits with its first two arguments swapped; of two NaNs, either."""
    if not isinstance(node.target, OpOverload) or len(node.args) != 2:
        return False
    return name_of(node.target) in words.COMMUTATIVE and is_exact(node)


@functools.cache
def is_elementwise(target: object) -> bool:
    """Return whether it visits its arguments' elements in an order that depends on them alone, not on the result."""
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or name_of(target) in words.EXACT)


@functools.cache
def changes_tensors(target: object) -> bool:
    """Return whether an operator gives its argument another shape, memory, or interpretation."""
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.inplace_view in target.tags or name_of(target) in _OTHER_VALUES | {"resize_", "set_", "resize_as_"}


def cast_back(node: Node, dtype: torch.dtype) -> Node | None:
    """Return the only user of a node if all it does is convert the node's value to `dtype`."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    given = {name: value for name, value in user.kwargs.items() if value is not None}
    if user.target is not _aten._to_copy.default or user.args != (node,) or given.pop("dtype", None) is not dtype:
        return None
    return user if given.pop("layout", torch.strided) is torch.strided and not given else None


def _is_annotated(target: Overload) -> bool:
    arguments = target._schema.arguments
    annotation = arguments[0].alias_info if arguments else None
    return annotation is not None and not annotation.is_write


def _matches(functional: torch._C.FunctionSchema, in_place: torch._C.FunctionSchema) -> bool:
    ours, theirs = functional.arguments, in_place.arguments
    if not ours or len(ours) != len(theirs) or str(ours[0].type) != "Tensor":
        return False
    if any(one.type != other.type or one.name != other.name for one, other in zip(ours, theirs, strict=True)):
        return False
    first, *others = (each.alias_info for each in theirs)
    return first is not None and first.is_write and not any(others)
