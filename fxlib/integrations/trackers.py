"""The parts of a result that an experiment tracker takes: numbers by name, and words by name.

MLflow, Weights & Biases and TensorBoard accept these names and values; none of them is needed here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from fxlib.client.result import Result
from fxlib.spec.report import Estimate, LiveFigures, Report
from fxlib.utils.text import plain

_NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9_. -]")
_LONGEST = 500


def metrics_of(result: Result) -> dict[str, float]:
    """Return the numbers of a result: `fxlib/gain` and its interval, rates, seconds of a step, calls, and phases.

    Figures that were not measured are left out; variants of the step have theirs under `fxlib/variant/NAME/`.
    """
    return _finite(_metrics(result, "fxlib/"))


def live_metrics_of(live: LiveFigures) -> dict[str, float]:
    """Return a job's figures from its own steps, `result.watch().figures`, as numbers: `fxlib/live/gain` and so on."""
    rates = {"qps_original": live.qps_original, "qps_optimized": live.qps_optimized}
    figures = [(f"fxlib/live/{name}", value) for name, value in rates.items() if value is not None]
    return _finite(
        [*figures, *_estimate("fxlib/live/gain", live.gain), ("fxlib/live/went_back", float(live.went_back))]
    )


def params_of(result: Result) -> dict[str, str]:
    """Return the words of a result: decision, reason and explanation, job, hardware, versions."""
    words = {
        "decision": result.decision,
        "reason": "" if result.reason is None else result.reason.name,
        "explanation": result.explanation,
        "job_id": result.job_id,
        "cached": str(result.cached).lower(),
        "preserves": result.preserves,
        "pipeline": str(result.pipeline),
        "stale": str(result.stale),
        "hardware": result.hardware,
        "torch_version": result.torch_version,
    }
    return {f"fxlib/{name}": plain(value)[:_LONGEST] for name, value in words.items() if value}


def _metrics(report: Report, prefix: str) -> Iterator[tuple[str, float]]:
    yield f"{prefix}adopted", float(report.decision == "adopt")
    for name in ("gain", "qps_original", "qps_optimized"):
        yield from _estimate(f"{prefix}{name}", getattr(report, name))
    for name in ("original", "optimized"):
        if (timeline := getattr(report, f"timeline_{name}")) is not None:
            yield f"{prefix}step_s_{name}", timeline.step_s
    for name in ("bound_s", "max_relative_error"):
        if (value := getattr(report, name)) is not None:
            yield f"{prefix}{name}", value
    for action, count in Counter(call.action for call in report.calls).items():
        yield f"{prefix}calls_{action}", count
    for when in ("before", "after"):
        exposed = [each for call in report.calls if (each := getattr(call, f"exposed_{when}_s")) is not None]
        if exposed:
            yield f"{prefix}exposed_{when}_s", sum(exposed)
    for phase, seconds in report.phase_seconds.items():
        yield f"{prefix}phase/{_name(phase)}_s", seconds
    for variant, each in report.variants.items():
        yield from _metrics(each, f"{prefix}variant/{_name(variant)}/")


def _estimate(name: str, estimate: Estimate | None) -> Iterator[tuple[str, float]]:
    if estimate is not None:
        yield from ((name, estimate.value), (f"{name}_low", estimate.low), (f"{name}_high", estimate.high))


def _finite(figures: Iterator[tuple[str, float]] | list[tuple[str, float]]) -> dict[str, float]:
    return {name: float(value) for name, value in figures if math.isfinite(value)}


def _name(text: str) -> str:
    return _NOT_OF_A_NAME.sub("_", text)
