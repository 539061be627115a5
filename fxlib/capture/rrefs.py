"""Find where a model holds its RRefs: in attributes of its modules, in containers there, or in a `RemoteModule`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import _RemoteModule

from fxlib.runtime.guards.conditions import Entry
from fxlib.runtime.submodules import local_modules

_DEPTH = 4
"""The number of levels of nested containers that are searched."""


class RRefPaths:
    """The paths of the RRefs that are attributes of a model's modules, and names for those that lie deeper."""

    def __init__(self, root: nn.Module) -> None:
        self._paths: dict[int, str] = {}
        self._hints: dict[int, str] = {}
        self._ways: dict[int, list[Entry]] = {}
        self._looked_up: dict[int, None] = {}
        for prefix, module in local_modules(root):
            for name, value in module.__dict__.items():
                if not _is_plain(value):
                    self._note(f"{prefix}.{name}" if prefix else name, value, (Entry(module.__dict__, name, value),))
            for name, child in module._modules.items():
                if isinstance(child, _RemoteModule):
                    path = f"{prefix}.{name}" if prefix else name
                    self._paths.setdefault(id(child.module_rref), f"{path}.module_rref")

    def path_of(self, rref: object) -> str | None:
        """Return the dotted path of an attribute, or None."""
        self._looked_up[id(rref)] = None
        return self._paths.get(id(rref))

    def hint_of(self, rref: object) -> str:
        """Return a name that tells where the RRef was found: `tables_3` for `self.tables[3]`."""
        return self._hints.get(id(rref), "rref")

    def ways(self) -> list[Entry]:
        """Return the attributes and container entries that lead to the RRefs whose paths were requested."""
        found = [entry for rref in self._looked_up for entry in self._ways.get(rref, ())]
        return list({(id(each.container), each.key): each for each in found}.values())

    def _note(self, path: str, value: object, way: tuple[Entry, ...]) -> None:
        if isinstance(value, _RemoteModule):
            path, value = f"{path}_module_rref", value.module_rref
            self._hints.setdefault(id(value), re.sub(r"\W", "_", path))
            self._ways.setdefault(id(value), []).extend(way)
        elif isinstance(value, rpc.PyRRef):
            if len(way) == 1:
                self._paths.setdefault(id(value), path)
            self._hints.setdefault(id(value), re.sub(r"\W", "_", path))
            self._ways.setdefault(id(value), []).extend(way)
        elif len(way) < _DEPTH:
            for entry in _entries(value):
                self._note(f"{path}_{entry.key}", entry.value, (*way, entry))


def _is_plain(value: object) -> bool:
    """Return whether a value's type and size show that it holds no RRefs, as is the case for most values."""
    return type(value) in _PLAIN or isinstance(value, torch.Tensor) or (type(value) in _CONTAINERS and not value)


def _entries(value: Any) -> Iterator[Entry]:
    if isinstance(value, nn.Module):
        return
    if isinstance(value, (list, tuple)):
        elements = ((index, item) for index, item in enumerate(value) if not _is_plain(item))
        yield from (Entry(value, index, item, size=len(value)) for index, item in elements)
    elif isinstance(value, Mapping):
        items = ((key, item) for key, item in value.items() if not _is_plain(item))
        yield from (Entry(value, key, item, size=len(value)) for key, item in items)
    elif type(value).__module__.partition(".")[0] not in _LIBRARIES and isinstance(
        held := getattr(value, "__dict__", None), dict
    ):
        yield from (Entry(held, key, item) for key, item in held.items())


_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
_CONTAINERS = frozenset({dict, list, tuple, set, OrderedDict})
_LIBRARIES = frozenset({"builtins", "torch", "numpy"})
"""Packages whose objects hold none of the user's RRefs."""
