"""A table converts a dataclass and a message, and no field of either is forgotten."""

from dataclasses import dataclass

import pytest

from fxlib.errors import WireError
from fxlib.protocol.converter import Converter, FieldRule
from fxlib.protocol.profile import profile_from_proto
from fxlib.spec.report import Estimate, Span
from fxlib.v1 import jobs_pb2, profile_pb2


@dataclass(frozen=True, kw_only=True)
class Figure:
    value: float
    low: float


def test_a_field_that_one_side_lacks_is_refused_unless_it_is_left_out() -> None:
    with pytest.raises(TypeError, match="Figure and Estimate do not both have high"):
        Converter(Figure, jobs_pb2.Estimate)
    converter = Converter(Figure, jobs_pb2.Estimate, left_out=("high",))
    assert converter.write(Figure(value=2.0, low=1.0)) == jobs_pb2.Estimate(value=2.0, low=1.0)


def test_a_field_that_holds_a_message_needs_a_rule() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Candidate:
        name: str
        gain: Estimate | None = None

    with pytest.raises(TypeError, match=r"fxlib\.v1\.Candidate\.gain holds a message, and has no rule"):
        Converter(Candidate, jobs_pb2.Candidate, left_out=("predicted_step_s", "verdict"))


def test_what_is_unknown_is_written_as_the_rule_says_or_stays_unset() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Named:
        name: str | None = None
        predicted_step_s: float | None = None

    rules = {"name": FieldRule(unknown="nobody")}
    message = Converter(Named, jobs_pb2.Candidate, rules=rules, left_out=("gain", "verdict")).write(Named())
    assert (message.name, message.HasField("predicted_step_s")) == ("nobody", False)


def test_what_cannot_be_read_is_told_with_the_whole_path() -> None:
    profile = profile_pb2.Profile()
    profile.nodes.add(node="a")
    profile.nodes.add(node="b", seconds=-1.0)
    with pytest.raises(WireError, match=r"^Profile\.nodes\[1\]\.seconds: -1\.0 is not a valid amount"):
        profile_from_proto(profile)


def test_a_span_reads_as_it_was_written() -> None:
    span = Span(kind="call", name="a", to="ps0", start_s=0.25, end_s=0.5)
    converter = Converter(Span, jobs_pb2.Span)
    assert converter.read_at("Span", converter.write(span)) == span
