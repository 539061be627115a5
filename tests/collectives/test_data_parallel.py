"""DistributedDataParallel inside a model, over gloo on two ranks: rewritten on all of them, or on one alone."""

from __future__ import annotations

import pytest

from tests.collectives.parallel import accumulated, outcomes, refused
from tests.collectives.world import on_all_ranks
from tests.shared.many import many


@pytest.mark.slow
def test_random_programs_do_the_same_whichever_ranks_run_them_rewritten() -> None:
    seeds, moved, failed, kinds = range(many(10)), 0, 0, set[str]()
    for rank, found in enumerate(on_all_ranks(outcomes, seeds)):
        for seed, outcome in zip(seeds, found, strict=True):
            captured, rewritten, on_one_rank = outcome["runs"]
            assert rewritten == captured, (seed, rank)
            assert on_one_rank == captured, (seed, rank)
            moved, failed, kinds = moved + outcome["moved"], failed + any(captured[0]), kinds | outcome["kinds"]
    assert moved > len(seeds) / 2
    assert failed
    assert kinds == {"Layers", "Counting", "Linear"}


@pytest.mark.slow
def test_what_no_trial_can_hold_is_every_rank_s_answer_with_its_reason_and_without_a_service() -> None:
    for reason, explanation, warned in on_all_ranks(refused):
        assert reason == "COLLECTIVES", explanation
        assert "for 2 ranks, and Workload.trainers is 3" in explanation
        assert not warned


@pytest.mark.slow
def test_gradients_add_up_without_the_other_ranks_where_the_program_says_so() -> None:
    (first, same), (second, again) = on_all_ranks(accumulated)
    assert first == same
    assert second == again
    half = len(first) // 2
    assert first[:half] != second[:half]
