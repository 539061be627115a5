"""Tensors elsewhere in memory: what a step's last bits owe to where its weights and inputs lie.

Some kernels begin a vector loop at the first aligned element, so that sums come in another order where memory begins
elsewhere (MKL on processors for which it has no code path of its own, unless MKL_CBWR is set).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

_SHIFT_BYTES: Final = 16
"""Off from torch's own alignment of 64 bytes; a multiple of every element's size."""


@contextmanager
def elsewhere(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let a block run with these tensors on memory that is aligned otherwise; they then return with what was written.

    Tensors that share memory still do. Those that are not dense, or not on a CPU, stay where they are.
    """
    movable = {id(each): each for each in tensors if each.layout == torch.strided and each.device.type == "cpu"}
    homes = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in movable.values()}
    away = {pointer: _shifted(home) for pointer, home in homes.items()}
    places = [(each, each.untyped_storage().data_ptr(), each.storage_offset()) for each in movable.values()]
    for tensor, pointer, offset in places:
        _put(tensor, away[pointer].untyped_storage(), offset + _SHIFT_BYTES // tensor.itemsize)
    try:
        yield
    finally:
        for pointer, home in homes.items():
            _bytes_of(home).copy_(away[pointer][_SHIFT_BYTES:])
        for tensor, pointer, offset in places:
            _put(tensor, homes[pointer], offset)


def _shifted(home: torch.UntypedStorage) -> torch.Tensor:
    away = torch.empty(home.nbytes() + _SHIFT_BYTES, dtype=torch.uint8)
    away[_SHIFT_BYTES:].copy_(_bytes_of(home))
    return away


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _put(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int | torch.SymInt) -> None:
    size, stride = tensor.size(), tensor.stride()
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.set_(storage, offset, size, stride)
