"""The submodules of a model: those that live in this process, and by their paths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.nn.api.remote_module import _RemoteModule

T = TypeVar("T")


def local_modules(root: nn.Module, *, repeated: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of `root` and all below, as `named_modules` does, which a `RemoteModule` makes fail.

    A module that stands in several places is yielded at its first, or, if `repeated`, at each.
    """
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen and not repeated:
            continue
        seen.add(id(module))
        yield path, module
        for name, child in reversed(module._modules.items()):
            if child is not None and not isinstance(child, _RemoteModule):
                stack.append((f"{path}.{name}" if path else name, child))


def local_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `root` and all below, as `named_parameters` does, which a `RemoteModule` makes fail."""
    return _each_once((path, part._parameters) for path, part in local_modules(root))


def local_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of `root` and all below, and then the buffers, each once."""
    buffers = _each_once((path, part._buffers) for path, part in local_modules(root))
    return {**local_parameters(root), **buffers}


def _each_once(tables: Iterable[tuple[str, Mapping[str, T | None]]]) -> dict[str, T]:
    found: dict[int, tuple[str, T]] = {}
    for path, table in tables:
        for name, value in table.items():
            if value is not None:
                found.setdefault(id(value), (f"{path}.{name}" if path else name, value))
    return dict(found.values())


def remote_modules(root: nn.Module) -> Iterator[tuple[nn.Module, str, _RemoteModule]]:
    """Yield parent, name and module of each `RemoteModule` below `root`."""
    for _, module in local_modules(root):
        for name, child in module._modules.items():
            if isinstance(child, _RemoteModule):
                yield module, name, child


def submodule(module: nn.Module, path: str) -> nn.Module:
    """Return what `get_submodule` returns, without its checks on the way: passes ask for the module of every call.

    Raises:
        AttributeError: there is none.
    """
    found: Any = module
    try:
        for name in path.split("."):
            found = found._modules[name]
    except (KeyError, AttributeError):
        found = None
    return found if isinstance(found, nn.Module) else module.get_submodule(path)
