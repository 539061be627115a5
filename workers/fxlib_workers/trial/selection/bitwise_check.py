"""Whether a candidate does, bit for bit, what the original does, as far as the original does so itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fxlib_workers.exchange.candidate import ORIGINAL, Arm
from fxlib_workers.trial.servers import UNKNOWN
from fxlib_workers.trial.trainer import Trace

RunArm = Callable[[Arm], Sequence[Trace]]
"""Brings everything back to where it began, runs the steps of an arm, and returns what each left behind."""

Difference = tuple[int, str]
"""A step, from 0, and what differs after it."""

_CANDIDATE_RUNS: Final = 2
_ORIGINAL_AGAIN: Final = 2


class Sameness:
    """The original's own traces, which it leaves behind twice at the start, as the measure of every candidate.

    What differs between runs of the original is left out, step by step, and named. Where a candidate differs, the
    original gets more chances to differ there, too: what it reproduces only now and then is no measure of a candidate.

    Args:
        run: runs an arm.
    """

    def __init__(self, run: RunArm) -> None:
        self._run = run
        self._reference = run(ORIGINAL)
        self._unsteady = _differences(self._reference, run(ORIGINAL)) | _untold(self._reference)

    @property
    def not_reproduced(self) -> tuple[str, ...]:
        """What could not be compared: the original does not do so itself."""
        return _name(self._unsteady)

    def leave_out(self, differences: Iterable[Difference]) -> None:
        """Compare this no more: it is no fault of a candidate's."""
        self._unsteady |= set(differences)

    def difference(self, candidate: Arm) -> frozenset[Difference]:
        """Run a candidate twice, unless the first run tells already, and return what differs."""
        for _ in range(_CANDIDATE_RUNS):
            found = _differences(self._reference, self._run(candidate)) - self._unsteady
            for _ in range(_ORIGINAL_AGAIN if found else 0):
                self._unsteady |= _differences(self._reference, self._run(ORIGINAL))
            if found - self._unsteady:
                return frozenset(found - self._unsteady)
        return frozenset()


def _differences(one: Sequence[Trace], other: Sequence[Trace]) -> set[Difference]:
    return {
        (step, name)
        for step, (before, after) in enumerate(zip(one, other, strict=True))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


def _untold(traces: Sequence[Trace]) -> set[Difference]:
    return {(step, name) for step, trace in enumerate(traces) for name, digest in trace.items() if digest == UNKNOWN}


def describe(differences: Iterable[Difference]) -> str:
    """Say in words what differs, and after which step it first does; nothing, if nothing does."""
    if not (differences := set(differences)):
        return ""
    first = min(step for step, _ in differences)
    names = sorted(name for step, name in differences if step == first)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"after step {first + 1}: {', '.join(names[:3])}{more}"


def _name(unsteady: Iterable[Difference]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for step, name in sorted(unsteady):
        first.setdefault(name, step)
    return tuple(f"{name} (from step {step + 1} on)" for name, step in first.items())
