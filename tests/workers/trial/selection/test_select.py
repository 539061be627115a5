"""Choosing a candidate and proving it, on machines whose blocks take what they are said to take: round after round."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import pytest

from fxlib.reasons import Reason
from fxlib.spec.job import TrialOptions
from fxlib.spec.report import CandidateReport, Report
from fxlib_workers.exchange import ORIGINAL, Arm, Candidate
from fxlib_workers.trial.failures import CandidateError, TrialError
from fxlib_workers.trial.selection.outcomes import CandidateOutcomes
from fxlib_workers.trial.selection.select import Selection, SuccessiveHalving
from fxlib_workers.trial.selection.speed import Blocks, Speed
from tests.workers.clock import Clock, shown_to


class Machine:
    """Blocks of arms by their gains over the original, each of 1 ms by the clock; an arm may raise after so many."""

    def __init__(
        self, gains: Mapping[Arm, float], noise: float = 0.02, failing: Mapping[Arm, int] | None = None
    ) -> None:
        self.step_s = {ORIGINAL: 0.02, **{arm: 0.02 / (1 + gain) for arm, gain in gains.items()}}
        self.noise = noise
        self.failing = failing or {}
        self.rng = np.random.default_rng(0)
        self.asked: list[Arm] = []
        self.begun: list[int] = []
        self.recovered = 0
        self.clock = Clock()

    def __call__(self, arm: Arm, first: int, steps: int) -> float:
        self.asked.append(arm)
        self.begun.append(first)
        self.clock.now_s += 0.001
        if self.asked.count(arm) > self.failing.get(arm, 10**9):
            raise CandidateError(arm, Reason.CANDIDATE_FAILS, "IndexError: no")
        return steps * self.step_s[arm] * math.exp(self.noise * self.rng.standard_normal())

    def recover(self) -> None:
        self.recovered += 1


def outcomes(*names: Arm) -> CandidateOutcomes:
    return CandidateOutcomes([Candidate(graph=b"", report=report_of(name)) for name in names])


def report_of(name: Arm) -> Report:
    return Report(decision="keep_original", reason=None, explanation="", candidates=(CandidateReport(name=name),))


def select(machine: Machine, made: CandidateOutcomes, budget_s: float = 60.0, **options: float) -> tuple[Speed, Reason]:
    selection = Selection(
        Blocks(machine, [10]),
        made,
        TrialOptions(**options),  # type: ignore[arg-type]
        deadline=budget_s,
        recover=machine.recover,
        rng=random.Random(1),
    )
    with shown_to(
        machine.clock,
        "fxlib_workers.trial.selection.select",
        "fxlib_workers.trial.selection.speed",
    ):
        return selection.confirm(*(selection.choose() if len(made.remaining) > 1 else (made.remaining, None)))


def verdicts(made: CandidateOutcomes) -> dict[Arm, str]:
    return {each.name: each.verdict for each in made.report().candidates}


def test_the_fastest_is_chosen_and_confirmed() -> None:
    made = outcomes("slow", "fast", "middle")
    machine = Machine({"slow": -0.1, "middle": 0.2, "fast": 0.5})
    speed, verdict = select(machine, made)
    assert (speed.candidate, verdict) == ("fast", Reason.FASTER)
    rows = {each.name: each for each in made.report("fast").candidates}
    assert rows["fast"].gain == speed.gain
    assert rows["fast"].verdict.startswith("chosen, and measured anew: measured faster")
    assert rows["middle"].gain is not None
    assert rows["middle"].gain.value == pytest.approx(0.2, abs=0.06)
    assert rows["middle"].verdict.startswith("passed over: +")
    assert rows["middle"].verdict.endswith("of 'fast'")


def test_only_fresh_blocks_count() -> None:
    machine = Machine({"a": 0.5, "b": 0.1})
    speed, _ = select(machine, outcomes("a", "b"))
    fresh = machine.asked[-2 * speed.pairs :]
    assert set(fresh) == {ORIGINAL, "a"}
    assert len(speed.seconds["a"]) == len(speed.seconds[ORIGINAL]) == speed.pairs
    assert machine.asked.count("a") > speed.pairs


def test_blocks_go_on_in_the_batches_from_the_choice_to_the_confirmation() -> None:
    machine = Machine({"a": 0.5, "b": 0.1})
    speed, _ = select(machine, outcomes("a", "b"))
    begun = list(dict.fromkeys(machine.begun))
    assert begun == sorted(begun)
    assert machine.begun.count(begun[-1]) == 2
    assert begun[-1] > speed.pairs * speed.steps


def test_a_single_candidate_is_measured_without_choosing() -> None:
    machine, made = Machine({"only": 0.5}), outcomes("only")
    speed, verdict = select(machine, made)
    assert verdict is Reason.FASTER
    warm_up = len(machine.asked) - 2 * speed.pairs
    assert warm_up <= 10  # 1, 2, 4, 8 and 16 steps of two arms
    assert verdicts(made) == {"only": Reason.FASTER.sentence()}


def test_a_choice_takes_less_than_half_of_the_budget() -> None:
    machine = Machine(dict.fromkeys("abc", 0.0), noise=0.5)
    speed, verdict = select(machine, outcomes("a", "b", "c"), budget_s=0.1)
    assert verdict is Reason.BUDGET_EXHAUSTED
    assert 4 * speed.pairs > len(machine.asked) >= 100


def test_without_time_to_choose_the_most_promising_is_measured() -> None:
    speed, verdict = select(Machine({"first": 0.1, "second": 0.9}), outcomes("first", "second"), budget_s=-1.0)
    assert (speed.candidate, verdict) == ("first", Reason.BUDGET_EXHAUSTED)


@pytest.mark.parametrize("blocks", [0, 3, 8, 15])
def test_a_candidate_that_fails_while_it_is_measured_makes_way_for_the_next(blocks: int) -> None:
    made = outcomes("fast", "middle")
    machine = Machine({"fast": 0.5, "middle": 0.3}, failing={"fast": blocks})
    speed, verdict = select(machine, made)
    assert (speed.candidate, verdict) == ("middle", Reason.FASTER)
    assert verdicts(made)["fast"] == "the candidate fails in the trial: IndexError: no"
    assert machine.recovered == 1


def test_if_all_fail_the_reason_is_that_of_the_most_promising() -> None:
    made = outcomes("a", "b")
    with pytest.raises(TrialError, match="IndexError") as raised:
        select(Machine({"a": 0.5, "b": 0.3}, failing={"a": 6, "b": 3}), made)
    assert raised.value is not None
    assert isinstance(raised.value, CandidateError)
    assert raised.value.candidate == "a"


@pytest.mark.slow
def test_three_candidates_that_are_the_original_are_adopted_no_more_often_than_the_level_says() -> None:
    class EnoughError(Exception):
        """So many blocks, and no verdict."""

    class Short(Machine):
        def __call__(self, arm: Arm, first: int, steps: int) -> float:
            if len(self.asked) > 160:
                raise EnoughError
            return super().__call__(arm, first, steps)

    adopted = 0
    for seed in range(60):
        machine = Short(dict.fromkeys("abc", 0.0), noise=0.05)
        machine.rng = np.random.default_rng(seed)
        try:
            adopted += select(machine, outcomes("a", "b", "c"), min_gain=0.0)[1] is Reason.FASTER
        except EnoughError:
            continue
    assert adopted <= 4  # 2.5% of 60 is 1.5


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
