"""Workloads and trial options, to and from protobuf; real batches and a captured loss travel as blobs beside them.

Batches are safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.fx import GraphModule

from fxlib import wire
from fxlib.errors import LimitError, WireError, WorkloadError
from fxlib.protocol.converter import DTYPE, Bijection, Converter, FieldRule, finite
from fxlib.protocol.values import contract_from_proto, contract_to_proto, value_from_proto, value_to_proto
from fxlib.spec.inputs import Batch, BatchSpec, Tensors
from fxlib.spec.job import TrialOptions
from fxlib.spec.workload import Assume, Dense, LayerRange, Mode, Optimizer, RemoteObject, Server, Table, Workload
from fxlib.v1 import graph_pb2, jobs_pb2, workload_pb2
from fxlib.wire.faults import Fault
from fxlib.wire.structures import read_nested, write_nested

_MODES = Bijection[Mode, "workload_pb2.StepMode"](
    {
        "forward": workload_pb2.STEP_MODE_FORWARD,
        "local": workload_pb2.STEP_MODE_LOCAL,
        "distributed": workload_pb2.STEP_MODE_DISTRIBUTED,
    }
)

_OPTIMIZER = Converter(Optimizer, workload_pb2.OptimizerSpec, text=None, number=None)
_TABLE = Converter(Table, workload_pb2.TableSpec, text=None, number=None)
_DENSE = Converter(Dense, workload_pb2.DenseSpec, text=None, number=None)
_SERVER = Converter(
    Server,
    workload_pb2.ServerSpec,
    text=None,
    number=None,
    rules={
        "tables": _TABLE.many,
        "dense": _DENSE.many,
        "setup": FieldRule(read=lambda setup: setup or None),
        "service_time_per": FieldRule(read=lambda per: per or "item"),
    },
)

_RANGE = Converter(LayerRange, workload_pb2.LayerRange, number=None)
_MAX_RANGES = 16_384
"""Layers of which a request may tell ranges."""

_STRUCTURE = "fxlib.structure"
"""Key in the header of a batch whose value says how its inputs are nested."""

_TENSORS = Converter(Tensors, workload_pb2.TensorSpec, number=finite, rules={"dtype": DTYPE})


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedWorkload:
    """A workload's message, and the blobs that it names, by SHA-256."""

    message: workload_pb2.Workload
    blobs: Mapping[str, bytes]


def workload_to_proto(workload: Workload) -> EncodedWorkload:
    """Write a workload.

    Raises:
        WireError: the loss's graph, or an argument of a remote object, cannot be written.
        WorkloadError: a batch's dtype cannot be sent.
    """
    proto = workload_pb2.Workload(
        optimizer=_OPTIMIZER.write(workload.trainer_optimizer),
        mode=_MODES.there(workload.mode),
        threads=workload.threads,
        trainers=workload.trainers,
        servers=map(_SERVER.write, workload.servers),
        rrefs=[_rref_to_proto(name, rref) for name, rref in sorted(workload.rrefs.items())],
        assume=workload.assume,
        seed=workload.seed,
        accumulation=workload.accumulation,
        clip_norm=workload.clip_norm,
        loss_scale=workload.loss_scale,
        pipeline=workload.pipeline,
        stale=workload.stale,
        ranges=map(_RANGE.write, workload.ranges),
    )
    for name, contract in workload.contracts.items():
        proto.contracts[name].CopyFrom(contract_to_proto(contract, f"Workload.contracts[{name!r}]"))
    blobs: dict[str, bytes] = {}

    def keep(data: bytes) -> graph_pb2.BlobRef:
        ref = blob_ref(data)
        blobs[ref.sha256] = data
        return ref

    if isinstance(workload.batches, BatchSpec):
        proto.description.CopyFrom(spec_to_proto(workload.batches))
    else:
        proto.batches.batches.extend(keep(batch_to_bytes(batch)) for batch in workload.real_batches)
    _loss_to_proto(workload.loss, proto.loss, keep)
    return EncodedWorkload(message=proto, blobs=blobs)


def workload_from_proto(proto: workload_pb2.Workload, blobs: Mapping[str, bytes]) -> Workload:
    """Read a workload.

    Args:
        proto: the message.
        blobs: the blobs that `blobs_of` names, by SHA-256.

    Raises:
        WireError: a blob is missing or not valid, or a field has no meaning.
        WorkloadError: a field does not describe a step that can run.
    """
    if len(proto.ranges) > _MAX_RANGES:
        raise LimitError(f"ranges of {len(proto.ranges):,} layers, and there may be {_MAX_RANGES:,}", where="ranges")
    return Workload(
        batches=_batches_from_proto(proto, blobs),
        loss=_loss_from_proto(proto.loss, blobs),
        optimizer=_OPTIMIZER.read(proto.optimizer),
        mode=_mode(proto.mode),
        threads=proto.threads,
        trainers=proto.trainers,
        servers=tuple(map(_SERVER.read, proto.servers)),
        rrefs={rref.name: _rref_from_proto(rref) for rref in proto.rrefs},
        contracts={
            name: contract_from_proto(contract, f"Workload.contracts[{name!r}]")
            for name, contract in sorted(proto.contracts.items())
        },
        assume=cast(Assume, proto.assume),
        seed=proto.seed,
        accumulation=proto.accumulation or 1,
        clip_norm=proto.clip_norm if proto.HasField("clip_norm") else None,
        loss_scale=proto.loss_scale if proto.HasField("loss_scale") else None,
        pipeline=proto.pipeline,
        stale=proto.stale,
        ranges=tuple(map(_RANGE.read, proto.ranges)),
    )


def blobs_of(proto: workload_pb2.Workload) -> tuple[graph_pb2.BlobRef, ...]:
    """Return the blobs that a workload requires."""
    loss = (proto.loss.graph,) if proto.loss.WhichOneof("kind") == "graph" else ()
    return (*proto.batches.batches, *loss)


def _batches_from_proto(proto: workload_pb2.Workload, blobs: Mapping[str, bytes]) -> BatchSpec | list[object]:
    match proto.WhichOneof("inputs"):
        case "description":
            return spec_from_proto(proto.description)
        case "batches":
            locations = [f"Workload.batches[{index}]" for index in range(len(proto.batches.batches))]
            return [
                batch_from_bytes(_blob(ref, blobs, where), where)
                for ref, where in zip(proto.batches.batches, locations, strict=True)
            ]
        case _:
            raise WireError("neither batches nor their description", where="Workload.inputs")


def _loss_to_proto(
    loss: str | GraphModule, proto: workload_pb2.Loss, keep: Callable[[bytes], graph_pb2.BlobRef]
) -> None:
    if isinstance(loss, str):
        proto.name = loss
    else:
        proto.graph.CopyFrom(keep(wire.encode(loss).graph.SerializeToString(deterministic=True)))


def _loss_from_proto(proto: workload_pb2.Loss, blobs: Mapping[str, bytes]) -> str | GraphModule:
    if proto.WhichOneof("kind") == "graph":
        return wire.decode(wire.parse(_blob(proto.graph, blobs, "Workload.loss")))
    return proto.name


def _blob(ref: graph_pb2.BlobRef, blobs: Mapping[str, bytes], where: str) -> bytes:
    try:
        return blobs[ref.sha256]
    except KeyError:
        raise WireError(f"blob {ref.sha256} is missing", where=where) from None


def _mode(proto: workload_pb2.StepMode) -> Mode:
    try:
        return _MODES.back(proto)
    except Fault as fault:
        raise fault.at("Workload.mode") from None


def _rref_to_proto(name: str, rref: RemoteObject) -> workload_pb2.RRefSpec:
    where = f"Workload.rrefs[{name!r}]"
    proto = workload_pb2.RRefSpec(
        name=name,
        owner=rref.owner,
        cls=rref.cls,
        args=[value_to_proto(value, f"{where}.args[{index}]") for index, value in enumerate(rref.args)],
    )
    for key, value in rref.kwargs.items():
        proto.kwargs[key].CopyFrom(value_to_proto(value, f"{where}.kwargs[{key!r}]"))
    return proto


def _rref_from_proto(proto: workload_pb2.RRefSpec) -> RemoteObject:
    where = f"Workload.rrefs[{proto.name!r}]"
    return RemoteObject(
        owner=proto.owner,
        cls=proto.cls,
        args=tuple(value_from_proto(value, f"{where}.args[{index}]") for index, value in enumerate(proto.args)),
        kwargs={
            key: value_from_proto(value, f"{where}.kwargs[{key!r}]") for key, value in sorted(proto.kwargs.items())
        },
    )


_OPTIONS = Converter(TrialOptions, jobs_pb2.TrialOptions, number=None)


def trial_to_proto(options: TrialOptions) -> jobs_pb2.TrialOptions:
    """Write trial options."""
    return _OPTIONS.write(options)


def trial_from_proto(proto: jobs_pb2.TrialOptions) -> TrialOptions:
    """Read trial options.

    Raises:
        WorkloadError: a figure is out of range.
    """
    return _OPTIONS.read(proto)


def blob_ref(data: bytes) -> graph_pb2.BlobRef:
    """Return the address of some bytes."""
    return graph_pb2.BlobRef(sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def batch_to_bytes(batch: Batch) -> bytes:
    """Write one batch as safetensors; the header says how inputs are nested.

    Raises:
        WireError: an input is nested too deeply, or is of a kind that cannot be sent.
        WorkloadError: that format does not support a tensor's dtype.
    """
    named, metadata = batch.named, None
    if not _is_flat(batch.inputs, batch.kwargs, torch.Tensor):
        structure = graph_pb2.Value()
        found = write_nested(structure, (batch.inputs, dict(batch.kwargs)), "Workload.batches")
        named = {str(index): tensor for index, tensor in enumerate(found)}
        named |= {} if batch.target is None else {"target": batch.target}
        metadata = {_STRUCTURE: structure.SerializeToString(deterministic=True).hex()}
    # Each tensor is copied: safetensors refuses tensors that share storage, as a slice of a batch and the batch do.
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
    # Torch allocates the memory, as for a job's own: speed and the last bits of its work may depend on its alignment.
    tensors = {name: value.clone() for name, value in tensors.items()}
    target = tensors.pop("target", None)
    if structure is not None:
        inputs, kwargs = _read_nested(structure, _in_order(tensors, where, prefix=""), where)
        return Batch(inputs=inputs, kwargs=kwargs, target=target)
    kwargs = {name.removeprefix("kwarg."): value for name, value in tensors.items() if name.startswith("kwarg.")}
    inputs = _in_order({name: value for name, value in tensors.items() if not name.startswith("kwarg.")}, where)
    return Batch(inputs=inputs, kwargs=kwargs, target=target)


def spec_to_proto(spec: BatchSpec) -> workload_pb2.BatchSpec:
    """Write described batches."""
    proto = workload_pb2.BatchSpec(count=spec.count)
    if _is_flat(spec.inputs, spec.kwargs, Tensors):
        proto.inputs.extend(_TENSORS.write(each) for each in spec.inputs)
        for name, each in spec.kwargs.items():
            proto.kwargs[name].CopyFrom(_TENSORS.write(each))
    else:
        nested = (spec.inputs, dict(spec.kwargs))
        found = write_nested(proto.nested.structure, nested, "Workload.description")
        proto.nested.tensors.extend(map(_TENSORS.write, found))
    if spec.target is not None:
        proto.target.CopyFrom(_TENSORS.write(spec.target))
    return proto


def spec_from_proto(proto: workload_pb2.BatchSpec) -> BatchSpec:
    """Read described batches.

    Raises:
        WireError: a dtype is unknown.
        WorkloadError: a shape or a range does not describe a tensor.
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


def _tensors_from_proto(proto: workload_pb2.TensorSpec, where: str) -> Tensors:
    return _TENSORS.read_at(f"Workload.description.{where}", proto)


def _is_flat(inputs: Sequence[object], kwargs: Mapping[str, object], kind: type) -> bool:
    """Return whether each input is a tensor (or a description) that occurs once, which older versions can send."""
    values = [*inputs, *kwargs.values()]
    is_once = len({id(each) for each in values}) == len(values)
    return all(isinstance(each, kind) for each in values) and (is_once or kind is Tensors)


def _structure_in(data: bytes) -> graph_pb2.Value | None:
    """Return the message in the header of safetensors that says how inputs are nested, if there is one.

    Raises:
        ValueError: the header is not valid; also KeyError, TypeError or DecodeError.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = header.get("__metadata__", {}).get(_STRUCTURE)
    return None if text is None else graph_pb2.Value.FromString(bytes.fromhex(text))


def _read_nested(
    structure: graph_pb2.Value, tensors: Sequence[object], where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match read_nested(structure, tensors, where):
        case (tuple() as inputs, dict() as kwargs) if all(isinstance(name, str) for name in kwargs):
            return inputs, kwargs
    raise WireError("the inputs are not a tuple, and a dict by name", where=where)


def _in_order(tensors: Mapping[str, torch.Tensor], where: str, prefix: str = "input.") -> tuple[torch.Tensor, ...]:
    try:
        return tuple(tensors[f"{prefix}{index}"] for index in range(len(tensors)))
    except KeyError as error:
        raise WireError(f"{error} is missing", where=where) from None
