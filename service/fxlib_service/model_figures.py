"""The latest figures of each model, as measured in trials and as seen in training, for a bounded number of models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Final

from fxlib.v1 import jobs_pb2

OTHER: Final = "other"

Model = tuple[str, str]
"""A model's namespace and name."""

_KEPT_PER_SHOWN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the last answered job of a model measured. A figure is None where it was not measured.

    Attributes:
        qps_original: samples per second of the original.
        qps_optimized: samples per second of the rewritten module.
        gain: relative gain, with its confidence interval.
        adopted: whether the rewrite was adopted.
    """

    qps_original: float | None
    qps_optimized: float | None
    gain: jobs_pb2.Estimate | None
    adopted: bool

    @staticmethod
    def of(result: jobs_pb2.JobResult) -> Figures:
        """Read the figures from an answer."""
        return Figures(
            qps_original=result.qps_original.value if result.HasField("qps_original") else None,
            qps_optimized=result.qps_optimized.value if result.HasField("qps_optimized") else None,
            gain=result.gain if result.HasField("gain") else None,
            adopted=result.decision == jobs_pb2.DECISION_ADOPT,
        )


class ModelFigures:
    """Figures by namespace and name: the models answered most often have rows of their own, all others share one.

    Args:
        shown: number of models that have a row of their own.
    """

    def __init__(self, *, shown: int) -> None:
        self._shown = shown
        self._rows: dict[Model, tuple[int, Figures]] = {}
        self._live: dict[Model, jobs_pb2.LiveFigures] = {}
        self._recording = Lock()  # large results are counted on a thread

    def record(self, model: Model, figures: Figures) -> None:
        """Record the figures of an answer. When there are too many models, the one answered longest ago is dropped."""
        with self._recording:
            count, _ = self._rows.pop(model, (0, figures))
            self._rows[model] = count + 1, figures
            if len(self._rows) > self._shown * _KEPT_PER_SHOWN:
                del self._rows[next(iter(self._rows))]

    def record_live(self, model: Model, live: jobs_pb2.LiveFigures) -> None:
        """Record what a launcher that trains the model reports. The model reported longest ago is dropped first."""
        with self._recording:
            self._live.pop(model, None)
            self._live[model] = live
            if len(self._live) > self._shown * _KEPT_PER_SHOWN:
                del self._live[next(iter(self._live))]

    def live_rows(self) -> Iterator[tuple[Model, jobs_pb2.LiveFigures]]:
        """Yield the models reported last, as many as may have a row of their own."""
        with self._recording:
            rows = list(self._live.items())
        yield from rows[-self._shown :]

    def rows(self) -> Iterator[tuple[Model, Figures]]:
        """Yield models and figures; "other" has the figures of the latest answer to any model without its own row."""
        rows = list(self._rows.items())
        by_count = sorted(rows, key=lambda row: row[1][0], reverse=True)
        shown = {model for model, _ in by_count[: self._shown] if model != (OTHER, OTHER)}
        latest: Figures | None = None
        for model, (_, figures) in rows:
            if model in shown:
                yield model, figures
            else:
                latest = figures
        if latest is not None:
            yield (OTHER, OTHER), latest
