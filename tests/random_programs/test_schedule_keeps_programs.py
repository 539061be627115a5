"""The scheduled program is the program: on random ones, against an adversary that decides when calls in flight run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxlib.analysis.effects import aliases, dependencies
from fxlib.analysis.effects.dependencies import Cause, Dependencies
from fxlib.analysis.effects.model import NodeEffects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.client.answer_policy import screen
from fxlib.errors import PassError, WireError
from fxlib.recipes import recipes
from tests.random_programs.programs import random_program
from tests.random_programs.running import differences, outcome
from tests.random_programs.simulation import simulated
from tests.shared.many import many

pytestmark = pytest.mark.slow

ADVERSARIES = range(3)

RARE = {"no MEMORY edges": 56, "no aliases": 61}
"""Seeds of programs that notice what few do, by what they notice: there they come first; no run is without them."""

SEEDS = (*range(many(30)), *RARE.values())


def check(seed: int) -> int:
    """Compare one program with its schedule under several adversaries; return how many of its calls moved."""
    program = random_program(seed)
    rewrite = recipes.apply(program.module)
    screen(rewrite.module, program.module, passes=recipes.get("schedule").passes)  # a launcher takes it
    expected = outcome(program, program.module, simulated(7))
    for adversary in ADVERSARIES:
        found = differences(expected, outcome(program, rewrite.module, simulated(adversary)))
        assert not found, f"seed {seed}, adversary {adversary}: {found}\n{program.module.code}\n{rewrite.module.code}"
    return sum(call.action == "moved" for call in rewrite.calls)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_a_scheduled_program_does_what_the_program_does(seed: int) -> None:
    check(seed)


def test_many_scheduled_programs_do_what_the_programs_do_and_have_calls_that_move() -> None:
    assert sum(map(check, SEEDS)) > 3 * len(SEEDS)


def test_random_programs_mean_the_same_whatever_the_adversary() -> None:
    """Else a difference would say nothing about the schedule."""
    for seed in range(30):
        program = random_program(seed)
        assert not differences(*(outcome(program, program.module, simulated(adversary)) for adversary in (1, 2)))


def _without(why: Cause) -> AbstractContextManager[object]:
    def sources(self: Dependencies, place: int) -> list[int]:
        return [source for source, each in self.before(place) if each is not why]

    return mock.patch.object(Dependencies, "sources", sources)


def _without_aliases() -> AbstractContextManager[object]:
    return mock.patch.object(aliases.Aliases, "_join_all", return_value=None)


def _order_by_issue_alone() -> AbstractContextManager[object]:
    touch = dependencies._Builder._touch

    def skip_waits(self: dependencies._Builder, place: int, does: NodeEffects, own: dependencies.Edges) -> None:
        if does.part is not Part.WAIT:
            touch(self, place, does, own)

    return mock.patch.object(dependencies._Builder, "_touch", skip_waits)


PLANTED: dict[str, Callable[[], AbstractContextManager[object]]] = {
    **{f"no {why.name} edges": functools.partial(_without, why) for why in Cause if why is not Cause.DATA},
    "no aliases": _without_aliases,
    "a call is over once it is issued": _order_by_issue_alone,
}


def _seeds_that_notice(bug: str) -> Iterator[int]:
    for seed in (RARE.get(bug, 0), *SEEDS):
        try:
            check(seed)
        except (AssertionError, PassError, WireError):  # the launcher refuses some of them unseen
            yield seed


@pytest.mark.parametrize("bug", PLANTED)
def test_a_schedule_without_one_of_its_rules_is_caught(bug: str) -> None:
    with PLANTED[bug]():
        assert next(_seeds_that_notice(bug), None) is not None
