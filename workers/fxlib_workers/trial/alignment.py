"""Moves tensors to memory of another alignment, which shows how the last bits of a step depend on it.

Some kernels begin a vector loop at the first aligned element, so that the order of a sum depends on where memory begins
 (MKL on processors for which it has no code path of its own, unless MKL_CBWR is set).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

_SHIFT_BYTES: Final = 16
"""The shift from torch's own alignment of 64 bytes; it is a multiple of every element's size."""


@contextmanager
def realigned(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Run a block with these tensors in memory of another alignment, and move them back with all writes.

    Tensors that share memory still do. Tensors that are not dense, or not on a CPU, are left alone.
    """
    movable = {id(each): each for each in tensors if each.layout == torch.strided and each.device.type == "cpu"}
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in movable.values()}
    shifted = {pointer: _shifted_copy(storage) for pointer, storage in storages.items()}
    views = [(each, each.untyped_storage().data_ptr(), each.storage_offset()) for each in movable.values()]
    for tensor, pointer, offset in views:
        _set_storage(tensor, shifted[pointer].untyped_storage(), offset + _SHIFT_BYTES // tensor.itemsize)
    try:
        yield
    finally:
        for pointer, storage in storages.items():
            _bytes_of(storage).copy_(shifted[pointer][_SHIFT_BYTES:])
        for tensor, pointer, offset in views:
            _set_storage(tensor, storages[pointer], offset)


def _shifted_copy(storage: torch.UntypedStorage) -> torch.Tensor:
    shifted = torch.empty(storage.nbytes() + _SHIFT_BYTES, dtype=torch.uint8)
    shifted[_SHIFT_BYTES:].copy_(_bytes_of(storage))
    return shifted


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _set_storage(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int | torch.SymInt) -> None:
    size, stride = tensor.size(), tensor.stride()
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.set_(storage, offset, size, stride)
