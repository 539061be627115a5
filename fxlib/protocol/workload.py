"""Workloads and trial options, to and from protobuf; real batches and a captured loss travel as blobs beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from torch.fx import GraphModule

from fxlib import wire
from fxlib.errors import WireError
from fxlib.protocol.batches import batch_from_bytes, batch_to_bytes, blob_ref, spec_from_proto, spec_to_proto
from fxlib.protocol.converter import Bijection, Converter, Rule
from fxlib.protocol.values import contract_from_proto, contract_to_proto, value_from_proto, value_to_proto
from fxlib.spec.trial import TrialOptions
from fxlib.spec.workload import Assume, BatchSpec, Dense, Mode, Optimizer, RemoteObject, Server, Table, Workload
from fxlib.v1 import graph_pb2, jobs_pb2, workload_pb2
from fxlib.wire.faults import Fault

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
        "setup": Rule(read=lambda setup: setup or None),
        "service_time_per": Rule(read=lambda per: per or "item"),
    },
)


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
        blobs: those that `blobs_of` names, by SHA-256.

    Raises:
        WireError: a blob is missing, or is not what it should be, or a field has no meaning.
        WorkloadError: a field describes no step that can run.
    """
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
    )


def blobs_of(proto: workload_pb2.Workload) -> tuple[graph_pb2.BlobRef, ...]:
    """Return the blobs that a workload cannot do without."""
    loss = (proto.loss.graph,) if proto.loss.WhichOneof("kind") == "graph" else ()
    return (*proto.batches.batches, *loss)


def _batches_from_proto(proto: workload_pb2.Workload, blobs: Mapping[str, bytes]) -> BatchSpec | list[object]:
    match proto.WhichOneof("inputs"):
        case "description":
            return spec_from_proto(proto.description)
        case "batches":
            places = [f"Workload.batches[{index}]" for index in range(len(proto.batches.batches))]
            return [
                batch_from_bytes(_blob(ref, blobs, where), where)
                for ref, where in zip(proto.batches.batches, places, strict=True)
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
        WorkloadError: a figure is out of its range.
    """
    return _OPTIONS.read(proto)
