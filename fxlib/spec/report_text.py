"""A result as text for a person: the decision, the figures, one line per remote call and per pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fxlib.spec.report import CallReport, Estimate, PassReport, Report, Result

_TITLES = {"adopt": "ADOPT the rewritten module", "keep_original": "KEEP the original module"}


def render(result: Report) -> str:
    """Lay a result out in sections; those with nothing to say are left out."""
    sections = [
        _headline(result),
        _figures(result),
        _variants(result),
        _candidates(result),
        _calls(result),
        _undeclared(result),
        _passes(result),
        _diffs(result),
        _notes(result),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def seconds(value: float | None) -> str:
    """Write a duration with a unit that fits: 350 us, 12.5 ms, 1.20 s; a dash when it is not known."""
    if value is None:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Align rows in columns two spaces apart; `right` names the columns that hold figures."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def _headline(result: Report) -> list[str]:
    lines = [f"{_TITLES[result.decision]}: {result.explanation}"]
    if isinstance(result, Result) and result.job_id:
        lines.append(f"job {result.job_id}{', answered from an earlier measurement' if result.cached else ''}")
    return lines


def _figures(result: Report) -> list[str]:
    rows = [
        [label, f"{figure.value:,.1f}", f"{figure.low:,.1f} to {figure.high:,.1f}"]
        for label, figure in (("original", result.qps_original), ("optimized", result.qps_optimized))
        if figure is not None
    ]
    if result.gain is not None:
        rows.append(["gain", *_percent(result.gain)])
    lines = table([["samples per second", "", "interval"], *rows], right=(1, 2), indent="") if rows else []
    return [*lines, *_step(result)]


def _step(result: Report) -> list[str]:
    """One line: the recorded step before and after, and the shortest that any schedule could have."""
    known = [
        (seconds(timeline.step_s), words)
        for timeline, words in ((result.timeline_original, "original"), (result.timeline_optimized, "optimized"))
        if timeline is not None
    ]
    if result.bound_s is not None:
        known.append((seconds(result.bound_s), "the least that any schedule could take, by the cost model"))
    return [f"one step: {', '.join(f'{took} {words}' for took, words in known)}"] if known else []


def interval(gain: Estimate | None) -> str:
    """Write a gain with the ends of its interval: +60.2% [+49.3%, +67.3%]; a dash when there is none."""
    return "-" if gain is None else f"{gain.value:+.1%} [{gain.low:+.1%}, {gain.high:+.1%}]"


def _percent(gain: Estimate) -> list[str]:
    return [f"{gain.value:+.1%}", f"{gain.low:+.1%} to {gain.high:+.1%}"]


def _variants(result: Report) -> list[str]:
    if not result.variants:
        return []
    rows = [
        [name, each.decision.replace("_", " "), *(_percent(each.gain) if each.gain else ("-", "")), each.explanation]
        for name, each in result.variants.items()
    ]
    header = ["variant", "decision", "gain", "interval", "why"]
    return ["variants of the step, each with a graph of its own", *table([header, *rows], right=(2,))]


def _candidates(result: Report) -> list[str]:
    if len(result.candidates) < 2:
        return []
    rows = [
        [each.name, seconds(each.predicted_step_s), _percent(each.gain)[0] if each.gain else "-", each.verdict]
        for each in result.candidates
    ]
    header = ["candidate", "predicted", "gain", "verdict"]
    return ["programs tried; predicted: a step by the cost model", *table([header, *rows], right=(1, 2))]


def _calls(result: Report) -> list[str]:
    if not result.calls:
        return []
    actions = Counter(call.action for call in result.calls)
    counted = ", ".join(f"{count} {action.replace('_', ' ')}" for action, count in actions.items())
    rows = [_call(call) for call in result.calls]
    header = ["call", "function", "to", "action", "exposed", "after", "why"]
    return [
        f"remote calls ({counted}); exposed: time per step that the trainer stood blocked",
        *table([header, *rows], right=(4, 5)),
    ]


def _call(call: CallReport) -> list[str]:
    why = call.reason.sentence(call.detail)
    return [
        call.node,
        call.function,
        call.to,
        call.action.replace("_", " "),
        seconds(call.exposed_before_s),
        seconds(call.exposed_after_s),
        "; ".join(filter(None, [f"{why} ({call.remedy})" if call.remedy else why, _limit(call)])),
    ]


def _undeclared(result: Report) -> list[str]:
    """Say what missing declarations are worth."""
    if not result.undeclared:
        return []
    return [
        "remote functions that declare nothing; what reads= would be worth by the cost model, if it is true of them",
        *(f"  {each}" for each in result.undeclared),
    ]


def _limit(call: CallReport) -> str:
    return f"still exposed: {call.limited_by.sentence(call.limit_detail)}" if call.limited_by else ""


def _passes(result: Report) -> list[str]:
    if not result.passes:
        return []
    rows = [[each.name, str(each.changes), seconds(each.seconds), _declined(each)] for each in result.passes]
    return ["passes", *table([["pass", "changes", "time", "declined"], *rows], right=(1, 2))]


def _declined(report: PassReport) -> str:
    if not report.declined:
        return "-"
    reasons = Counter(each.reason.name.lower() for each in report.declined)
    return ", ".join(f"{count} {name}" for name, count in reasons.most_common())


def _diffs(result: Report) -> list[str]:
    """What passes did to the generated code, where that was asked for."""
    shown = [each.diff for each in result.passes if each.diff]
    return ["what passes changed in the generated code", *shown] if shown else []


def _error(result: Report) -> str:
    error = result.max_relative_error
    return "" if error is None else f"; largest relative error measured: {error:.2g}"


def _notes(result: Report) -> list[str]:
    lines = []
    if result.preserves != "bitwise":
        lines.append(f"preserves: {result.preserves}, not bitwise{_error(result)}")
    lines += [f"on your word: {each}" for each in result.assumptions]
    lines += [f"not reproduced by the original itself, so not compared: {each}" for each in result.not_reproduced]
    lines += result.notes
    if result.blocks:
        lines.append(f"measured in {result.blocks} paired blocks")
    if result.hardware:
        version = f", torch {result.torch_version}" if result.torch_version else ""
        lines.append(f"measured on {result.hardware}{version}")
    if result.phase_seconds:
        longest_first = sorted(result.phase_seconds.items(), key=lambda phase: phase[1], reverse=True)
        lines.append("phases: " + ", ".join(f"{name} {seconds(took)}" for name, took in longest_first))
    return lines
