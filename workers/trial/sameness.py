"""Whether the candidate does, bit for bit, what the original does, as far as the original does so itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from workers.trial.servers import UNKNOWN
from workers.trial.trainer import Arm, Trace

RunArm = Callable[[Arm], Sequence[Trace]]
"""Brings everything back to where it began, runs the steps of an arm, and returns what each left behind."""

Difference = tuple[int, str]
"""A step, from 0, and what differs after it."""

_CANDIDATE_RUNS: Final = 2
_ORIGINAL_AGAIN: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sameness:
    """The verdict: what differs, in words (empty: nothing), and what could not be compared."""

    difference: str
    not_reproduced: tuple[str, ...]


def compare(run: RunArm) -> Sameness:
    """Run the original twice, then the candidate twice.

    What differs between runs of the original is left out, step by step, and named. Where the candidate differs, the
    original gets more chances to differ there, too: what it reproduces only now and then is no measure of a candidate.
    """
    reference = run("original")
    unsteady = _differences(reference, run("original")) | _untold(reference)
    for _ in range(_CANDIDATE_RUNS):
        found = _differences(reference, run("candidate")) - unsteady
        for _ in range(_ORIGINAL_AGAIN if found else 0):
            unsteady |= _differences(reference, run("original"))
        if found - unsteady:
            return Sameness(difference=_describe(found - unsteady), not_reproduced=_name(unsteady))
    return Sameness(difference="", not_reproduced=_name(unsteady))


def _differences(one: Sequence[Trace], other: Sequence[Trace]) -> set[Difference]:
    return {
        (step, name)
        for step, (before, after) in enumerate(zip(one, other, strict=True))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


def _untold(traces: Sequence[Trace]) -> set[Difference]:
    return {(step, name) for step, trace in enumerate(traces) for name, digest in trace.items() if digest == UNKNOWN}


def _describe(differences: Iterable[Difference]) -> str:
    first = min(step for step, _ in differences)
    names = sorted(name for step, name in differences if step == first)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"after step {first + 1}: {', '.join(names[:3])}{more}"


def _name(unsteady: Iterable[Difference]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for step, name in sorted(unsteady):
        first.setdefault(name, step)
    return tuple(f"{name} (from step {step + 1} on)" for name, step in first.items())
