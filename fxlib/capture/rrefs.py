"""Where a model holds its RRefs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import _RemoteModule

from fxlib.runtime.walk import local_modules


class RRefPlaces:
    """Paths of the RRefs that are attributes of a model's modules, and names for those in its lists and dicts."""

    def __init__(self, root: nn.Module) -> None:
        self._paths: dict[int, str] = {}
        self._hints: dict[int, str] = {}
        for prefix, module in local_modules(root):
            for name, value in module.__dict__.items():
                self._note(f"{prefix}.{name}" if prefix else name, value)
            for name, child in module._modules.items():
                if isinstance(child, _RemoteModule):
                    path = f"{prefix}.{name}" if prefix else name
                    self._note(f"{path}.module_rref", child.module_rref)

    def path_of(self, rref: object) -> str | None:
        """Return the dotted path of an attribute, or None."""
        return self._paths.get(id(rref))

    def hint_of(self, rref: object) -> str:
        """Return a name that says where the RRef was found: `tables_3` for `self.tables[3]`."""
        return self._hints.get(id(rref), "rref")

    def _note(self, path: str, value: object) -> None:
        if isinstance(value, rpc.PyRRef):
            self._paths.setdefault(id(value), path)
            return
        for key, item in _items(value):
            if isinstance(item, rpc.PyRRef):
                self._hints.setdefault(id(item), re.sub(r"\W", "_", f"{path}_{key}"))


def _items(value: Any) -> Iterator[tuple[object, object]]:
    if isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, Mapping) and not isinstance(value, nn.Module):
        yield from value.items()
