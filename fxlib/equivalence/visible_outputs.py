"""What a caller sees of an output besides its values: containers, layouts, flags, and what shares its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxlib.runtime.submodules import local_modules, local_parameters, local_tensors, remote_modules
from fxlib.utils.pytree import leaves, structure
from fxlib.utils.tensors import wraps


def formed(name: str, value: object) -> dict[str, str]:
    """Say of a nest what a caller sees of it besides values: containers, and class, layout and flags of tensors."""
    tensors = {where: leaf for where, leaf in leaves(value, name) if isinstance(leaf, torch.Tensor)}
    return {f"structure of {name}": structure(value)} | {
        f"form of {where}": _form(each) for where, each in tensors.items()
    }


def flags(module: nn.Module) -> tuple[str, ...]:
    """Say which modules are in train mode, and which parameters take no gradient."""
    training = [f"{path} in train mode" for path, each in local_modules(module) if each.training]
    return (*training, *(f"{name} frozen" for name, each in local_parameters(module).items() if not each.requires_grad))


def _form(tensor: torch.Tensor) -> str:
    words = [type(tensor).__name__]
    if tensor.layout is torch.strided and not tensor.is_nested and not wraps(tensor):
        shown = zip(tensor.shape, tensor.stride(), strict=True)  # of a single element, or none, a stride says nothing
        words.append(f"strides {tuple(step if size > 1 and tensor.numel() else 0 for size, step in shown)}")
    return ", ".join([*words, *(["takes a gradient"] if tensor.requires_grad else [])])


def shared(module: nn.Module, inputs: object, output: object) -> tuple[str, ...]:
    """Say which tensors of the output share memory with one another, with inputs or with the module's state."""
    holders: dict[int, str] = {}
    known = [*leaves(inputs, "input"), *saved(module).items(), *unsaved(module)]
    for where, leaf in known:
        if (memory := _memory(leaf)) is not None:
            holders.setdefault(memory, where)
    found = []
    for where, leaf in leaves(output, "output"):
        if (memory := _memory(leaf)) is not None and holders.setdefault(memory, where) != where:
            found.append(f"{where} with {holders[memory]}")
    return tuple(found)


def _memory(leaf: object) -> int | None:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or wraps(leaf):
        return None
    return leaf.untyped_storage()._cdata if leaf.numel() else None


def saved(module: nn.Module) -> dict[str, Any]:
    """Return the tensors that `state_dict` saves, as they are; a `RemoteModule` makes that fail, and has none here."""
    if next(remote_modules(module), None) is None:
        return module.state_dict(keep_vars=True)
    return local_tensors(module)


def unsaved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers and the plain tensors of a module that `state_dict` leaves out."""
    for path, each in local_modules(module):
        transient = ((name, each._buffers.get(name)) for name in sorted(each._non_persistent_buffers_set))
        for name, value in (*transient, *vars(each).items()):
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value
