"""The guards on the inputs of a graph made by `torch.export`, and their checks.

Export runs the model once on sample inputs, and the graph fixes all that the program decided by their structure, sizes
and plain values. Conditions on sizes are data, nested tuples with an operation first: no received code is evaluated.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.runtime.guards.value_conditions import ValueCondition

Expression = int | str | bool | tuple[Any, ...]
"""A number, the name of a symbol, or (operation, expression, ...)."""

OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "mod", "floordiv")},
    "add": lambda *terms: sum(terms),
    "mul": lambda *factors: math.prod(factors),
    "and": lambda *parts: all(parts),
    "or": lambda *parts: any(parts),
    "not": operator.not_,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
}
"""The operations of an expression; all of them work on whole numbers."""
_WORDS: Mapping[str, str] = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "mod": "%", "floordiv": "//",
    "add": "+", "mul": "*", "and": "and", "or": "or",
}  # fmt: skip
_DEVICES = ("cpu", "cuda")
_PLAIN = frozenset({bool, int, float, str, type(None)})
_TENSORS = frozenset({torch.Tensor})
_METADATA = operator.attrgetter("layout", "shape", "dtype", "device", "requires_grad")
_MAX_FITTED = 64
"""The number of combinations of shapes, strides, kinds and plain values of arguments that are remembered to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGuard:
    """A guard for one tensor; `sizes` has a number, a symbol or an expression for each dimension."""

    dtype: torch.dtype
    device: str
    sizes: tuple[Expression, ...]
    strides: tuple[Expression, ...] | None = None
    """The strides in elements, written as `sizes`; those of dimensions with one element are not checked. None means
    contiguous."""
    requires_grad: bool | None = None
    """Whether the tensor takes a gradient; None allows both."""
    same_as: int | None = None
    """The index of the first leaf that is the same tensor, if there is an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueGuard:
    """A guard for one plain value, which may be None."""

    value: bool | float | str | None


Guard = TensorGuard | ValueGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGuards:
    """The guards on the inputs of one graph, one for each leaf of its arguments."""

    leaves: tuple[Guard, ...]
    ranges: tuple[tuple[str, int, int | None], ...] = ()
    """Each symbol with its least and greatest value; None means no limit."""
    conditions: tuple[Expression, ...] = ()
    """Further conditions on the symbols."""
    autocast: tuple[tuple[str, str], ...] = ()
    """The kinds of devices under autocast, and the dtypes; under it, a program leaves out other casts than without."""
    values: tuple[ValueCondition, ...] = ()
    """The conditions on the values of the arguments."""
    ordered: tuple[str, ...] = ()
    """The names of the arguments that the forward takes by `**`, if there are several: it sees their order."""


class GuardedCodeGen(_PyTreeCodeGen):
    """Code generation of an exported graph: arguments and results are nested, and the arguments are guarded.

    Args:
        info: names of the forward's arguments, and the structures of arguments, as (args, kwargs), and results.
        guards: the guards on the leaves.
    """

    def __init__(self, info: _PyTreeInfo, guards: InputGuards) -> None:
        super().__init__(info)
        self.guards = guards
        self._positional = info.in_spec.child(0).num_children
        self._flatten = _flattener(info.in_spec)
        self._fitted: set[Any] = set()
        """The metadata of leaves that fitted (see `_metadata_of`); conditions on values are checked at each call."""

    @override
    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        """Unpack nested tuples and lists by a Python assignment; torch's way takes several times as long."""
        info = self.pytree_info
        children = [each for part in info.in_spec.children() for each in part.children()]
        names = [each.split(":")[0].split("#")[0].strip() for each in free_vars]
        patterns = _patterns(children, names)
        if patterns is None or any(":" in each for each in free_vars):
            return super().gen_var_bindings(fn_args, free_vars, expanded_def)
        return f"\n    {', '.join(patterns)}, = {', '.join(info.orig_args)},"

    def misfit(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return in words why the graph is not made for these arguments; empty if it is made for them."""
        if (modes := autocast_modes()) != self.guards.autocast:
            return f"autocast is {_modes_in_words(modes)}, and was {_modes_in_words(self.guards.autocast)} at capture"
        structure = self._nested(args, kwargs)
        if isinstance(structure, str):
            return structure
        leaves: list[Any] = []
        if self._flatten is None or not self._flatten(structure, leaves):
            leaves, found = pytree.tree_flatten(structure)
            if not _alike(found, self.pytree_info.in_spec):
                problem = f"{found} and not {self.pytree_info.in_spec}"
                return f"the arguments are nested otherwise than at capture: {problem}"
        metadata = _metadata_of(leaves)
        if metadata is None or metadata not in self._fitted:
            try:
                problem = self._unlike(leaves)
            except ZeroDivisionError:
                problem = "a size is 0 that others were divided by at capture"
            if problem:
                return problem
            if metadata is not None:
                if len(self._fitted) >= _MAX_FITTED:
                    self._fitted.clear()
                self._fitted.add(metadata)
        if not self.guards.values:
            return ""
        return next((problem for each in self.guards.values if (problem := each.misfit(leaves))), "")

    def _nested(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | str:
        """Return arguments as they were given at capture, by position and by name; or in words why they cannot be."""
        names, positional = self.pytree_info.orig_args, self._positional
        if not kwargs and len(args) == positional == len(names):  # this is nearly always so
            return tuple(args), {}
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > positional or len(given) < len(args) + len(kwargs):
            return f"{len(args)} positional arguments were given, and {positional} at capture"
        if given.keys() != set(names):
            return f"the arguments {_listed(given)} were given, and {_listed(names)} at capture"
        if ordered := self.guards.ordered:
            order = tuple(name for name in kwargs if name in ordered)
            if order != ordered:
                return f"the arguments {_listed(order)} were given in this order, and as {_listed(ordered)} at capture"
        by_position = tuple(given[name] for name in names[:positional])
        return by_position, {name: given[name] for name in names[positional:]}

    def _unlike(self, leaves: Sequence[Any]) -> str:
        pairs = list(zip(leaves, self.guards.leaves, strict=True))
        sizes, same = _sizes(pairs), repeated(leaves)
        for index, (leaf, guard) in enumerate(pairs):
            problem = _tensor_misfit(leaf, guard, sizes) if isinstance(guard, TensorGuard) else _misfit(leaf, guard)
            if not problem and isinstance(guard, TensorGuard) and same.get(index) != guard.same_as:
                problem = _identity_misfit(
                    *[None if each is None else self._name(each) for each in (same.get(index), guard.same_as)]
                )
            if problem:
                return f"the argument {self._name(index)} {problem}"
        for symbol, least, greatest in self.guards.ranges:
            if symbol in sizes and not least <= sizes[symbol] <= (math.inf if greatest is None else greatest):
                limit = f"at least {least}" if greatest is None else f"{least} to {greatest}"
                return f"a size is {sizes[symbol]}, and the graph holds where {symbol} is {limit}"
        for condition in self.guards.conditions:
            if not evaluate(condition, sizes):
                return f"{in_words(condition)} does not hold where {sizes}"
        return ""

    def _name(self, index: int) -> str:
        info = self.pytree_info
        structure = pytree.tree_unflatten(list(range(info.in_spec.num_leaves)), info.in_spec)
        for name, value in zip(info.orig_args, (*structure[0], *structure[1].values()), strict=True):
            for path, leaf in pytree.tree_leaves_with_path(value):
                if leaf == index:
                    return name + pytree.keystr(path)
        return str(index)


def _metadata_of(leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return all that guards ask of leaves, except for conditions on values; None if that is not simple to tell."""
    kinds = tuple(map(type, leaves))
    tensors, plain = leaves, list[str]()
    if not _TENSORS.issuperset(kinds):
        tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
        plain = [repr(leaf) for leaf in leaves if type(leaf) in _PLAIN]
        if len(tensors) + len(plain) < len(leaves):
            return None
    first: dict[int, int] = {}  # the first position of each tensor, which may be given twice
    firsts = list(map(first.setdefault, map(id, tensors), itertools.count()))
    own = tensors if len(first) == len(tensors) else [tensors[index] for index in first.values()]
    if any(map(torch.Tensor.is_conj, own)) or any(map(torch.Tensor.is_neg, own)):
        return None
    try:
        strides = list(map(torch.Tensor.stride, own))
    except RuntimeError:  # one tensor is sparse
        return None
    return (kinds, *plain, *map(_METADATA, own), *strides, *firsts)


def _flattener(spec: pytree.TreeSpec) -> Callable[[Any, list[Any]], bool] | None:
    """Return a function that appends the leaves of a nested value to a list, and tells whether its structure is this.

    For tuples, lists and dictionaries, it is several times as fast as `pytree.tree_flatten` and a comparison. None
    means that the structure has other parts.
    """
    if spec.is_leaf():
        return _append
    if spec.type not in {tuple, list, dict}:
        return None
    parts = [_flattener(each) for each in spec.children()]
    inner = [each for each in parts if each is not None]
    if len(inner) < len(parts):
        return None
    kind, keys, many = spec.type, spec.context, len(inner)
    are_leaves = all(part is _append for part in inner)

    def flatten(value: Any, leaves: list[Any]) -> bool:
        if type(value) is not kind or len(value) != many:
            return False
        if kind is dict:
            if list(value) != keys:
                return False
            value = value.values()
        if are_leaves and _TENSORS.issuperset(map(type, value)):
            leaves.extend(value)
            return True
        for part, each in zip(inner, value, strict=True):
            if type(each) is torch.Tensor and part is _append:
                leaves.append(each)
            elif not part(each, leaves):
                return False
        return True

    return flatten


def _patterns(specs: Iterable[pytree.TreeSpec], names: Sequence[str]) -> list[str] | None:
    """Return the left sides of an assignment that names all leaves of values of these structures, in their order.

    None means that the structures have parts besides tuples and lists, or that the number of names differs.
    """
    left = iter(names)
    patterns: list[str] = []
    for each in specs:
        pattern = _pattern(each, left)
        if not pattern:
            return None
        patterns.append(pattern)
    return None if next(left, "") or not patterns else patterns


def _pattern(spec: pytree.TreeSpec, names: Iterator[str]) -> str:
    if spec.is_leaf():
        return next(names, "")
    parts = [_pattern(each, names) for each in spec.children()] if spec.type in {tuple, list} else [""]
    return f"({''.join(f'{part}, ' for part in parts)})" if all(parts) else ""


def _append(value: Any, leaves: list[Any]) -> bool:
    leaves.append(value)
    return pytree.tree_is_leaf(value)


def autocast_modes() -> tuple[tuple[str, str], ...]:
    """Return the kinds of devices that are under autocast now, and the dtypes."""
    if not any(map(torch.is_autocast_enabled, _DEVICES)):  # this is nearly always so
        return ()
    return tuple((kind, _dtype_of(kind)) for kind in _DEVICES if torch.is_autocast_enabled(kind))


def _dtype_of(kind: str) -> str:
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _modes_in_words(modes: tuple[tuple[str, str], ...]) -> str:
    return " and ".join(f"{dtype} on {kind}" for kind, dtype in modes) or "off"


def _alike(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    """Return whether two structures are the same; named tuples go by name and fields, which a stand-in's class has."""
    if one == other:
        return True
    if one.type is not other.type or one.num_children != other.num_children:
        return False
    contexts = [getattr(each.context, "_fields", None) and _identity(each.context) for each in (one, other)]
    if one.context != other.context and (contexts[0] is None or contexts[0] != contexts[1]):
        return False
    return one.num_children > 0 and all(map(_alike, one.children(), other.children()))


def _identity(named: Any) -> tuple[str, tuple[str, ...]]:
    return named.__name__, named._fields


def evaluate(expression: Expression, sizes: Mapping[str, int]) -> Any:
    """Return the value of an expression, given those of its symbols."""
    if isinstance(expression, str):
        return sizes[expression]
    if isinstance(expression, tuple):
        return OPERATIONS[expression[0]](*[evaluate(part, sizes) for part in expression[1:]])
    return expression


def symbols_of(expression: Expression) -> set[str]:
    """Return the names of the symbols in an expression."""
    if isinstance(expression, tuple):
        return {name for part in expression[1:] for name in symbols_of(part)}
    return {expression} if isinstance(expression, str) else set()


def in_words(expression: Expression) -> str:
    """Return an expression as a person writes it."""
    if not isinstance(expression, tuple):
        return str(expression)
    parts = [in_words(part) for part in expression[1:]]
    word = _WORDS.get(expression[0])
    return f"({f' {word} '.join(parts)})" if word else f"{expression[0]}({', '.join(parts)})"


def _tensor_misfit(leaf: Any, guard: TensorGuard, sizes: Mapping[str, int]) -> str:
    if not isinstance(leaf, torch.Tensor):
        return f"is a {type(leaf).__name__}, and was a tensor at capture"
    if problem := peculiarity(leaf):
        return problem
    if leaf.dtype is not guard.dtype or leaf.device.type != guard.device:
        return f"is {leaf.dtype} on {leaf.device.type}, and was {guard.dtype} on {guard.device} at capture"
    if not _has_sizes(leaf, guard, sizes):
        expected = ", ".join(map(in_words, guard.sizes))
        return f"has the shape {tuple(leaf.shape)}, and the graph is for ({expected})"
    if guard.requires_grad not in (None, leaf.requires_grad):
        now, then = ("takes a", "none") if leaf.requires_grad else ("takes no", "one")
        return f"{now} gradient, and took {then} at capture"
    return _layout_misfit(leaf, guard, sizes)


def _identity_misfit(now: str | None, then: str | None) -> str:
    kinds = [f"the same tensor as {other}" if other else "a tensor of its own" for other in (now, then)]
    return f"is {kinds[0]}, and was {kinds[1]} at capture"


def repeated(leaves: Iterable[Any]) -> dict[int, int]:
    """Return the first position of each tensor that occurs again, by the positions at which it does."""
    firsts: dict[int, int] = {}
    found = [
        (place, firsts.setdefault(id(leaf), place))
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    ]
    return {place: first for place, first in found if place != first}


def _layout_misfit(leaf: torch.Tensor, guard: TensorGuard, sizes: Mapping[str, int]) -> str:
    if guard.strides is None:
        return "" if leaf.is_contiguous() else "is not contiguous, and was at capture"
    strides = [evaluate(each, sizes) for each in guard.strides]
    if any(size > 1 and one != other for size, one, other in zip(leaf.shape, leaf.stride(), strides, strict=True)):
        return f"has the strides {leaf.stride()}, and the graph is for {tuple(strides)}"
    return ""


def peculiarity(tensor: torch.Tensor) -> str:
    """Return in words which property of a tensor no graph supports; empty if there is none."""
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    return "is a view that conjugates or negates" if tensor.is_conj() or tensor.is_neg() else ""


def _sizes(pairs: Iterable[tuple[Any, Guard]]) -> dict[str, int]:
    """Return the sizes in this call by the symbols that stand for them."""
    found: dict[str, int] = {}
    for leaf, guard in pairs:
        if isinstance(guard, TensorGuard) and isinstance(leaf, torch.Tensor):
            for size, expected in zip(leaf.shape, guard.sizes, strict=False):
                if isinstance(expected, str):
                    found.setdefault(expected, size)
    return found


def _has_sizes(leaf: torch.Tensor, guard: TensorGuard, sizes: Mapping[str, int]) -> bool:
    if leaf.dim() != len(guard.sizes):
        return False
    pairs = zip(leaf.shape, guard.sizes, strict=True)
    # A missing symbol belongs to an argument with fewer dimensions, which does not fit either.
    return all(symbols_of(each) <= sizes.keys() and evaluate(each, sizes) == size for size, each in pairs)


def _misfit(leaf: Any, guard: ValueGuard) -> str:
    # The written form of numbers tells zeros of either sign apart, and is the same for all NaNs.
    same = type(leaf) is type(guard.value) and repr(leaf) == repr(guard.value)
    return "" if same else f"is {leaf!r:.80}, and was {guard.value!r:.80} at capture"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
