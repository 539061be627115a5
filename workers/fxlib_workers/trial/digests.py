"""Digests of the bits of tensors and of the containers that hold them. Equal digests mean equal bits.

A snapshot of all tensors of a module can be restored bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fxlib.runtime.preserve_state import put_back
from fxlib.utils import pytree
from fxlib.utils.compare import plain_parts, same_bits, wraps


def digest(value: object) -> str:
    """Return the digest of a tensor's dtype, shape and bits (including NaN payloads), or of another value's text."""
    total = hashlib.blake2b(digest_size=16)
    if isinstance(value, torch.Tensor):
        _update(total, value.detach())
    else:
        total.update(f"{type(value).__qualname__} {value!r}".encode())
    return total.hexdigest()


def digest_all(values: Mapping[str, torch.Tensor]) -> str:
    """Return one digest for named tensors, in the order of their names."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(values):
        total.update(name.encode())
        _update(total, values[name].detach())
    return total.hexdigest()


def results(prefix: str, value: object) -> dict[str, object]:
    """Return the leaves of a program's result, by path (`output['loss']`), and the structure of its containers."""
    return {f"containers of {prefix}": pytree.structure(value), **dict(pytree.leaves(value, prefix))}


def _update(total: hashlib.blake2b, tensor: torch.Tensor) -> None:
    shape = () if tensor.is_nested else tuple(tensor.shape)  # of a nested one, the sizes are a part
    total.update(f"{tensor.dtype} {shape} {tensor.layout}".encode())
    for part in _dense_parts(tensor):
        total.update(f"{part.dtype} {tuple(part.shape)}".encode())
        plain = part  # it usually is already, and each of these steps takes time to find that out
        if not part.is_cpu or part.is_conj() or part.is_neg() or not part.is_contiguous():
            plain = part.to("cpu").resolve_conj().resolve_neg().contiguous()
        total.update(plain.view(-1).view(torch.uint8).numpy().data)


def _dense_parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    is_plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or wraps(tensor))
    return (tensor,) if is_plain else plain_parts(tensor)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, buffers and plain tensor attributes of a module, by name."""
    named: dict[str, torch.Tensor] = {f"parameter {name}": value for name, value in module.named_parameters()}
    named |= {f"buffer {name}": value for name, value in module.named_buffers()}
    for path, each in module.named_modules():
        plain = ((name, value) for name, value in vars(each).items() if isinstance(value, torch.Tensor))
        named |= {f"attribute {path}.{name}".replace(" .", " "): value for name, value in plain}
    return named


class ModuleSnapshot:
    """The parameters, buffers and plain tensor attributes of a module at the time of construction."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._flags = [(each, each.training) for each in module.modules()]
        self._saved = [
            (table, name, value, value.detach().clone())
            for each in module.modules()
            for table in (each._parameters, each._buffers, vars(each))
            for name, value in table.items()
            if isinstance(value, torch.Tensor)
        ]

    def restore(self) -> None:
        """Put the same tensors back under their names, with their bits and without gradients."""
        for table, name, tensor, bits in self._saved:
            tensor.grad = None
            if not same_bits(
                tensor.detach(), bits
            ):  # a write, even of equal bits, would count as a change of the weights
                put_back(tensor, bits)
            _tensors_of(table)[name] = tensor
        for each, training in self._flags:
            each.training = training

    def named(self) -> dict[str, torch.Tensor]:
        """Return the module's current tensors, by name."""
        return tensors_of(self._module)

    def digest(self) -> str:
        """Return one digest of the module's current tensors."""
        return digest_all(self.named())


def _tensors_of(table: Any) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = table
    return tensors
