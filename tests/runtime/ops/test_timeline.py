"""A recorded run tells where the trainer's thread stood still."""

from __future__ import annotations

import pytest
import torch

from fxlib.runtime import CallKind, exposed_s, record, register
from fxlib.runtime.ops.timeline import current_recording
from tests.runtime.graphs import Program

X = torch.arange(4.0)
_CALLS: list[str] = []


def get(x: torch.Tensor) -> torch.Tensor:
    return join(get_later(x))


def get_later(x: torch.Tensor) -> torch.Tensor:
    _CALLS.append("issued")
    return x


def join(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.usefixtures("servers")
def test_blocking_calls_are_exposed_for_as_long_as_they_take() -> None:
    program = Program("x")
    first = program.call("ps0", "slow", program.inputs[0], 0.1)
    second = program.call("ps1", "slow", program.inputs[0], 0.05)
    with record() as recording:
        program.returns((first, second))(X)
    spans = recording.timeline.spans
    assert [(span.kind, span.name, span.to) for span in spans] == [
        ("call", "remote_call", "ps0"),
        ("call", "remote_call_1", "ps1"),
    ]
    exposed = exposed_s(recording.timeline)
    assert exposed["remote_call"] >= 0.1
    assert exposed["remote_call_1"] >= 0.05
    assert sum(exposed.values()) <= recording.timeline.step_s


@pytest.mark.slow
@pytest.mark.usefixtures("servers")
def test_issued_calls_overlap_and_expose_only_their_waits() -> None:
    program = Program("x")
    issues = [program.issue(f"ps{index}", "slow", program.inputs[0], 1.0) for index in (0, 1)]
    module = program.returns([program.wait(issue) for issue in issues])
    with record() as recording:
        module(X)
    first, second = (span for span in recording.timeline.spans if span.kind == "in_flight")
    assert [first.name, second.name] == ["issue_call", "issue_call_1"]
    assert all(flight.end_s - flight.start_s >= 1.0 for flight in (first, second))
    assert second.start_s < first.end_s
    assert exposed_s(recording.timeline)["issue_call_1"] < second.end_s - second.start_s


def test_a_registered_client_is_recorded_as_rpc_is() -> None:
    register(CallKind(name="test client", blocking=get, issue=get_later, wait=join))
    program = Program("x")
    program.local(get, program.inputs[0])
    module = program.returns(program.local(join, program.local(get_later, program.inputs[0])))
    with record() as recording:
        assert torch.equal(module(X), X + 1)
    assert sorted(span.kind for span in recording.timeline.spans) == ["call", "in_flight", "issue", "wait"]


def test_blocks_of_the_step_are_recorded_by_hand() -> None:
    with record() as recording, recording.span("backward"):
        pass
    assert [span.kind for span in recording.timeline.spans] == ["backward"]


def test_recordings_nest_and_end() -> None:
    with record() as outer:
        with record() as inner:
            assert current_recording() is inner
        assert current_recording() is outer
    assert current_recording() is None
