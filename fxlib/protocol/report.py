"""Reports (a result but for its module), to and from protobuf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import get_args

from fxlib.errors import WireError
from fxlib.protocol.bijection import Bijection
from fxlib.protocol.plain import amount, finite, plain, plain_lines
from fxlib.reasons import Declined, Reason
from fxlib.spec.job import Blob
from fxlib.spec.report import (
    Action,
    CallReport,
    CandidateReport,
    Decision,
    Estimate,
    PassReport,
    Report,
    Span,
    Timeline,
    Undeclared,
)
from fxlib.spec.trial import TrialOptions
from fxlib.v1 import graph_pb2, jobs_pb2

_DECISIONS = Bijection[Decision, "jobs_pb2.Decision"](
    {"adopt": jobs_pb2.DECISION_ADOPT, "keep_original": jobs_pb2.DECISION_KEEP_ORIGINAL}
)

_SLACK = 1e-5
"""How exactly the ends of a gain's interval are computed."""

_DIFFS_CHARACTERS = 1 << 20
"""Of all diffs together: an answer is one message, which may have 8 MiB."""


def report_to_proto(
    report: Report, *, graph: Blob | None = None, variant_graphs: Mapping[str, Blob] | None = None
) -> jobs_pb2.JobResult:
    """Write a report; `graph` is the address of the rewritten graph, if there is one, as are those of variants."""
    proto = jobs_pb2.JobResult(
        decision=_DECISIONS.there(report.decision),
        reason_code=report.reason.name if report.reason else "",
        reason=report.explanation,
        calls=[_call_to_proto(each) for each in report.calls],
        passes=_passes_to_proto(report.passes),
        not_reproduced=report.not_reproduced,
        notes=report.notes,
        preserves=report.preserves,
        max_relative_error=report.max_relative_error,
        assumptions=report.assumptions,
        blocks=report.blocks,
        hardware=report.hardware,
        torch_version=report.torch_version,
        phase_seconds=report.phase_seconds,
        bound_s=report.bound_s,
        candidates=[_candidate_to_proto(each) for each in report.candidates],
        undeclared=[_undeclared_to_proto(each) for each in report.undeclared],
        variants=[
            jobs_pb2.VariantResult(name=name, result=report_to_proto(each, graph=(variant_graphs or {}).get(name)))
            for name, each in report.variants.items()
        ],
    )
    if graph is not None:
        proto.graph.CopyFrom(blob_to_proto(graph))
    for name in ("qps_original", "qps_optimized", "gain"):
        if (estimate := getattr(report, name)) is not None:
            getattr(proto, name).CopyFrom(_estimate_to_proto(estimate))
    for name in ("timeline_original", "timeline_optimized", "timeline_bound"):
        if (timeline := getattr(report, name)) is not None:
            getattr(proto, name).CopyFrom(_timeline_to_proto(timeline))
    return proto


def report_from_proto(proto: jobs_pb2.JobResult) -> Report:
    """Read a report; text in it becomes plain.

    Raises:
        WireError: there is no decision, a call's action is unknown, or a figure is none.
    """
    return Report(
        decision=_DECISIONS.back(proto.decision, "JobResult.decision"),
        reason=_reason(proto.reason_code),
        explanation=plain(proto.reason),
        qps_original=_rate(proto.qps_original, "qps_original") if proto.HasField("qps_original") else None,
        qps_optimized=_rate(proto.qps_optimized, "qps_optimized") if proto.HasField("qps_optimized") else None,
        gain=_gain(proto.gain, "JobResult.gain") if proto.HasField("gain") else None,
        calls=tuple(_call_from_proto(each) for each in proto.calls),
        passes=tuple(_pass_from_proto(each) for each in proto.passes),
        not_reproduced=tuple(map(plain, proto.not_reproduced)),
        notes=tuple(map(plain, proto.notes)),
        preserves=plain(proto.preserves),
        max_relative_error=_optional(proto, "max_relative_error"),
        assumptions=tuple(map(plain, proto.assumptions)),
        timeline_original=_timeline(proto, "timeline_original"),
        timeline_optimized=_timeline(proto, "timeline_optimized"),
        timeline_bound=_timeline(proto, "timeline_bound"),
        bound_s=_optional(proto, "bound_s"),
        candidates=tuple(_candidate_from_proto(each) for each in proto.candidates),
        undeclared=tuple(map(_undeclared_from_proto, proto.undeclared)),
        blocks=proto.blocks,
        phase_seconds={
            plain(name): amount(seconds, "JobResult.phase_seconds") for name, seconds in proto.phase_seconds.items()
        },
        hardware=plain(proto.hardware),
        torch_version=plain(proto.torch_version),
        variants={plain(each.name): _variant(each) for each in proto.variants},
    )


def variant_graphs_of(proto: jobs_pb2.JobResult) -> dict[str, Blob]:
    """Return the addresses of the rewritten graphs of variants, by name."""
    return {
        plain(each.name): blob_from_proto(each.result.graph) for each in proto.variants if each.result.HasField("graph")
    }


def _variant(proto: jobs_pb2.VariantResult) -> Report:
    if proto.result.variants:
        raise WireError("a variant has variants", where="JobResult.variants")
    return report_from_proto(proto.result)


def check_adoption(report: Report, options: TrialOptions) -> None:
    """Check that a report which says "adopt", or that of a variant, shows what was asked for.

    Raises:
        WireError: there is no gain, or its interval reaches below the least gain or is open; or results are not the
            same bits, and their error was not measured, or is above the bound.
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
    return graph_pb2.BlobRef(sha256=blob.sha256, size=blob.size)


def blob_from_proto(proto: graph_pb2.BlobRef) -> Blob:
    """Read a blob's address."""
    return Blob(sha256=proto.sha256, size=proto.size)


def _optional(proto: jobs_pb2.JobResult, name: str) -> float | None:
    return amount(getattr(proto, name), f"JobResult.{name}") if proto.HasField(name) else None


def _reason(code: str) -> Reason | None:
    return (Reason[code] if code in Reason.__members__ else Reason.OTHER) if code else None


def _known(code: str, detail: str, sentence: str) -> tuple[Reason, str]:
    """Return reason and detail; those of a newer version keep their sentence."""
    return (Reason[code], detail) if code in Reason.__members__ else (Reason.OTHER, sentence)


def _estimate_to_proto(estimate: Estimate) -> jobs_pb2.Estimate:
    return jobs_pb2.Estimate(value=estimate.value, low=estimate.low, high=estimate.high)


def _rate(proto: jobs_pb2.Estimate, name: str) -> Estimate:
    low, value, high = (amount(each, f"JobResult.{name}") for each in (proto.low, proto.value, proto.high))
    return Estimate(value=value, low=low, high=high)


def _gain(proto: jobs_pb2.Estimate, where: str) -> Estimate:
    """Read a gain; its interval may be open upwards, where the trial ruled no gain out."""
    low, value = finite(proto.low, where), finite(proto.value, where)
    if not low <= value <= proto.high:
        raise WireError(f"{value} is not within {low} to {proto.high}", where=where)
    return Estimate(value=value, low=low, high=proto.high)


def _call_to_proto(call: CallReport) -> jobs_pb2.CallReport:
    return jobs_pb2.CallReport(
        node=call.node,
        function=call.function,
        to=call.to,
        action=call.action,
        reason_code=call.reason.name,
        reason=call.reason.sentence(call.detail),
        detail=call.detail,
        remedy=call.remedy,
        source=call.source,
        exposed_before_s=call.exposed_before_s,
        exposed_after_s=call.exposed_after_s,
        limited_by_code=call.limited_by.name if call.limited_by else "",
        limited_by=call.limited_by.sentence(call.limit_detail) if call.limited_by else "",
        limit_detail=call.limit_detail,
    )


def _call_from_proto(proto: jobs_pb2.CallReport) -> CallReport:
    reason, detail = _known(proto.reason_code, proto.detail, proto.reason)
    limited_by, limit_detail = None, proto.limit_detail
    if proto.limited_by_code:
        limited_by, limit_detail = _known(proto.limited_by_code, proto.limit_detail, proto.limited_by)
    where = "JobResult.calls"
    return CallReport(
        node=plain(proto.node),
        function=plain(proto.function),
        to=plain(proto.to),
        action=_action(proto.action, proto.node),
        reason=reason,
        detail=plain(detail),
        remedy=plain(proto.remedy),
        source=plain(proto.source),
        exposed_before_s=amount(proto.exposed_before_s, where) if proto.HasField("exposed_before_s") else None,
        exposed_after_s=amount(proto.exposed_after_s, where) if proto.HasField("exposed_after_s") else None,
        limited_by=limited_by,
        limit_detail=plain(limit_detail),
    )


def _candidate_to_proto(candidate: CandidateReport) -> jobs_pb2.Candidate:
    proto = jobs_pb2.Candidate(
        name=candidate.name, predicted_step_s=candidate.predicted_step_s, verdict=candidate.verdict
    )
    if candidate.gain is not None:
        proto.gain.CopyFrom(_estimate_to_proto(candidate.gain))
    return proto


def _candidate_from_proto(proto: jobs_pb2.Candidate) -> CandidateReport:
    where = "JobResult.candidates"
    return CandidateReport(
        name=plain(proto.name),
        predicted_step_s=amount(proto.predicted_step_s, where) if proto.HasField("predicted_step_s") else None,
        gain=_gain(proto.gain, where) if proto.HasField("gain") else None,
        verdict=plain(proto.verdict),
    )


def _undeclared_to_proto(each: Undeclared) -> jobs_pb2.Undeclared:
    return jobs_pb2.Undeclared(
        functions=each.functions, calls=each.calls, gain=each.gain, remedy=each.remedy, measured=each.measured
    )


def _undeclared_from_proto(proto: jobs_pb2.Undeclared) -> Undeclared:
    where = "JobResult.undeclared"
    if not proto.functions:
        raise WireError("names no function", where=where)
    return Undeclared(
        functions=tuple(map(plain, proto.functions)),
        calls=proto.calls,
        gain=finite(proto.gain, where),
        remedy=plain(proto.remedy),
        measured=proto.measured,
    )


def _action(text: str, node: str) -> Action:
    for action in get_args(Action):
        if action == text:
            return action
    raise WireError(f"{text[:80]!r} is no action", where=f"JobResult.calls[{node[:80]!r}].action")


def _passes_to_proto(reports: Iterable[PassReport]) -> Iterator[jobs_pb2.PassReport]:
    """Write what passes did, and their diffs as far as all of them fit into the message."""
    left = _DIFFS_CHARACTERS
    for each in reports:
        fits = len(each.diff) <= left
        left -= len(each.diff) if fits else 0
        yield _pass_to_proto(each if fits else replace(each, diff=_TOO_MUCH))


_TOO_MUCH = f"... left out: the diffs of this answer have more than {_DIFFS_CHARACTERS:,} characters"


def _pass_to_proto(report: PassReport) -> jobs_pb2.PassReport:
    declined = [
        jobs_pb2.Declined(
            node=each.node,
            reason_code=each.reason.name,
            reason=each.reason.sentence(each.detail),
            detail=each.detail,
            remedy=each.remedy,
        )
        for each in report.declined
    ]
    return jobs_pb2.PassReport(
        name=report.name, changes=report.changes, seconds=report.seconds, declined=declined, diff=report.diff
    )


def _pass_from_proto(proto: jobs_pb2.PassReport) -> PassReport:
    declined = []
    for each in proto.declined:
        reason, detail = _known(each.reason_code, each.detail, each.reason)
        declined.append(Declined(node=plain(each.node), reason=reason, detail=plain(detail), remedy=plain(each.remedy)))
    seconds = amount(proto.seconds, "JobResult.passes")
    return PassReport(
        name=plain(proto.name),
        changes=proto.changes,
        seconds=seconds,
        declined=tuple(declined),
        diff=plain_lines(proto.diff),
    )


def _timeline_to_proto(timeline: Timeline) -> jobs_pb2.Timeline:
    spans = [
        jobs_pb2.Span(kind=span.kind, name=span.name, to=span.to, start_s=span.start_s, end_s=span.end_s)
        for span in timeline.spans
    ]
    return jobs_pb2.Timeline(spans=spans, step_s=timeline.step_s)


def _timeline(result: jobs_pb2.JobResult, name: str) -> Timeline | None:
    if not result.HasField(name):
        return None
    proto: jobs_pb2.Timeline = getattr(result, name)
    where = f"JobResult.{name}"
    spans = tuple(
        Span(
            kind=plain(each.kind),
            name=plain(each.name),
            to=plain(each.to),
            start_s=finite(each.start_s, where),
            end_s=finite(each.end_s, where),
        )
        for each in proto.spans
    )
    return Timeline(spans=spans, step_s=amount(proto.step_s, where))
