"""The metadata of a model's tensors on which a graph relies: dtypes, devices, shapes, classes, an export's strides.

A trace gives an answer to a forward that asks a parameter for its dtype (`next(self.parameters()).dtype`), and an
export decides by all of these properties. A later `model.half()` changes the same objects.

Neither the model nor a call may hold tensors of a class with methods of the program's own (`__torch_function__`): such
methods run between two operations, and may change the model there, for instance by giving it a hook.

Gradients of a parameter that a model has under several names add up in one sum, whose order a rewrite has kept: so the
same names must share parameters as at capture.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partialmethod
from operator import attrgetter
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards
from torch.nn.parameter import is_lazy

from fxlib.runtime.submodules import local_modules

METADATA = ("dtype", "device", "shape")
_PLAIN = frozenset({torch.Tensor, nn.Parameter, NoneType, bool, int, float, str})
_PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_is_nested: Callable[[torch.Tensor], bool] = attrgetter("is_nested")
_METHODS = (FunctionType, classmethod, staticmethod, property, partialmethod)
_HARMLESS = frozenset({"__new__", "__init__", "__repr__", "__str__", "__reduce_ex__", "__deepcopy__"})
"""Methods that no operation of a forward calls."""


class TensorMetadata:
    """The metadata of the parameters and buffers of a model, noted as they are now.

    Args:
        module: the stand-in for `original`, which has tables of its own for the root's tensors.
        original: the model.
        read: the attributes of each tensor that are compared, if any.
        strides: whether strides are compared, too.
    """

    def __init__(self, module: nn.Module, original: nn.Module, read: Sequence[str], *, strides: bool) -> None:
        parts = dict(local_modules(original))
        self._paths, (_, *self._parts) = list(parts), parts.values()
        self._root, self._strides = module, strides
        self._read = attrgetter(*read) if read else None
        self._names = [
            [(table, name) for table in ("_parameters", "_buffers") for name, _ in _tensors(each, table)]
            for each in parts.values()
        ]
        self._slots: tuple[list[dict[str, Any]], list[str]] | None = None
        tensors = self._tensors()
        self._known, self._unchanged = self._metadata_of(tensors), _check_of(tensors)

    @property
    def reads(self) -> bool:
        """Whether attributes of tensors are compared."""
        return self._read is not None

    def rebased(self, module: nn.Module) -> TensorMetadata:
        """Return the same record for another module that stands in for the same original."""
        copied = copy.copy(self)
        copied._root, copied._slots = module, None
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorMetadata:
        copied = self.rebased(copy.deepcopy(self._root, memo))
        copied._parts = copy.deepcopy(self._parts, memo)
        return copied

    def changed(self) -> str:
        """Return which tensor has other metadata now, in words; empty if none does."""
        tensors = self._tensors()
        if self._unchanged is not None and _are_plain(tensors) and self._unchanged(*tensors):
            return ""
        if foreign := foreign_class(tensors):
            return foreign
        now = self._metadata_of(tensors)
        if now == self._known:
            self._unchanged = _check_of(tensors)
            return ""
        named = zip(self._paths, self._names, strict=True)
        names = [f"{path}.{name}".lstrip(".") for path, each in named for _, name in each]
        each = zip(names, zip(*now, strict=True), zip(*self._known, strict=True), strict=True)
        changed = next(name for name, one, other in each if one != other)
        return f"class, dtype, device, shape or strides of {changed} are not what they were at capture"

    def _tensors(self) -> list[Any]:
        if self._slots is None:
            found = [
                (part.__dict__[table], name)
                for part, names in zip((self._root, *self._parts), self._names, strict=True)
                for table, name in names
            ]
            self._slots = [table for table, _ in found], [name for _, name in found]
        return list(map(dict.get, *self._slots))

    def _metadata_of(self, tensors: list[Any]) -> list[list[Any]]:
        """Return what is compared: lists with a value for each tensor."""
        if self._read is None:
            return []
        try:
            metadata: list[Any] = list(map(self._read, tensors))
        except AttributeError:  # a tensor is None now
            metadata = [self._read(each) if isinstance(each, torch.Tensor) else None for each in tensors]
        return [metadata, _strides_of(tensors)] if self._strides else [metadata]


def _check_of(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Return a function in C++ that tells whether tensors are as these are now; None if it cannot tell.

    It asks for more than is compared here: modes such as autocast, and `requires_grad`. So a "no" says nothing.
    """
    if not _are_plain(tensors) or len(set(map(id, tensors))) < len(tensors):  # it takes each tensor once
        return None
    try:
        sizes, strides = ([list(read(each)) for each in tensors] for read in (torch.Tensor.size, torch.Tensor.stride))
        made: Any = TensorGuards  # its stub has lists where it takes lists of lists
        return made(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except RuntimeError:  # one is sparse
        return None


def _are_plain(tensors: Sequence[Any]) -> bool:
    """Return whether torch's function can compare these; on a nested one, it ends the process."""
    return _PLAIN_TENSORS.issuperset(map(type, tensors)) and not any(map(_is_nested, tensors))


def foreign_class(values: Iterable[Any]) -> str:
    """Return in words which class of the program's own sees operations on one of these values; empty if none does.

    Tensors are found in nested tuples, lists, dicts and dataclasses, too.
    """
    if _PLAIN.issuperset(map(type, values := list(values))):
        return ""
    for each in values:
        kind = type(each)
        if isinstance(each, torch.Tensor):
            if _sees_operations(kind):
                return f"a {kind.__name__} has methods of its own, which run between the forward's operations"
        elif isinstance(each, (tuple, list)):
            if found := foreign_class(each):
                return found
        elif isinstance(each, Mapping) or is_dataclass(each):
            held = each if isinstance(each, Mapping) else getattr(each, "__dict__", {})
            if found := foreign_class(held.values()):
                return found
    return ""


def _sees_operations(kind: type) -> bool:
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in {"torch", "builtins", "fxlib"}]
    held = ((name, value) for each in own for name, value in vars(each).items())
    return any(isinstance(value, _METHODS) and name not in _HARMLESS for name, value in held)


def _tensors(module: nn.Module, table: str) -> list[tuple[str, torch.Tensor]]:
    tensors = [(name, value) for name, value in module.__dict__[table].items() if isinstance(value, torch.Tensor)]
    return [(name, value) for name, value in tensors if not is_lazy(value)]


def _strides_of(tensors: list[Any]) -> list[Any]:
    """Return the strides of tensors, without a step of Python for each; None for what has none."""
    try:
        return list(map(torch.Tensor.stride, tensors))
    except (RuntimeError, TypeError):
        return [each.stride() if _has_strides(each) else None for each in tensors]


def _has_strides(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class TiedParameters:
    """The parameters that a model has under several names, noted as they are now.

    Args:
        module: the stand-in for `original`, which has tables of its own for the root's parameters.
        original: the model; None if there is no model, and nothing to check.

    Attributes:
        identities: the ids of the parameters when `broken` was last asked; a new list whenever one of them is another.
    """

    def __init__(self, module: nn.Module, original: nn.Module | None) -> None:
        parts = [] if original is None else [each for _, each in local_modules(original)]
        self._root = module
        self._parts = parts[1:]
        self._names = [list(each._parameters) for each in parts]
        self._tables: list[dict[str, Any]] = []
        self._slots: list[str] = []
        self.identities = self._identities()
        self._pattern = _pattern(self.identities)

    def rebased(self, module: nn.Module) -> TiedParameters:
        """Return the same record for another module that stands in for the same original."""
        copied = copy.copy(self)
        copied._root, copied._tables, copied._slots, copied.identities = module, [], [], []
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedParameters:
        copied = self.rebased(copy.deepcopy(self._root, memo))
        copied._parts = copy.deepcopy(self._parts, memo)
        return copied

    def broken(self) -> bool:
        """Return whether other names than at capture now share a parameter."""
        now = self._identities()
        if now == self.identities:
            return False
        if _pattern(now) != self._pattern:
            return True
        self.identities = now
        return False

    def _identities(self) -> list[int]:
        """Return the ids of all parameters, in order; references would keep replaced parameters alive."""
        return list(map(id, self.parameters()))

    def parameters(self) -> Iterable[Any]:
        """Return all parameters as they are now, in order, with None for those that are gone."""
        if not self._slots:
            for part, names in zip((self._root, *self._parts), self._names, strict=False):
                self._tables += [part._parameters] * len(names)
                self._slots += names
        return map(dict.get, self._tables, self._slots)


def _pattern(identities: Sequence[int]) -> list[int]:
    """Return for each parameter the index of the first one that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(each, place) for place, each in enumerate(identities)]
