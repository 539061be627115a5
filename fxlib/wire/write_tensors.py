"""Tensors into the wire format: what they view, and, only when asked, their values as content-addressed blobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import safetensors.torch
import torch

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import Fault

DATA = "data"
"""Name of the one tensor in a blob."""

_ALIGNMENT = 16
_SAFE_DTYPES = frozenset(
    {
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
        ),
        *(torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
    }
)


def is_plain(tensor: object) -> bool:
    """Whether a tensor is described by its dtype, shape, strides and storage: strided, a leaf, and of no subclass."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.is_leaf
    )


def storage_key(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """Return what tensors on one storage have in common."""
    return tensor.device, int(tensor.untyped_storage()._cdata)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, that torch gives a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class TensorWriter:
    """Collects the tensors of a graph.

    Those that share a storage keep sharing it; of a storage, only what they view travels.
    """

    def __init__(self, graph: pb.Graph) -> None:
        self._graph = graph
        self._index: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._groups: dict[tuple[object, ...], list[int]] = {}

    def add(self, tensor: torch.Tensor) -> int:
        """Return the index of a plain tensor."""
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self._groups.setdefault(storage_key(tensor), []).append(index)
        return index

    def finish(self, *, sent: Callable[[torch.Tensor], bool]) -> dict[str, bytes]:
        """Write all tensors and storages; return the blobs by SHA-256 of those tensors whose values are to be sent.

        Raises:
            Fault: a tensor on the meta device has no values to send.
        """
        for _ in self._tensors:
            self._graph.tensors.add()
        blobs: dict[str, bytes] = {}
        for number, members in enumerate(self._groups.values()):
            start, end = self._span(members)
            for index in members:
                self._describe(index, number, start)
            first = self._tensors[members[0]]
            storage = self._graph.storages.add(bytes=end - start, device="" if first.is_cpu else str(first.device))
            if sent(first):
                data = self._blob(members, start, end)
                storage.data.sha256, storage.data.size = hashlib.sha256(data).hexdigest(), len(data)
                blobs[storage.data.sha256] = data
        return blobs

    def _span(self, members: list[int]) -> tuple[int, int]:
        """First and last byte that the tensors view."""
        spans = []
        for tensor in (self._tensors[index] for index in members):
            if tensor.numel():
                first = int(tensor.storage_offset())
                last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
                spans.append((first * tensor.itemsize, (last + 1) * tensor.itemsize))
        if not spans:
            return 0, 0
        start = min(first for first, _ in spans)
        return start - start % _ALIGNMENT, max(last for _, last in spans)

    def _describe(self, index: int, storage: int, start: int) -> None:
        tensor, message = self._tensors[index], self._graph.tensors[index]
        message.storage = storage
        message.dtype = str(tensor.dtype).removeprefix("torch.")
        message.shape.extend(tensor.shape)
        if tensor.stride() != contiguous_strides(tuple(tensor.shape)):
            message.stride.extend(tensor.stride())
        message.offset = int(tensor.storage_offset()) - start // tensor.itemsize if tensor.numel() else 0
        message.requires_grad = tensor.requires_grad
        message.parameter = isinstance(tensor, torch.nn.Parameter)

    def _blob(self, members: list[int], start: int, end: int) -> bytes:
        first = self._tensors[members[0]]
        if first.is_meta:
            raise Fault("a tensor on the meta device has no values", "Encode without weights=True.")
        dtypes = {self._tensors[index].dtype for index in members}
        flat = torch.empty(0, dtype=torch.uint8, device=first.device)
        flat.set_(first.untyped_storage(), start, (end - start,), (1,))
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        if dtype in _SAFE_DTYPES and (end - start) % dtype.itemsize == 0:
            flat = flat.view(dtype)
        return safetensors.torch.save({DATA: flat.cpu()})
