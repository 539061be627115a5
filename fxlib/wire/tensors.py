"""Writes tensors to the wire format and reads them: what they view and, on request only, their values.

Values travel as content-addressed blobs, one per storage; storages whose values did not travel are filled from a seeded
generator.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import safetensors
import safetensors.torch
import torch
from torch import nn

from fxlib.errors import LimitError, WireError
from fxlib.utils.compare import same_bits
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import Fault
from fxlib.wire.names import DTYPES

DATA = "data"
"""Name of the only tensor in a blob."""

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
    """Return whether dtype, shape, strides and storage describe a tensor: it is strided, a leaf, and of no subclass."""
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
    """Return a key that tensors on one storage share."""
    return tensor.device, int(tensor.untyped_storage()._cdata)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, that torch gives a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class TensorWriter:
    """Collects the tensors of a graph.

    Tensors that share a storage keep sharing it; only the part of a storage that they view travels.
    """

    def __init__(self, graph: pb.Graph) -> None:
        self._graph = graph
        self._index: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        self._groups: dict[tuple[object, ...], list[int]] = {}

    def add(self, tensor: torch.Tensor, name: str = "") -> int:
        """Return the index of a plain tensor; `name` is its path, if it has one."""
        index = self._index.get(id(tensor))
        if index is None:
            index = self._index[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self._names.append(name)
            self._groups.setdefault(storage_key(tensor), []).append(index)
        return index

    def finish(self, *, sent: Callable[[torch.Tensor], bool]) -> dict[str, bytes]:
        """Write all tensors and storages; return the blobs, by SHA-256, of the tensors whose values are to be sent.

        Raises:
            Fault: a tensor on the meta device, or whose memory was freed, has no values to send.
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
                try:
                    data = self._blob(members, start, end)
                except Fault as fault:
                    fault.inside(f"[{self._names[members[0]]!r}]")
                    raise
                storage.data.sha256, storage.data.size = hashlib.sha256(data).hexdigest(), len(data)
                blobs[storage.data.sha256] = data
        return blobs

    def _span(self, members: list[int]) -> tuple[int, int]:
        """Return the first and last byte that the tensors view."""
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
        if first.untyped_storage().nbytes() < end:  # which `set_` would make larger, with whatever is there
            raise Fault("its memory was freed, as FSDP does between forwards", "Gather the weights first.")
        dtypes = {self._tensors[index].dtype for index in members}
        flat = torch.empty(0, dtype=torch.uint8, device=first.device)
        flat.set_(first.untyped_storage(), start, (end - start,), (1,))
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        if dtype in _SAFE_DTYPES and (end - start) % dtype.itemsize == 0:
            flat = flat.view(dtype)
        return safetensors.torch.save({DATA: flat.cpu()})


class TensorReader:
    """Builds the tensors of a checked graph, each once, on first use.

    Args:
        graph: the graph.
        blobs: safetensors files by SHA-256.
        seed: the seed for values that were not sent; None: every tensor must be sent or be bound to the client's own.
    """

    def __init__(self, graph: pb.Graph, blobs: Mapping[str, bytes], seed: int | None) -> None:
        self._graph = graph
        self._blobs = blobs
        self._seed = seed
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._bound: set[int] = set()
        """Indices that stand for the client's own tensors."""

    @property
    def bound(self) -> bool:
        """Whether there is a client's module, to which every tensor that was not sent must be bound."""
        return self._seed is None

    def bind(self, index: int, tensor: object, name: str) -> None:
        """Let an index stand for one of the client's own tensors, if it has the expected dtype and shape.

        Raises:
            WireError: it stands for another one of these already.
        """
        wire = self._graph.tensors[index]
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype == DTYPES[wire.dtype]
            and tuple(tensor.shape) == tuple(wire.shape)
            and isinstance(tensor, nn.Parameter) == wire.parameter
        ):
            if index in self._bound and self._tensors[index] is not tensor:
                raise WireError(
                    "the graph has one tensor where the module given as root has two",
                    where=f"tensor {name!r}",
                    hint="Decode with the module that was captured.",
                )
            if index not in self._tensors:
                self._tensors[index] = tensor
                self._bound.add(index)

    def is_another(self, index: int, name: str) -> bool:
        """Return whether one of the client's own tensors stands for a tensor that was sent with other values."""
        wire = self._graph.tensors[index]
        sent = self._graph.storages[wire.storage]
        if index not in self._tensors or not sent.HasField("data") or sent.data.sha256 not in self._blobs:
            return False
        return not same_bits(self._tensors[index].detach(), self._build(wire, name).detach())

    def read(self, index: int, name: str) -> torch.Tensor:
        """Return a tensor; `name` is its path, from which missing values are drawn.

        Raises:
            WireError: its blob is missing or does not match its digest, or this machine lacks its device.
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
            hint = "Decode on a machine that has the device, or with root=, which uses the tensors of that module."
            raise WireError(f"device {wire.device}: {error}", where=f"tensor {name!r}", hint=hint) from None


def _device(name: str) -> torch.device:
    """Return a device of a type that this torch has; for other names, torch would import a module."""
    device = torch.device(name)
    if device.type not in {"cpu", "meta"} and not hasattr(torch, device.type):
        raise RuntimeError(f"this build of torch has no {device.type}")
    return device


def _read_blob(blob: bytes, wire: pb.Storage, name: str) -> torch.Tensor:
    where = f"tensor {name!r}"
    if len(blob) != wire.data.size or hashlib.sha256(blob).hexdigest() != wire.data.sha256:
        raise WireError("the blob does not match its digest", where=where)
    try:
        tensors = safetensors.torch.load(blob)  # the format is a JSON header and raw bytes, without pickle
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise WireError(f"the blob is not a safetensors file: {error}", where=where) from None
    if set(tensors) != {DATA} or tensors[DATA].dim() != 1 or tensors[DATA].nbytes != wire.bytes:
        raise WireError(f"the blob does not hold one row of {wire.bytes:,} bytes called {DATA!r}", where=where)
    return tensors[DATA].clone()  # on memory of its own, aligned and writable


def _draw(size: int, first: pb.Tensor, name: str, seed: int) -> torch.Tensor:
    """Return values for a storage that was not sent, the same in every process, named by its first tensor."""
    try:
        flat = torch.zeros(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise LimitError(f"no memory for {size:,} bytes: {error}", where=f"tensor {name!r}") from None
    dtype = DTYPES[first.dtype]
    if size % dtype.itemsize or not dtype.is_floating_point or first.dtype.startswith(("float8", "float4")):
        return flat  # zeros are indices in range, masks that mask nothing, and counters at their start
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
