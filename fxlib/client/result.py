"""Represent the answer to a launcher: a worker's report, and the module that is ready to train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self, TypedDict

from torch import nn
from typing_extensions import Unpack, override

from fxlib.errors import FxlibError
from fxlib.spec.report import LiveFigures, Report, Usage, render


class WatchOptions(TypedDict, total=False):
    """The options of `Result.watch`.

    Attributes:
        canary: share of the steps that the original runs, at most a half; 0 (the default): none, and no gain is shown.
        least_gain: the gain below which the job goes back to its original; by default, the one it asked for.
        group: a process group of `torch.distributed`, or "world", all of whose ranks watch the same steps: they
            switch at the same step, and rank 0 reports for all. By default, this process is alone.
        every_s: seconds between two reports to the service; 30 by default.
    """

    canary: float
    least_gain: float
    group: Any
    every_s: float


class LiveWatch(Protocol):
    """Watches the steps of a training loop for `Result.watch`; as a context manager, it closes itself."""

    def step(self, samples: float | None = None) -> AbstractContextManager[None]:
        """Return a context manager for one whole step: forward, backward, pushes and optimizer.

        Args:
            samples: number of samples in the step; None: as many as in a batch of the workload.
        """

    @property
    def figures(self) -> LiveFigures:
        """The live figures so far."""

    def close(self) -> None:
        """Report once more, and stop watching; the module stays as it is."""

    def __enter__(self) -> Self:
        """Return the watch."""

    def __exit__(self, *_: object) -> None:
        """Close the watch."""


@dataclass(frozen=True, kw_only=True)
class Result(Report):
    """The answer to `client.optimize`, with a `module` that is ready to train.

    The module is the rewritten one if `decision` is "adopt", else the original. If variants of the workload are
    adopted, it runs their graphs for the calls that they fit, whatever `decision` says about the workload's own step.
    `reason` is None if the job never got an answer (no service, no time); `explanation` then says what happened.
    """

    module: nn.Module
    job_id: str = ""
    cached: bool = False
    watcher: Callable[[WatchOptions], LiveWatch] | None = field(default=None, repr=False, compare=False)
    """The function that makes the watch; None in a result that did not come from `optimize` or `submit`."""

    def watch(self, **options: Unpack[WatchOptions]) -> LiveWatch:
        """Measure the steps of the training loop, and report them to the service from time to time.

        >>> with result.watch(canary=0.05) as live:
        ...     for batch in batches:
        ...         with live.step():
        ...             train_on(batch, result.module)

        With a `canary`, the original runs instead of the rewritten module for that share of the steps, in turns: the
        results are the same, and the gain is measured in the job itself. If it falls below the least gain, the original
        runs from then on, after a warning. No error of the service is raised.

        Args:
            **options: see `WatchOptions`.

        Raises:
            WorkloadError: the options make no sense, or there is no such group.
            FxlibError: the result did not come from `Client.optimize` or `Client.submit`.
        """
        if self.watcher is None:
            hint = "Take the result of client.optimize, or of client.submit."
            raise FxlibError("the result knows no service to tell of its steps", where="Result.watch", hint=hint)
        return self.watcher(options)

    @override
    def to_dict(self) -> dict[str, Any]:
        """Return everything but the module as plain data, as `Report.to_dict` does."""
        return {**super().to_dict(), "job_id": self.job_id, "cached": self.cached}

    @override
    def __str__(self) -> str:
        """Return everything as readable plain text."""
        earlier = ", answered from an earlier measurement" if self.cached else ""
        return render(self, origin=f"job {self.job_id}{earlier}" if self.job_id else "")

    def _repr_html_(self) -> str:
        """Return the decision, the figures, the calls and the step as HTML for a notebook."""
        from fxlib.pages import fragment

        return fragment(self.to_dict())

    @classmethod
    def of(cls, report: Report, *, module: nn.Module, job_id: str, cached: bool) -> Result:
        """Join a worker's report with the module that it describes."""
        values = {each.name: getattr(report, each.name) for each in fields(Report)}
        return cls(**values, module=module, job_id=job_id, cached=cached)

    @classmethod
    def original(cls, module: nn.Module, explanation: str, *, job_id: str = "") -> Result:
        """Keep the original, because the service gave no answer."""
        return cls(module=module, decision="keep_original", reason=None, explanation=explanation, job_id=job_id)

    @property
    def usage(self) -> Usage:
        """The number of runs so far of each graph of `module` and of the original, with reasons."""
        state = self.module.__dict__.get("_fxlib")
        return Usage() if state is None else state.graphs.usage()

    @property
    def adopted(self) -> bool:
        """Whether `module` is a rewritten one, or runs a rewritten graph for some calls."""
        return self.adopts
