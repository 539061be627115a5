"""Functional collectives over gloo, on two ranks: captured, rewritten, and the same to the bit on each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collectives.programs import (
    PROGRAMS,
    Program,
    mixed_outcomes,
    outcomes,
    random_outcomes,
    raw_operators_waited_for_too_early,
    reduced_and_used_at_once,
)
from tests.collectives.world import on_all_ranks
from tests.shared.many import many


@pytest.fixture(scope="module")
def ran() -> list[list[dict[str, Any]]]:
    """Outcomes by rank and program: one world for all tests."""
    return on_all_ranks(outcomes, PROGRAMS)


@pytest.fixture(params=PROGRAMS, ids=lambda program: program.__name__)
def by_rank(request: pytest.FixtureRequest, ran: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The outcome of one program on each rank."""
    return [rank[PROGRAMS.index(request.param)] for rank in ran]


def test_a_program_computes_the_same_captured_and_rewritten(by_rank: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(by_rank):
        original, captured, rewritten = found["bits"]
        assert captured == original, rank
        assert rewritten == original, rank


def test_all_ranks_issue_the_program_s_collectives_in_the_program_s_order(by_rank: list[dict[str, Any]]) -> None:
    first, second = by_rank
    assert first["order"] == second["order"]
    for found in (first, second):
        captured, rewritten = found["issued"]
        assert captured
        assert rewritten == captured


def test_calls_are_reported_with_their_group(by_rank: list[dict[str, Any]]) -> None:
    for found in by_rank:
        assert {to for _, to, _ in found["calls"]} == {"process group 0"}
        assert sorted(function for function, *_ in found["calls"]) == sorted(found["issued"][0])
        assert set(found["flights"]) <= {"process group 0"}


@pytest.mark.parametrize("program", [reduced_and_used_at_once, raw_operators_waited_for_too_early])
def test_what_is_waited_for_too_early_is_waited_for_later(program: Program, ran: list[list[dict[str, Any]]]) -> None:
    found = ran[0][PROGRAMS.index(program)]
    assert "moved" in {action for *_, action in found["calls"]}
    assert found["flights"]
    assert found["order"].index("top") < found["order"].index("wait_all_reduce")


@pytest.mark.slow
def test_random_programs_compute_the_same() -> None:
    for found in on_all_ranks(random_outcomes, range(many(25))):
        for seed, outcome in enumerate(found):
            original, captured, rewritten = outcome["bits"]
            assert captured == rewritten == original, seed
            assert outcome["issued"][0] == outcome["issued"][1], seed


@pytest.mark.slow
def test_random_programs_of_collectives_and_remote_calls_do_the_same_and_fail_the_same() -> None:
    failed, seeds = 0, range(many(40))
    for found in on_all_ranks(mixed_outcomes, seeds):
        for seed, outcome in enumerate(found):
            captured, rewritten = outcome["bits"]
            assert captured == rewritten, seed
            failed += bool(captured[0])
    assert failed > len(seeds) // 6
