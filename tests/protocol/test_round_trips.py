"""What is written is what is read, also after a trip through bytes."""

from typing import TypeVar

import pytest
import torch
from google.protobuf.message import Message
from hypothesis import given, settings

from fxlib import protocol
from fxlib.spec.contract import Contract
from fxlib.spec.inputs import Batch, BatchSpec
from fxlib.spec.job import Blob, Event, Job, JobFilter, TrialOptions
from fxlib.spec.profile import Profile
from fxlib.spec.report import Report
from fxlib.spec.workload import Workload
from tests.protocol import strategies as some

pytestmark = pytest.mark.slow

M = TypeVar("M", bound=Message)

few = settings(max_examples=30)


def sent(message: M) -> M:
    return type(message).FromString(message.SerializeToString())


def bits(tensor: torch.Tensor) -> tuple[torch.Size, bytes]:
    return tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@few
@given(some.workloads)
def test_a_workload(workload: Workload) -> None:
    encoded = protocol.workload_to_proto(workload)
    assert protocol.workload_from_proto(sent(encoded.message), encoded.blobs) == workload


@few
@given(some.contracts)
def test_a_contract(contract: Contract) -> None:
    assert protocol.contract_from_proto(sent(protocol.contract_to_proto(contract))) == contract


@few
@given(some.specs)
def test_described_batches(spec: BatchSpec) -> None:
    assert protocol.spec_from_proto(sent(protocol.spec_to_proto(spec))) == spec


@few
@given(some.batches)
def test_a_real_batch_bit_for_bit(batch: Batch) -> None:
    read = protocol.batch_from_bytes(protocol.batch_to_bytes(batch))
    assert read.named.keys() == batch.named.keys()
    for name, value in read.named.items():
        assert value.dtype == batch.named[name].dtype
        assert bits(value) == bits(batch.named[name])


@few
@given(some.trials)
def test_trial_options(options: TrialOptions) -> None:
    assert protocol.trial_from_proto(sent(protocol.trial_to_proto(options))) == options


@few
@given(some.reports, some.blobs)
def test_a_report(report: Report, graph: Blob) -> None:
    message = sent(protocol.report_to_proto(report, graph=graph))
    assert protocol.report_from_proto(message) == report
    assert protocol.blob_from_proto(message.graph) == graph


@few
@given(some.profiles)
def test_a_profile(profile: Profile) -> None:
    assert protocol.profile_from_proto(sent(protocol.profile_to_proto(profile))) == profile


@few
@given(some.jobs)
def test_a_job(job: Job) -> None:
    assert protocol.job_from_proto(sent(protocol.job_to_proto(job))) == job


@few
@given(some.events)
def test_an_event(event: Event) -> None:
    assert protocol.event_from_proto(sent(protocol.event_to_proto(event))) == event


@few
@given(some.filters)
def test_a_filter(wanted: JobFilter) -> None:
    assert protocol.filter_from_proto(sent(protocol.filter_to_proto(wanted))) == wanted
