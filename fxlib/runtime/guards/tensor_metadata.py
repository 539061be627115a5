"""What a graph took for granted of a model's tensors: their dtypes, devices and shapes, and in an export strides, too.

A trace answers the forward that asks a parameter for its dtype (`next(self.parameters()).dtype`), and an export decides
by all of them. `model.half()` later changes the same objects.
"""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fxlib.runtime.submodules import local_modules

_look = attrgetter("dtype", "device", "shape")


class TensorMetadata:
    """What the parameters and buffers of a model look like, noted as they are now.

    Args:
        module: stands in for `original`, and has tables of its own for the root's tensors.
        original: the model.
        strides: whether they matter, too.
    """

    def __init__(self, module: nn.Module, original: nn.Module, *, strides: bool) -> None:
        parts = dict(local_modules(original))
        self._paths, (_, *self._parts) = list(parts), parts.values()
        self._root, self._strides = module, strides
        self._names = [
            [(table, name) for table in ("_parameters", "_buffers") for name, _ in _tensors(each, table)]
            for each in parts.values()
        ]
        self._tables: list[dict[str, Any]] = []
        self._slots: list[str] = []
        self._known = self._now()

    def rebased(self, module: nn.Module) -> TensorMetadata:
        """Return the same for another module that stands in for the same original."""
        twin = copy.copy(self)
        twin._root, twin._tables, twin._slots = module, [], []
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorMetadata:
        twin = self.rebased(copy.deepcopy(self._root, memo))
        twin._parts = copy.deepcopy(self._parts, memo)
        return twin

    def changed(self) -> str:
        """Return which tensor looks otherwise now, in words; empty if none does."""
        now = self._now()
        if now == self._known:
            return ""
        named = zip(self._paths, self._names, strict=True)
        names = [f"{path}.{name}".lstrip(".") for path, each in named for _, name in each]
        changed = next(name for name, one, other in zip(names, now, self._known, strict=True) if one != other)
        return f"dtype, device, shape or strides of {changed} are not what they were at capture"

    def _tensors(self) -> list[Any]:
        if not self._slots:
            for part, names in zip((self._root, *self._parts), self._names, strict=True):
                self._tables += [part.__dict__[table] for table, _ in names]
                self._slots += [name for _, name in names]
        return list(map(dict.get, self._tables, self._slots))

    def _now(self) -> list[Any]:
        tensors = self._tensors()
        try:
            looks: list[Any] = list(map(_look, tensors))
        except AttributeError:  # one is None now
            return tensors
        return [*zip(looks, map(_strides, tensors), strict=True)] if self._strides else looks


def _tensors(module: nn.Module, table: str) -> list[tuple[str, torch.Tensor]]:
    tensors = [(name, value) for name, value in module.__dict__[table].items() if isinstance(value, torch.Tensor)]
    return [(name, value) for name, value in tensors if not is_lazy(value)]


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout is torch.strided else None
