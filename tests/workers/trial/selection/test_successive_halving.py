"""Choosing among candidates: rounds in, the arms of the next round out."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fxlib_workers.exchange import ORIGINAL, Arm
from fxlib_workers.trial.selection.select import SuccessiveHalving


def halving(*candidates: Arm) -> SuccessiveHalving:
    return SuccessiveHalving(candidates, confidence=0.95)


def play(game: SuccessiveHalving, seconds: Mapping[Arm, float], wobble: float = 0.3) -> list[tuple[Arm, ...]]:
    """Play to the end, with blocks that take about the seconds given; return the arms of each round."""
    rounds = []
    while arms := game.round:
        rounds.append(arms)
        turn = len(rounds)
        game.add(
            {arm: seconds[arm] * math.exp(wobble * math.sin(turn * (index + 1))) for index, arm in enumerate(arms)}
        )
    return rounds


def test_a_single_candidate_needs_no_round() -> None:
    assert halving("a").round == ()
    assert halving("a").ranking == ("a",)


def test_every_round_has_the_original_and_all_that_are_left() -> None:
    rounds = play(halving("a", "b", "c", "d"), {ORIGINAL: 1.0, "a": 1.0, "b": 0.9, "c": 0.8, "d": 0.7})
    assert rounds[0] == (ORIGINAL, "a", "b", "c", "d")
    assert {len(arms) - 1 for arms in rounds} == {4, 2}
    assert all(arms[0] == ORIGINAL for arms in rounds)


def test_a_rung_has_as_many_blocks_as_the_one_before_it() -> None:
    game = halving("a", "b", "c", "d")
    rounds = play(game, dict.fromkeys([ORIGINAL, "a", "b", "c", "d"], 1.0))
    first = [arms for arms in rounds if len(arms) == 5]
    second = [arms for arms in rounds if len(arms) == 3]
    assert len(first) * 5 <= len(second) * 3 < len(first) * 5 + 3


def test_the_fastest_is_left_and_the_others_are_ranked() -> None:
    game = halving("slow", "middle", "fast")
    play(game, {ORIGINAL: 1.0, "slow": 1.2, "middle": 0.8, "fast": 0.6}, wobble=0.05)
    assert game.ranking == ("fast", "middle", "slow")
    gain = game.gain("fast")
    assert gain is not None
    assert 0.5 < gain.value < 0.9


def test_a_candidate_that_is_behind_in_every_round_leaves_at_once() -> None:
    game = halving("fast", "hopeless", "close")
    for turn in range(3):
        gone = game.add({ORIGINAL: 1.0, "fast": 0.6, "hopeless": 2.0, "close": 0.59 + 0.01 * turn})
    assert gone == ("hopeless",)
    assert set(game.round) == {ORIGINAL, "fast", "close"}


def test_nobody_leaves_on_two_rounds() -> None:
    game = halving("fast", "hopeless")
    for _ in range(2):
        assert game.add({ORIGINAL: 1.0, "fast": 0.5, "hopeless": 5.0}) == ()


def test_a_slow_moment_of_all_arms_hurts_nobody() -> None:
    game = halving("a", "b")
    for turn in range(5):
        slow = 10.0 if turn == 2 else 1.0
        game.add({ORIGINAL: slow, "a": 0.5 * slow, "b": (0.52 - 0.03 * (turn % 2)) * slow})
    assert game.round == (ORIGINAL, "a", "b")


def test_without_a_round_the_first_is_the_one() -> None:
    game = halving("promising", "other")
    assert game.ranking[0] == "promising"
    assert game.gain("promising") is None


def test_a_candidate_that_fails_is_out_of_everything() -> None:
    game = halving("a", "b", "c")
    game.add({ORIGINAL: 1.0, "a": 0.5, "b": 0.7, "c": 0.8})
    game.fail("a")
    assert game.round == (ORIGINAL, "b", "c")
    assert game.ranking == ("b", "c")
    game.fail("c")
    assert not game.round
