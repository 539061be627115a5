"""A snapshot of what modules keep in attributes besides tensors and modules, such as a dict of rows."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> Mapping[str, Any]:
    """Return what one module keeps in attributes besides tensors and modules, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and not isinstance(value, torch.Tensor)
    }


class AttributeSnapshot:
    """The attributes of a module, and of those inside it, at the time of construction.

    An attribute that cannot be copied, such as a lock, is left alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._saved: list[tuple[nn.Module, str, Any, Any]] = []
        self._left: set[tuple[int, str]] = set()
        memo = self._kept()
        for each in module.modules():
            for name, value in attributes_of(each).items():
                attempt = dict(memo)  # a copy that fails leaves halves there
                try:
                    self._saved.append((each, name, value, copy.deepcopy(value, attempt)))
                except Exception:  # noqa: BLE001 - of the operator's class
                    self._left.add((id(each), name))
                else:
                    memo = attempt

    def restore(self) -> None:
        """Put the same objects back under their names; containers among them get their contents back."""
        for each in self._module.modules():
            for name in attributes_of(each):
                if (id(each), name) not in self._left:
                    del vars(each)[name]
        memo = self._kept()
        for each, name, value, saved in self._saved:
            vars(each)[name] = _filled(value, copy.deepcopy(saved, memo))

    def _kept(self) -> dict[int, Any]:
        """Return what a copy shares with what it was made of: modules and their tensors."""
        modules = list(self._module.modules())
        tensors = [each for module in modules for each in vars(module).values() if isinstance(each, torch.Tensor)]
        return {id(each): each for each in (*modules, *self._module.parameters(), *self._module.buffers(), *tensors)}


def _filled(value: Any, contents: Any) -> Any:
    """Return a container with other contents, or these if it is none: others may hold the container, too."""
    if isinstance(value, (dict, set)):
        value.clear()
        value.update(contents)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(contents)
    else:
        return contents
    return value
