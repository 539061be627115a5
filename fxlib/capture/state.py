"""The model's own state during a capture: what the forward may not change, and what torch.fx may not meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxlib.capture import source
from fxlib.errors import CaptureError
from fxlib.runtime.walk import local_modules, remote_modules

_CONTAINERS = (list, dict, set)


@contextmanager
def unchanged(model: object) -> Iterator[None]:
    """Undo what the block does to containers held by the model's modules.

    Raises:
        CaptureError: the block changed one.
    """
    held = list(_containers(model)) if isinstance(model, nn.Module) else []
    before = [container.copy() for _, _, container in held]
    try:
        yield
    finally:
        changed = []
        for (module, name, container), copy in zip(held, before, strict=True):
            if not _same(container, copy):
                changed.append((module, name))
                _restore(container, copy)
    for module, name in changed:
        raise CaptureError(
            f"the forward changes {type(module).__name__}.{name}, so one step would depend on the last",
            where=source.of_definition(type(module).forward),
            hint="Return the value instead, or write to a buffer in place.",
        )


@contextmanager
def remote_modules_aside(model: object) -> Iterator[None]:
    """Keep each `RemoteModule` as a plain attribute during the block: it refuses what torch.fx asks modules."""
    found = list(remote_modules(model)) if isinstance(model, nn.Module) else []
    children = [dict(parent._modules) for parent, _, _ in found]
    try:
        for parent, name, module in found:
            parent.__dict__[name] = module
            del parent._modules[name]
        yield
    finally:
        for (parent, name, _), before in reversed(list(zip(found, children, strict=True))):
            del parent.__dict__[name]
            parent._modules.clear()
            parent._modules.update(before)


def _containers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for _, module in local_modules(model):
        for name, value in module.__dict__.items():
            if type(value) in _CONTAINERS and name not in nn.Module().__dict__:
                yield module, name, value


def _same(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        return all(key in copy and copy[key] is value for key, value in container.items())
    if isinstance(container, set):
        return all(value in copy for value in container)
    return all(one is other for one, other in zip(container, copy, strict=True))


def _restore(container: Any, copy: Any) -> None:
    container.clear()
    container.extend(copy) if isinstance(container, list) else container.update(copy)
