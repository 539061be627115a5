"""Tensors out of the wire format: views of storages whose values come from blobs, or from a seeded generator."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch
from torch import nn

from fxlib.errors import LimitError, WireError
from fxlib.utils.compare import same_bits
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.constants import DTYPES
from fxlib.wire.write_tensors import DATA, contiguous_strides


class TensorReader:
    """Builds the tensors of a checked graph, each once, when it is first asked for.

    Args:
        graph: the graph.
        blobs: safetensors files by SHA-256.
        seed: of the values that were not sent; None: every tensor must be sent or be bound to the client's own.
    """

    def __init__(self, graph: pb.Graph, blobs: Mapping[str, bytes], seed: int | None) -> None:
        self._graph = graph
        self._blobs = blobs
        self._seed = seed
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    @property
    def bound(self) -> bool:
        """Whether there is a client's module, to which all that was not sent must be bound."""
        return self._seed is None

    def bind(self, index: int, tensor: object) -> None:
        """Let an index stand for one of the client's own tensors, if that has the dtype and shape expected."""
        wire = self._graph.tensors[index]
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype == DTYPES[wire.dtype]
            and tuple(tensor.shape) == tuple(wire.shape)
            and isinstance(tensor, nn.Parameter) == wire.parameter
        ):
            self._tensors.setdefault(index, tensor)

    def is_another(self, index: int, name: str) -> bool:
        """Whether one of the client's own tensors stands for one that was sent with other values."""
        wire = self._graph.tensors[index]
        sent = self._graph.storages[wire.storage]
        if index not in self._tensors or not sent.HasField("data") or sent.data.sha256 not in self._blobs:
            return False
        return not same_bits(self._tensors[index].detach(), self._build(wire, name).detach())

    def read(self, index: int, name: str) -> torch.Tensor:
        """Return a tensor; `name` is its path, from which missing values are drawn.

        Raises:
            WireError: its blob is missing or is not what its digest says, or this machine lacks its device.
        """
        tensor = self._tensors.get(index)
        if tensor is None:
            tensor = self._tensors[index] = self._build(self._graph.tensors[index], name)
        return tensor

    def _build(self, wire: pb.Tensor, name: str) -> torch.Tensor:
        shape = tuple(wire.shape)
        if wire.storage not in self._storages:
            self._storages[wire.storage] = self._storage(wire, name)
        storage = self._storages[wire.storage]
        tensor = torch.empty(0, dtype=DTYPES[wire.dtype], device=storage.device)
        strides = tuple(wire.stride) or contiguous_strides(shape)
        tensor.set_(storage, wire.offset, shape, strides)
        return nn.Parameter(tensor, wire.requires_grad) if wire.parameter else tensor.requires_grad_(wire.requires_grad)

    def _storage(self, first: pb.Tensor, name: str) -> torch.UntypedStorage:
        wire = self._graph.storages[first.storage]
        blob = self._blobs.get(wire.data.sha256) if wire.HasField("data") else None
        if blob is not None:
            data = _read_blob(blob, wire, name)
        elif wire.HasField("data"):
            raise WireError(f"blob {wire.data.sha256} is missing", where=f"tensor {name!r}")
        elif self._seed is None:
            raise WireError(
                "the graph was sent without its values, and the module given as root has no such tensor",
                where=f"tensor {name!r}",
                hint="Decode with the module that was captured as root.",
            )
        else:
            data = _draw(wire.bytes, first, name, self._seed)
        try:
            return data.to(_device(wire.device or "cpu")).untyped_storage()
        except Exception as error:  # noqa: BLE001 - each kind of device has its own way to say that it is not there
            hint = "Decode on a machine that has the device, or with root=, on the tensors that are there."
            raise WireError(f"device {wire.device}: {error}", where=f"tensor {name!r}", hint=hint) from None


def _device(name: str) -> torch.device:
    """Return a device of a kind that this torch has: for others, torch would import a module of the kind's name."""
    device = torch.device(name)
    if device.type not in {"cpu", "meta"} and not hasattr(torch, device.type):
        raise RuntimeError(f"this build of torch has no {device.type}")
    return device


def _read_blob(blob: bytes, wire: pb.Storage, name: str) -> torch.Tensor:
    where = f"tensor {name!r}"
    if len(blob) != wire.data.size or hashlib.sha256(blob).hexdigest() != wire.data.sha256:
        raise WireError("the blob is not the one that its digest names", where=where)
    try:
        tensors = safetensors.torch.load(blob)  # a header in JSON, and raw bytes: no pickle
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise WireError(f"the blob is no safetensors file: {error}", where=where) from None
    if set(tensors) != {DATA} or tensors[DATA].dim() != 1 or tensors[DATA].nbytes != wire.bytes:
        raise WireError(f"the blob does not hold one row of {wire.bytes:,} bytes called {DATA!r}", where=where)
    return tensors[DATA].clone()  # on memory of its own, aligned and writable


def _draw(size: int, first: pb.Tensor, name: str, seed: int) -> torch.Tensor:
    """Values for a storage that was not sent, the same in every process: drawn for the tensor that names it first."""
    try:
        flat = torch.zeros(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise LimitError(f"no memory for {size:,} bytes: {error}", where=f"tensor {name!r}") from None
    dtype = DTYPES[first.dtype]
    if size % dtype.itemsize or not dtype.is_floating_point or first.dtype.startswith(("float8", "float4")):
        return flat  # zeros: an index in range, a mask that masks nothing, a counter that has not begun
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]) >> 1
    )
    values, leaf = flat.view(dtype), name.rpartition(".")[2]
    if leaf.endswith("_var"):
        values.uniform_(0.5, 1.5, generator=generator)
    elif leaf == "weight" and len(first.shape) == 1:
        values.normal_(1.0, 0.1, generator=generator)  # the scale of a normalization
    else:
        inputs = math.prod(first.shape[1:]) if len(first.shape) > 1 else 100
        values.normal_(0.0, 1.0 / math.sqrt(max(inputs, 1)), generator=generator)
    return flat
