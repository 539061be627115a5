"""Checks of received tensors: each within its storage, all within the limits."""

from __future__ import annotations

import re

from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.check_values import check_sizes
from fxlib.wire.constants import DTYPES, check_device
from fxlib.wire.faults import Fault, excess
from fxlib.wire.limits import Limits
from fxlib.wire.write_tensors import contiguous_strides

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_STRIDED = ("bits", "qint", "quint")
"""Dtypes of quantized tensors, and those without a strided form."""


def check_storages(graph: pb.Graph, limits: Limits) -> None:
    """Raise Fault unless all storages together are within the limits, and their blobs are named by digests."""
    total = 0
    for storage in graph.storages:
        if storage.bytes < 0:
            raise Fault(f"negative size {storage.bytes}")
        total += storage.bytes
        if storage.device:
            check_device(storage.device)
        if storage.HasField("data") and (_SHA256.fullmatch(storage.data.sha256) is None or storage.data.size < 0):
            raise Fault(f"{storage.data.sha256[:80]!r} is no SHA-256 of a blob")
    if total > limits.weights_bytes:
        raise excess("bytes of all weights", total, limits.weights_bytes, "weights_bytes")


def check_tensor(tensor: pb.Tensor, graph: pb.Graph, limits: Limits) -> None:
    """Raise Fault unless a tensor lies within its storage."""
    if tensor.storage >= len(graph.storages):
        raise Fault(f"refers to storage {tensor.storage}, of {len(graph.storages)}")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or tensor.dtype.startswith(_NO_STRIDED):
        raise Fault(f"unknown dtype {tensor.dtype[:80]!r}")
    if tensor.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise Fault(f"a tensor of dtype {tensor.dtype} takes no gradient")
    elements = check_sizes(tensor.shape, limits)
    shape = tuple(tensor.shape)
    strides = tuple(tensor.stride) or contiguous_strides(shape)
    if len(strides) != len(shape) or min(strides, default=0) < 0 or tensor.offset < 0:
        raise Fault("strides or offset do not fit the shape")
    if any(step * max(size, 1) >= 1 << 62 for size, step in zip(shape, strides, strict=True)):
        raise Fault("strides exceed the address space")
    last = tensor.offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if (elements and (last + 1) * dtype.itemsize > graph.storages[tensor.storage].bytes) or tensor.offset >= 1 << 62:
        raise Fault(f"reaches beyond the {graph.storages[tensor.storage].bytes:,} bytes of its storage")
