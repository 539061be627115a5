"""Whether a candidate leaves the same bits behind as the original, as far as the original reproduces its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fxlib_workers.exchange.candidate import ORIGINAL, Arm
from fxlib_workers.trial.servers import UNKNOWN
from fxlib_workers.trial.trainer import StepDigests

RunArm = Callable[[Arm], Sequence[StepDigests]]
"""A function that resets everything, runs the steps of an arm, and returns the digests after each step."""

Difference = tuple[int, str]
"""A step, from 0, and the name of what differs after it."""

_CANDIDATE_RUNS: Final = 2
_ORIGINAL_RERUNS: Final = 2


class BitwiseCheck:
    """Compares candidates with two runs of the original, which it makes when it is constructed.

    What differs between runs of the original is excluded, step by step, and named. Where a candidate differs, the
    original runs again: what it reproduces only now and then is no measure of a candidate.

    Args:
        run: the function that runs an arm.
    """

    def __init__(self, run: RunArm) -> None:
        self._run = run
        self._reference = run(ORIGINAL)
        self._excluded = _differences(self._reference, run(ORIGINAL)) | _unknown(self._reference)

    @property
    def not_reproduced(self) -> tuple[str, ...]:
        """The names of what could not be compared, since the original does not reproduce it."""
        return _names(self._excluded)

    def exclude(self, differences: Iterable[Difference]) -> None:
        """Compare these no more: the candidate is not to blame for them."""
        self._excluded |= set(differences)

    def difference(self, candidate: str) -> frozenset[Difference]:
        """Run a candidate, and a second time if the first run shows no difference, and return what differs."""
        for _ in range(_CANDIDATE_RUNS):
            found = _differences(self._reference, self._run(candidate)) - self._excluded
            for _ in range(_ORIGINAL_RERUNS if found else 0):
                self._excluded |= _differences(self._reference, self._run(ORIGINAL))
            if found - self._excluded:
                return frozenset(found - self._excluded)
        return frozenset()


def describe(differences: Iterable[Difference]) -> str:
    """Say in words what differs, and after which step it first does; return "" if nothing differs."""
    if not (differences := set(differences)):
        return ""
    first = min(step for step, _ in differences)
    names = sorted(name for step, name in differences if step == first)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"after step {first + 1}: {', '.join(names[:3])}{more}"


def _differences(one: Sequence[StepDigests], other: Sequence[StepDigests]) -> set[Difference]:
    return {
        (step, name)
        for step, (before, after) in enumerate(zip(one, other, strict=True))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


def _unknown(steps: Sequence[StepDigests]) -> set[Difference]:
    return {(step, name) for step, found in enumerate(steps) for name, digest in found.items() if digest == UNKNOWN}


def _names(differences: Iterable[Difference]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for step, name in sorted(differences):
        first.setdefault(name, step)
    return tuple(f"{name} (from step {step + 1} on)" for name, step in first.items())
