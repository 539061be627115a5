"""Whatever arrives, it is read or refused: nothing else is raised."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from fxlib import Batch, RemoteObject, Workload, protocol
from fxlib.errors import FxlibError, WireError, WorkloadError
from fxlib.reasons import Reason
from fxlib.v1 import graph_pb2, jobs_pb2, profile_pb2, workload_pb2
from tests.client.models import workload
from tests.protocol import strategies as some
from tests.shared.many import many

READERS: dict[Any, Callable[[Any], object]] = {
    workload_pb2.Workload: lambda message: protocol.workload_from_proto(message, {}),
    jobs_pb2.Job: protocol.job_from_proto,
    jobs_pb2.JobEvent: protocol.event_from_proto,
    jobs_pb2.Recipe: protocol.recipe_from_proto,
    jobs_pb2.TrialOptions: protocol.trial_from_proto,
    profile_pb2.Profile: protocol.profile_from_proto,
}
WRITTEN: dict[Any, st.SearchStrategy[Any]] = {
    workload_pb2.Workload: some.workloads.map(lambda each: protocol.workload_to_proto(each).message),
    jobs_pb2.Job: some.jobs.map(protocol.job_to_proto),
    jobs_pb2.JobEvent: some.events.map(protocol.event_to_proto),
    jobs_pb2.Recipe: st.just(protocol.recipe_to_proto([("split_calls", {"nested": [1, {"a": None}]})])),
    jobs_pb2.TrialOptions: some.trials.map(protocol.trial_to_proto),
    profile_pb2.Profile: some.profiles.map(protocol.profile_to_proto),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.DESCRIPTOR.name)
@settings(max_examples=many(40))
@given(data=st.data())
def test_mutated_messages_are_read_or_refused(kind: Any, data: st.DataObject) -> None:
    wire = bytearray(data.draw(WRITTEN[kind]).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if wire:
            wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DecodeError, FxlibError):
        READERS[kind](kind.FromString(bytes(wire)))


@pytest.mark.parametrize("seconds, nanos", [(0, -1), (0, 10**9), (2**60, 0)])
def test_a_time_that_is_none_is_refused(seconds: int, nanos: int) -> None:
    event = jobs_pb2.JobEvent(state=jobs_pb2.JOB_STATE_QUEUED)
    event.at.seconds, event.at.nanos = seconds, nanos
    with pytest.raises(WireError, match=r"JobEvent\.at"):
        protocol.event_from_proto(event)


@pytest.mark.parametrize("data", [b"", b"\x80\x04\x95", b"\x08" + bytes(7) + b"{}", b"\xff" * 64])
def test_bytes_that_are_no_batch_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match=r"Workload\.batches\[0\]"):
        protocol.batch_from_bytes(data, "Workload.batches[0]")


@pytest.mark.slow
@settings(max_examples=100)
@given(batch=some.batches, data=st.data())
def test_mutated_batches_are_read_or_refused(batch: Batch, data: st.DataObject) -> None:
    wire = bytearray(protocol.batch_to_bytes(batch))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FxlibError):
        protocol.batch_from_bytes(bytes(wire))


def test_a_missing_blob_is_named() -> None:
    message = workload_pb2.Workload()
    message.batches.batches.add(sha256="ab" * 32, size=3)
    with pytest.raises(WireError, match=r"Workload.batches\[0\]: blob (ab){32} is missing"):
        protocol.workload_from_proto(message, {})
    assert [ref.sha256 for ref in protocol.blobs_of(message)] == ["ab" * 32]


def test_a_workload_without_inputs_is_refused() -> None:
    with pytest.raises(WireError, match=r"Workload\.inputs"):
        protocol.workload_from_proto(workload_pb2.Workload(), {})


def test_a_dtype_that_is_none_is_refused_by_its_field() -> None:
    spec = workload_pb2.BatchSpec(inputs=[workload_pb2.TensorSpec(shape=[1], dtype="load")], count=1)
    with pytest.raises(WireError, match=r"Workload.description.inputs\[0\].dtype: no dtype is called 'load'"):
        protocol.spec_from_proto(spec)


def test_a_value_of_an_unknown_kind_is_refused_by_its_field() -> None:
    with pytest.raises(WireError, match=r"some.option"):
        protocol.value_from_proto(graph_pb2.Value(), "some.option")


def test_a_reason_of_a_newer_version_keeps_its_sentence() -> None:
    message = jobs_pb2.JobResult(decision=jobs_pb2.DECISION_KEEP_ORIGINAL, reason_code="FROM_THE_FUTURE", reason="why")
    message.calls.add(node="a", action="moved", reason_code="ALSO_NEW", reason="its sentence")
    report = protocol.report_from_proto(message)
    assert (report.reason, report.explanation) == (Reason.OTHER, "why")
    assert report.calls[0].reason.sentence(report.calls[0].detail) == "its sentence"


def test_equal_workloads_are_equal_bytes() -> None:
    first = workload()
    once, again = (protocol.workload_to_proto(first).message.SerializeToString(deterministic=True) for _ in range(2))
    assert once == again


def test_what_cannot_be_sent_is_said_by_its_field() -> None:
    described = Workload.describe(
        [torch.ones(1)], rrefs={"table": RemoteObject(owner="ps", cls="a:B", args=(object(),))}
    )
    with pytest.raises(WireError, match=r"Workload.rrefs\['table'\].args\[0\]: a builtins.object cannot travel"):
        protocol.workload_to_proto(described)
    complexes = Workload(batches=[torch.ones(1, dtype=torch.complex128)])
    with pytest.raises(WorkloadError, match="Describe the batches instead"):
        protocol.workload_to_proto(complexes)


def test_text_that_people_read_steers_no_terminal() -> None:
    message = jobs_pb2.JobEvent(state=jobs_pb2.JOB_STATE_RUNNING, phase="q\x1bps", message="\x1b]0;x\x07\nfxlib: done")
    read = protocol.event_from_proto(message)
    assert (read.phase, read.message) == ("q ps", " ]0;x  fxlib: done")
    result = jobs_pb2.JobResult(decision=jobs_pb2.DECISION_KEEP_ORIGINAL, reason="\x1b[2J\u202egone")
    result.calls.add(node="a\x1b", action="moved", reason_code="FROM_THE_FUTURE", reason="\x1b[31m", source="\r")
    assert repr(protocol.report_from_proto(result)).isprintable()


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1.0])
def test_what_is_no_duration_is_refused(figure: float) -> None:
    result = jobs_pb2.JobResult(decision=jobs_pb2.DECISION_KEEP_ORIGINAL, phase_seconds={"qps": figure})
    with pytest.raises(WireError, match="phase_seconds"):
        protocol.report_from_proto(result)


def test_what_limits_a_call_may_be_unknown_to_an_older_client() -> None:
    message = jobs_pb2.JobResult(decision=jobs_pb2.DECISION_KEEP_ORIGINAL)
    message.calls.add(
        node="a", action="moved", reason_code="OTHER", limited_by_code="FROM_THE_FUTURE", limited_by="its sentence"
    )
    (call,) = protocol.report_from_proto(message).calls
    assert call.limited_by is Reason.OTHER
    assert call.limited_by.sentence(call.limit_detail) == "its sentence"


def test_a_workload_of_an_older_client_accumulates_over_one_backward() -> None:
    message = protocol.workload_to_proto(workload()).message
    message.ClearField("accumulation")
    assert protocol.workload_from_proto(message, {}).accumulation == 1
