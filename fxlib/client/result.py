"""The answer to a launcher: what a worker found out, and the module that is ready to train."""

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
    """How `Result.watch` watches.

    Attributes:
        canary: share of the steps that the original runs, at most a half; 0 (the default): none, and no gain is seen.
        least_gain: the gain below which the job goes back to its original; by default, the one it asked for.
        group: a process group of `torch.distributed`, or "world", all of whose ranks watch the same steps: they
            switch at the same step, and rank 0 speaks for all. By default, this process is alone.
        every_s: seconds between two reports to the service; 30 by default.
    """

    canary: float
    least_gain: float
    group: Any
    every_s: float


class LiveWatch(Protocol):
    """Watches the steps of a training loop, by `Result.watch`; a `with` block of it closes it."""

    def step(self, samples: float | None = None) -> AbstractContextManager[None]:
        """Return a block for one whole step: forward, backward, pushes and optimizer.

        Args:
            samples: number of samples of the step; None: as many as a batch of the workload has.
        """

    @property
    def figures(self) -> LiveFigures:
        """What is known by now."""

    def close(self) -> None:
        """Report once more, and end; the module stays as it is."""

    def __enter__(self) -> Self:
        """Return the watch."""

    def __exit__(self, *_: object) -> None:
        """Close it."""


@dataclass(frozen=True, kw_only=True)
class Result(Report):
    """The answer to `client.optimize`, with a `module` that is ready to train.

    It is the rewritten one if `decision` is "adopt", else the original. Where variants of the workload are adopted, it
    runs their graphs for the calls that these fit, whatever `decision` says of the workload's own step.
    `reason` is None where the job never got an answer (no service, no time); `explanation` then says what happened.
    """

    module: nn.Module
    job_id: str = ""
    cached: bool = False
    watcher: Callable[[WatchOptions], LiveWatch] | None = field(default=None, repr=False, compare=False)
    """Makes what `watch` returns; None in a result that did not come from `optimize` or `submit`."""

    def watch(self, **options: Unpack[WatchOptions]) -> LiveWatch:
        """Measure the steps of the training loop, and report them to the service now and then.

        >>> with result.watch(canary=0.05) as live:
        ...     for batch in batches:
        ...         with live.step():
        ...             train_on(batch, result.module)

        With a `canary`, the original runs in place of the rewritten module for that share of the steps, in turns: the
        results are the same, and the gain is seen in the job itself. Where it falls below what was asked for, the
        original runs from then on, after a warning. Nothing that goes wrong with the service is raised.

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
        """Return all of it but the module as plain data, as `Report.to_dict` does."""
        return {**super().to_dict(), "job_id": self.job_id, "cached": self.cached}

    @override
    def __str__(self) -> str:
        """Lay everything out as plain text, for a person."""
        earlier = ", answered from an earlier measurement" if self.cached else ""
        return render(self, origin=f"job {self.job_id}{earlier}" if self.job_id else "")

    def _repr_html_(self) -> str:
        """Lay the decision, the figures, the calls and the step out for a notebook."""
        from fxlib.pages import fragment

        return fragment(self.to_dict())

    @classmethod
    def of(cls, report: Report, *, module: nn.Module, job_id: str, cached: bool) -> Result:
        """Join a worker's report with the module that it speaks of."""
        told = {each.name: getattr(report, each.name) for each in fields(Report)}
        return cls(**told, module=module, job_id=job_id, cached=cached)

    @classmethod
    def original(cls, module: nn.Module, explanation: str, *, job_id: str = "") -> Result:
        """Keep the original, because the service gave no answer."""
        return cls(module=module, decision="keep_original", reason=None, explanation=explanation, job_id=job_id)

    @property
    def usage(self) -> Usage:
        """How often each graph of `module` has run by now, and the original, and why."""
        state = self.module.__dict__.get("_fxlib")
        return Usage() if state is None else state.graphs.usage()

    @property
    def adopted(self) -> bool:
        """Whether `module` is a rewritten one, or runs a rewritten graph for some calls."""
        return self.adopts
