"""The one format that all benchmarks speak: a row per measurement, with its bootstrap interval."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

Case = Mapping[str, str | int | float]
RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement of one arm in one case; `low` and `high` are the ends of a 95% bootstrap interval.

    `runs` is the number of samples behind it, None where an old run did not keep it.
    """

    benchmark: str
    case: Case
    arm: str
    metric: str
    value: float
    unit: str
    low: float
    high: float
    runs: int | None


def row(*, benchmark: str, case: Case, arm: str, metric: str, unit: str, samples: Sequence[float]) -> Row:
    """Summarize the blocks of one arm by their median."""
    value, low, high = median_interval(samples)
    return Row(
        benchmark=benchmark, case=case, arm=arm, metric=metric, value=value, unit=unit, low=low, high=high,
        runs=len(samples),
    )  # fmt: skip


def median_interval(samples: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float, float]:
    """Median of the samples and the percentile bootstrap interval of that median.

    Source: B. Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7(1), 1979.
    """
    values = np.asarray(samples, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return float(np.median(values)), float(low), float(high)


def ratio_interval(
    above: Sequence[float], below: Sequence[float], *, level: float = 0.95
) -> tuple[float, float, float]:
    """Median of the ratios of paired blocks, and its bootstrap interval."""
    return median_interval([a / b for a, b in zip(above, below, strict=True)], level=level)


Measure = Callable[[bool], Sequence[Row]]
"""A function that measures, and returns the rows; its argument says whether it is to end within a minute."""


def main(
    name: str,
    measure: Measure | Mapping[str, Measure],
    *,
    about: str,
    summary: Callable[[Sequence[Row]], Sequence[Row]] = lambda _: (),
    quick: Sequence[str] = (),
) -> None:
    """Run one benchmark from the command line: print its rows, and write them to `--json FILE`.

    A benchmark that is given as a mapping has parts, by name, which may be run one at a time. `summary` returns what
    all rows say together; `quick` names the parts that a quick run has, if that is not all.
    """
    parts = measure if isinstance(measure, Mapping) else {"": measure}
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, as one JSON list")
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.set_defaults(parts=[])
    if isinstance(measure, Mapping):
        told = f"of {', '.join(parts)}; all, if none is given"
        parser.add_argument("parts", nargs="*", metavar="PART", help=told)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    chosen = options.parts or (quick if options.quick and quick else parts)
    rows = [each for part in chosen for each in parts[part](options.quick)]
    rows += summary(rows)
    for each in rows:
        print(line(each))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")


def line(measured: Row) -> str:
    """Return one row for a person."""
    case = " ".join(f"{key}={value}" for key, value in measured.case.items())
    interval = f"[{measured.low:.6g}, {measured.high:.6g}]"
    return f"{case:<48} {measured.arm:<12} {measured.metric} {measured.value:.6g} {interval} {measured.unit}"
