"""Reports (a result without its module), to and from protobuf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from fxlib.errors import WireError
from fxlib.protocol.converter import Bijection, Converter, FieldRule, each_by, finite
from fxlib.reasons import Declined, Reason
from fxlib.spec.job import Blob, TrialOptions
from fxlib.spec.report import (
    MAX_TIMELINE_STEPS,
    Action,
    CallReport,
    CandidateReport,
    CompiledPart,
    Decision,
    Estimate,
    PassReport,
    Report,
    Sensitivity,
    Span,
    Timeline,
    Undeclared,
)
from fxlib.utils.text import plain, plain_lines
from fxlib.v1 import graph_pb2, jobs_pb2
from fxlib.wire.faults import Fault

_DECISIONS = Bijection[Decision, "jobs_pb2.Decision"](
    {"adopt": jobs_pb2.DECISION_ADOPT, "keep_original": jobs_pb2.DECISION_KEEP_ORIGINAL}
)

_SLACK = 1e-5
"""Tolerance for the computed ends of a gain's interval."""

_DIFFS_CHARACTERS = 1 << 20
"""Maximum number of characters of all diffs together: an answer is one message, which may have 8 MiB."""


def report_to_proto(
    report: Report, *, graph: Blob | None = None, variant_graphs: Mapping[str, Blob] | None = None
) -> jobs_pb2.JobResult:
    """Write a report; `graph` and `variant_graphs` are the addresses of the rewritten graphs, if there are any."""
    proto = _REPORT.write(report)
    if graph is not None:
        proto.graph.CopyFrom(blob_to_proto(graph))
    for name, each in report.variants.items():
        proto.variants.add(name=name, result=report_to_proto(each, graph=(variant_graphs or {}).get(name)))
    return proto


def report_from_proto(proto: jobs_pb2.JobResult) -> Report:
    """Read a report; text in it becomes plain.

    Raises:
        WireError: there is no decision, a call's action is unknown, or a figure is not valid.
    """
    return _REPORT.read_at("JobResult", proto)


def variant_graphs_of(proto: jobs_pb2.JobResult) -> dict[str, Blob]:
    """Return the addresses of the rewritten graphs of variants, by name."""
    return {
        plain(each.name): blob_from_proto(each.result.graph) for each in proto.variants if each.result.HasField("graph")
    }


def check_adoption(report: Report, options: TrialOptions) -> None:
    """Check that a report that says "adopt", or the report of a variant, shows what the options require.

    Raises:
        WireError: there is no gain, or its interval reaches below the least gain or is open; or the results differ in
            bits, and their error was not measured, or is above the bound.
    """
    for each in report.variants.values():
        check_adoption(each, options)
    if report.decision != "adopt":
        return
    gain, least = report.gain, options.min_gain
    if not (gain and gain.low > least - _SLACK and math.isfinite(gain.high)):
        raise WireError(f"adopts without a gain above {least:.1%}", where="JobResult.gain")
    error, bound = report.max_relative_error, options.max_relative_error
    if report.preserves != "bitwise" and (error is None or error > bound):
        where = "JobResult.max_relative_error"
        raise WireError(f"adopts without a relative error of at most {bound:g}", where=where)


def blob_to_proto(blob: Blob) -> graph_pb2.BlobRef:
    """Write a blob's address."""
    return _BLOB.write(blob)


def blob_from_proto(proto: graph_pb2.BlobRef) -> Blob:
    """Read a blob's address."""
    return _BLOB.read(proto)


def _reason(code: str) -> Reason | None:
    return (Reason[code] if code in Reason.__members__ else Reason.OTHER) if code else None


def _known(code: str, detail: str, sentence: str) -> tuple[Reason, str]:
    """Return reason and detail; the reason of a newer version keeps its sentence."""
    return (Reason[code], plain(detail)) if code in Reason.__members__ else (Reason.OTHER, plain(sentence))


def _gain(proto: jobs_pb2.Estimate) -> Estimate:
    """Read a gain; its interval may be open upwards if the trial ruled no gain out."""
    low, value = finite(proto.low), finite(proto.value)
    if not low <= value <= proto.high:
        raise Fault(f"{value} is not within {low} to {proto.high}")
    return Estimate(value=value, low=low, high=proto.high)


def _error(value: float) -> float:
    """Read a relative error, which is infinite where a result is NaN."""
    if not value >= 0.0:
        raise Fault(f"{value} is not an error")
    return value


def _action(text: str) -> Action:
    for action in get_args(Action):
        if action == text:
            return action
    raise Fault(f"{text[:80]!r} is not an action")


def _steps(count: int) -> int:
    if not 0 <= count <= MAX_TIMELINE_STEPS:
        raise Fault(f"{count} is not a number of steps")
    return count or 1


def _functions(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise Fault("names no function")
    return tuple(map(plain, names))


def _why_to_proto(why: CallReport | Declined) -> dict[str, str]:
    return {"reason_code": why.reason.name, "reason": why.reason.sentence(why.detail), "detail": why.detail}


def _why_from_proto(proto: jobs_pb2.CallReport | jobs_pb2.Declined) -> dict[str, object]:
    reason, detail = _known(proto.reason_code, proto.detail, proto.reason)
    return {"reason": reason, "detail": detail}


def _limits_to_proto(call: CallReport) -> dict[str, str]:
    fields = _why_to_proto(call)
    fields["limit_detail"] = call.limit_detail
    if call.limited_by is not None:
        fields["limited_by_code"] = call.limited_by.name
        fields["limited_by"] = call.limited_by.sentence(call.limit_detail)
    fields["ahead_detail"] = call.ahead_detail
    if call.ahead is not None:
        fields["ahead_code"] = call.ahead.name
        fields["ahead"] = call.ahead.sentence(call.ahead_detail)
    return fields


def _limits_from_proto(proto: jobs_pb2.CallReport) -> dict[str, object]:
    limited_by, limit_detail = None, plain(proto.limit_detail)
    if proto.limited_by_code:
        limited_by, limit_detail = _known(proto.limited_by_code, proto.limit_detail, proto.limited_by)
    ahead, ahead_detail = None, plain(proto.ahead_detail)
    if proto.ahead_code:
        ahead, ahead_detail = _known(proto.ahead_code, proto.ahead_detail, proto.ahead)
    more = {"limited_by": limited_by, "limit_detail": limit_detail, "ahead": ahead, "ahead_detail": ahead_detail}
    return _why_from_proto(proto) | more


def _passes_to_proto(reports: Iterable[PassReport]) -> Iterator[jobs_pb2.PassReport]:
    """Write what passes did, and their diffs as far as all of them fit into the message."""
    left = _DIFFS_CHARACTERS
    for each in reports:
        fits = len(each.diff) <= left
        left -= len(each.diff) if fits else 0
        yield _PASS.write(each if fits else replace(each, diff=_TOO_MUCH))


def _variants(proto: jobs_pb2.JobResult) -> dict[str, Report]:
    if any(each.result.variants for each in proto.variants):
        raise Fault("a variant has variants")
    return {plain(each.name): _REPORT.read(each.result) for each in proto.variants}


_TOO_MUCH = f"... left out: the diffs of this answer have more than {_DIFFS_CHARACTERS:,} characters"

_ESTIMATE = Converter(Estimate, jobs_pb2.Estimate)
_BLOB = Converter(Blob, graph_pb2.BlobRef, text=None)
GAIN = FieldRule(_ESTIMATE.write, _gain)
"""The rule of a field that holds a gain."""
_CALL = Converter(
    CallReport,
    jobs_pb2.CallReport,
    rules={"action": FieldRule(read=_action)},
    left_out=(
        "reason_code",
        "reason",
        "detail",
        "limited_by_code",
        "limited_by",
        "limit_detail",
        "ahead_code",
        "ahead",
        "ahead_detail",
    ),
    write_more=_limits_to_proto,
    read_more=_limits_from_proto,
)
_DECLINED = Converter(
    Declined,
    jobs_pb2.Declined,
    left_out=("reason_code", "reason", "detail"),
    write_more=_why_to_proto,
    read_more=_why_from_proto,
)
_SENSITIVITY = Converter(Sensitivity, jobs_pb2.Sensitivity, rules={"error": FieldRule(read=_error)})
_PASS = Converter(
    PassReport,
    jobs_pb2.PassReport,
    rules={"declined": _DECLINED.many, "diff": FieldRule(read=plain_lines), "sensitivity": _SENSITIVITY.many},
)
_CANDIDATE = Converter(CandidateReport, jobs_pb2.Candidate, rules={"gain": GAIN})
_PART = Converter(CompiledPart, jobs_pb2.CompiledPart)
_UNDECLARED = Converter(Undeclared, jobs_pb2.Undeclared, number=finite, rules={"functions": FieldRule(read=_functions)})
_SPAN = Converter(Span, jobs_pb2.Span, number=finite)
_TIMELINE = Converter(Timeline, jobs_pb2.Timeline, rules={"spans": _SPAN.many, "steps": FieldRule(read=_steps)})
_REPORT = Converter(
    Report,
    jobs_pb2.JobResult,
    rules={
        "decision": _DECISIONS.rule,
        "qps_original": _ESTIMATE.one,
        "qps_optimized": _ESTIMATE.one,
        "gain": GAIN,
        "calls": _CALL.many,
        "passes": FieldRule(_passes_to_proto, each_by(_PASS.read)),
        "timeline_original": _TIMELINE.one,
        "timeline_optimized": _TIMELINE.one,
        "timeline_bound": _TIMELINE.one,
        "candidates": _CANDIDATE.many,
        "parts": _PART.many,
        "undeclared": _UNDECLARED.many,
    },
    left_out=("reason_code", "reason", "explanation", "graph", "variants"),
    write_more=lambda report: {
        "reason_code": report.reason.name if report.reason else "",
        "reason": report.explanation,
    },
    read_more=lambda proto: {
        "reason": _reason(proto.reason_code),
        "explanation": plain(proto.reason),
        "variants": _variants(proto),
    },
)
