"""Batches and their descriptions, to and from protobuf; real ones travel as safetensors blobs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.torch import load, save

from fxlib.errors import WireError, WorkloadError
from fxlib.protocol.converter import DTYPE, Converter
from fxlib.protocol.figures import finite
from fxlib.spec.inputs import Batch, BatchSpec, Tensors
from fxlib.v1 import graph_pb2, workload_pb2
from fxlib.wire.nested_inputs import read_nest, write_nest

_STRUCTURE = "fxlib.structure"
"""Where the header of a batch says how its inputs are nested."""


def blob_ref(data: bytes) -> graph_pb2.BlobRef:
    """Return the address of some bytes."""
    return graph_pb2.BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def batch_to_bytes(batch: Batch) -> bytes:
    """Write one batch as safetensors; how inputs are nested stands in the header.

    Raises:
        WireError: an input is nested too deep, or is of a kind that cannot travel.
        WorkloadError: a tensor's dtype has no place in that format.
    """
    named, metadata = batch.named, None
    if not _is_flat(batch.inputs, batch.kwargs, torch.Tensor):
        structure = graph_pb2.Value()
        found = write_nest(structure, (batch.inputs, dict(batch.kwargs)), "Workload.batches")
        named = {str(index): tensor for index, tensor in enumerate(found)}
        named |= {} if batch.target is None else {"target": batch.target}
        metadata = {_STRUCTURE: structure.SerializeToString(deterministic=True).hex()}
    # A copy each: safetensors refuses tensors that share storage, as a slice of a batch and the batch do.
    tensors = {
        name: value.detach().to("cpu").clone(memory_format=torch.contiguous_format) for name, value in named.items()
    }
    try:
        return save(tensors, metadata=metadata)
    except (KeyError, SafetensorError) as error:
        raise WorkloadError(
            f"a dtype cannot be sent: {error}", where="Workload.batches", hint="Describe the batches instead."
        ) from error


def batch_from_bytes(data: bytes, where: str = "batch") -> Batch:
    """Read one batch.

    Raises:
        WireError: the bytes are not safetensors, or a tensor's name is not one of a batch's.
    """
    try:
        tensors = load(data)
        structure = _structure_in(data)
    except (SafetensorError, DecodeError, KeyError, ValueError, TypeError) as error:
        raise WireError(f"not a batch in safetensors: {error}", where=where) from error
    # On memory that torch allots, as a job's own: speed and the last bits of its work may depend on its alignment.
    tensors = {name: value.clone() for name, value in tensors.items()}
    target = tensors.pop("target", None)
    if structure is not None:
        inputs, kwargs = _read_nested(structure, _in_order(tensors, where, prefix=""), where)
        return Batch(inputs=inputs, kwargs=kwargs, target=target)
    kwargs = {name.removeprefix("kwarg."): value for name, value in tensors.items() if name.startswith("kwarg.")}
    inputs = _in_order({name: value for name, value in tensors.items() if not name.startswith("kwarg.")}, where)
    return Batch(inputs=inputs, kwargs=kwargs, target=target)


def spec_to_proto(spec: BatchSpec) -> workload_pb2.BatchSpec:
    """Describe described batches."""
    proto = workload_pb2.BatchSpec(count=spec.count)
    if _is_flat(spec.inputs, spec.kwargs, Tensors):
        proto.inputs.extend(_TENSORS.write(each) for each in spec.inputs)
        for name, each in spec.kwargs.items():
            proto.kwargs[name].CopyFrom(_TENSORS.write(each))
    else:
        nest = (spec.inputs, dict(spec.kwargs))
        found = write_nest(proto.nested.structure, nest, "Workload.description")
        proto.nested.tensors.extend(map(_TENSORS.write, found))
    if spec.target is not None:
        proto.target.CopyFrom(_TENSORS.write(spec.target))
    return proto


def spec_from_proto(proto: workload_pb2.BatchSpec) -> BatchSpec:
    """Read described batches.

    Raises:
        WireError: a dtype is unknown.
        WorkloadError: a shape or a range describes no tensor.
    """
    inputs: Any = tuple(_tensors_from_proto(each, f"inputs[{index}]") for index, each in enumerate(proto.inputs))
    kwargs = {name: _tensors_from_proto(each, f"kwargs[{name!r}]") for name, each in sorted(proto.kwargs.items())}
    if proto.HasField("nested"):
        tensors = [_tensors_from_proto(each, f"tensors[{index}]") for index, each in enumerate(proto.nested.tensors)]
        inputs, kwargs = _read_nested(proto.nested.structure, tensors, "Workload.description")
    return BatchSpec(
        inputs=inputs,
        kwargs=kwargs,
        target=_tensors_from_proto(proto.target, "target") if proto.HasField("target") else None,
        count=proto.count,
    )


_TENSORS = Converter(Tensors, workload_pb2.TensorSpec, number=finite, rules={"dtype": DTYPE})


def _tensors_from_proto(proto: workload_pb2.TensorSpec, where: str) -> Tensors:
    return _TENSORS.read_at(f"Workload.description.{where}", proto)


def _is_flat(inputs: Sequence[object], kwargs: Mapping[str, object], kind: type) -> bool:
    """Whether inputs are tensors (or descriptions), each but once, as they always could be sent."""
    values = [*inputs, *kwargs.values()]
    is_once = len({id(each) for each in values}) == len(values)
    return all(isinstance(each, kind) for each in values) and (is_once or kind is Tensors)


def _structure_in(data: bytes) -> graph_pb2.Value | None:
    """Return the message in the header of safetensors that says how inputs are nested, if there is one.

    Raises:
        ValueError: it is no message; also KeyError, TypeError or DecodeError.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = header.get("__metadata__", {}).get(_STRUCTURE)
    return None if text is None else graph_pb2.Value.FromString(bytes.fromhex(text))


def _read_nested(
    structure: graph_pb2.Value, tensors: Sequence[object], where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match read_nest(structure, tensors, where):
        case (tuple() as inputs, dict() as kwargs) if all(isinstance(name, str) for name in kwargs):
            return inputs, kwargs
    raise WireError("the inputs are not a tuple, and a dict by name", where=where)


def _in_order(tensors: Mapping[str, torch.Tensor], where: str, prefix: str = "input.") -> tuple[torch.Tensor, ...]:
    try:
        return tuple(tensors[f"{prefix}{index}"] for index in range(len(tensors)))
    except KeyError as error:
        raise WireError(f"{error} is missing", where=where) from None
