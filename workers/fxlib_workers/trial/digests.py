"""Digests of the bits of tensors, and of the containers that hold them: equal digests mean equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch.utils import _pytree as torch_pytree

from fxlib.utils import pytree


def digest(value: object) -> str:
    """Return the digest of a tensor's dtype, shape and bits (NaN payloads included), or of another value's text."""
    total = hashlib.blake2b(digest_size=16)
    if isinstance(value, torch.Tensor):
        _update(total, value.detach())
    else:
        total.update(f"{type(value).__qualname__} {value!r}".encode())
    return total.hexdigest()


def digest_all(values: Mapping[str, torch.Tensor]) -> str:
    """Return one digest for named tensors, in order of their names."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(values):
        total.update(name.encode())
        _update(total, values[name].detach())
    return total.hexdigest()


def results(prefix: str, value: object) -> dict[str, object]:
    """Return the leaves of what a program returned, by path (`output['loss']`), and the structure of its containers."""
    return {f"containers of {prefix}": pytree.structure(value), **dict(pytree.leaves(value, prefix))}


def tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors among the leaves of nested containers."""
    return [leaf for leaf in torch_pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _update(total: hashlib.blake2b, tensor: torch.Tensor) -> None:
    total.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
    for part in _dense_parts(tensor):
        plain = part  # it mostly is already, and each of these steps takes time to find that out
        if not part.is_cpu or part.is_conj() or part.is_neg() or not part.is_contiguous():
            plain = part.to("cpu").resolve_conj().resolve_neg().contiguous()
        total.update(plain.view(-1).view(torch.uint8).numpy().data)


def _dense_parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    return (tensor.to_dense(),)
