"""The submodules of a model: those that live in this process, and by their paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.nn.api.remote_module import _RemoteModule


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
