"""Batches and their descriptions, to and from protobuf; real ones travel as safetensors blobs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fxlib.batches import Batch, BatchSpec, Tensors
from fxlib.errors import WireError, WorkloadError
from fxlib.protocol.dtypes import dtype_from_text, dtype_to_text
from fxlib.v1 import graph_pb2, workload_pb2


def blob_ref(data: bytes) -> graph_pb2.BlobRef:
    """Return the address of some bytes."""
    return graph_pb2.BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def batch_to_bytes(batch: Batch) -> bytes:
    """Write one batch as safetensors.

    Raises:
        WorkloadError: a tensor's dtype has no place in that format.
    """
    # A copy each: safetensors refuses tensors that share storage, as a slice of a batch and the batch do.
    tensors = {
        name: value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        for name, value in batch.named.items()
    }
    try:
        return save(tensors)
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
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise WireError(f"not a batch in safetensors: {error}", where=where) from error
    target = tensors.pop("target", None)
    kwargs = {name.removeprefix("kwarg."): value for name, value in tensors.items() if name.startswith("kwarg.")}
    inputs = _in_order({name: value for name, value in tensors.items() if not name.startswith("kwarg.")}, where)
    return Batch(inputs=inputs, kwargs=kwargs, target=target)


def spec_to_proto(spec: BatchSpec) -> workload_pb2.BatchSpec:
    """Describe described batches."""
    proto = workload_pb2.BatchSpec(inputs=[_tensors_to_proto(each) for each in spec.inputs], count=spec.count)
    for name, each in spec.kwargs.items():
        proto.kwargs[name].CopyFrom(_tensors_to_proto(each))
    if spec.target is not None:
        proto.target.CopyFrom(_tensors_to_proto(spec.target))
    return proto


def spec_from_proto(proto: workload_pb2.BatchSpec) -> BatchSpec:
    """Read described batches.

    Raises:
        WireError: a dtype is unknown.
        WorkloadError: a shape or a range describes no tensor.
    """
    return BatchSpec(
        inputs=tuple(_tensors_from_proto(each, f"inputs[{index}]") for index, each in enumerate(proto.inputs)),
        kwargs={name: _tensors_from_proto(each, f"kwargs[{name!r}]") for name, each in sorted(proto.kwargs.items())},
        target=_tensors_from_proto(proto.target, "target") if proto.HasField("target") else None,
        count=proto.count,
    )


def _tensors_to_proto(tensors: Tensors) -> workload_pb2.TensorSpec:
    return workload_pb2.TensorSpec(
        shape=tensors.shape, dtype=dtype_to_text(tensors.dtype), low=tensors.low, high=tensors.high
    )


def _tensors_from_proto(proto: workload_pb2.TensorSpec, where: str) -> Tensors:
    low = proto.low if proto.HasField("low") else None
    high = proto.high if proto.HasField("high") else None
    if any(bound is not None and not math.isfinite(bound) for bound in (low, high)):
        raise WireError("a bound is not finite", where=f"Workload.description.{where}")
    return Tensors(
        shape=tuple(proto.shape),
        dtype=dtype_from_text(proto.dtype, f"Workload.description.{where}.dtype"),
        low=low,
        high=high,
    )


def _in_order(tensors: Mapping[str, torch.Tensor], where: str) -> tuple[torch.Tensor, ...]:
    try:
        return tuple(tensors[f"input.{index}"] for index in range(len(tensors)))
    except KeyError as error:
        raise WireError(f"{error} is missing", where=where) from None
