"""Deciding by paired blocks."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from fxlib.reasons import Reason
from fxlib.spec.job import TrialOptions
from fxlib_workers.exchange import Arm
from fxlib_workers.trial.selection.speed import Blocks, Speed, measure
from tests.workers.clock import Clock, shown_to


class Machine:
    """Blocks that are said to take so many seconds, and take 1 ms by the clock."""

    def __init__(self, gain: float, noise: float = 0.02, step_s: float = 0.02) -> None:
        self.step_s = {"original": step_s, "candidate": step_s / (1 + gain)}
        self.noise = noise
        self.rng = np.random.default_rng(0)
        self.asked: list[tuple[Arm, int]] = []
        self.clock = Clock()

    def __call__(self, arm: Arm, _: int, steps: int) -> float:
        self.asked.append((arm, steps))
        self.clock.now_s += 0.001
        return steps * self.step_s[arm] * math.exp(self.noise * self.rng.standard_normal())


def run(machine: Machine, budget_s: float = 60.0, **options: float) -> tuple[Speed, Reason]:
    with shown_to(machine.clock, "fxlib_workers.trial.selection.speed"):
        return measure(
            Blocks(machine, [10]),
            TrialOptions(**options),  # type: ignore[arg-type]
            candidate="candidate",
            deadline=budget_s,
            rng=random.Random(1),
        )


def test_a_gain_is_found_and_the_trial_stops() -> None:
    speed, verdict = run(Machine(gain=0.5))
    assert verdict is Reason.FASTER
    assert speed.pairs < 20
    assert speed.gain.low < 0.5 < speed.gain.high
    assert speed.qps("original").value == pytest.approx(500, rel=0.05)
    assert speed.qps("candidate").value == pytest.approx(750, rel=0.05)


def test_a_loss_ends_the_trial() -> None:
    speed, verdict = run(Machine(gain=-0.2))
    assert verdict is Reason.NOT_FASTER
    assert speed.pairs < 20


def test_a_gain_below_the_least_one_asked_for_is_not_adopted() -> None:
    assert run(Machine(gain=0.05, noise=0.01), min_gain=0.1)[1] is Reason.NOT_FASTER


def test_no_answer_within_the_budget_is_said_so() -> None:
    speed, verdict = run(Machine(gain=0.02, noise=0.3), budget_s=0.3)
    assert verdict is Reason.BUDGET_EXHAUSTED
    assert speed.pairs > 0


def test_a_clear_gain_of_few_pairs_counts_where_the_budget_ends() -> None:
    speed, verdict = run(Machine(gain=2.0, step_s=1.0), budget_s=0.022)
    assert verdict is Reason.FASTER
    assert speed.pairs < 12
    assert speed.gain.low > 0


def test_blocks_are_as_long_as_they_should_be() -> None:
    speed, _ = run(Machine(gain=0.3, step_s=0.01))
    assert 0.15 < speed.steps * 0.01 < 0.4


def test_a_small_budget_makes_short_blocks() -> None:
    speed, _ = run(Machine(gain=0.3, step_s=0.001), budget_s=4.0)
    assert speed.steps * 0.001 <= 0.11


def test_slow_steps_make_blocks_of_one() -> None:
    assert run(Machine(gain=0.3, step_s=2.0))[0].steps == 1


def test_warm_up_blocks_are_not_counted() -> None:
    machine = Machine(gain=0.3)
    speed, _ = run(machine)
    assert len(machine.asked) > 2 * speed.pairs


def test_either_arm_may_come_first_in_a_pair() -> None:
    machine = Machine(gain=0.02, noise=0.001)
    speed, _ = run(machine, budget_s=0.5)
    first = [arm for arm, _ in machine.asked[-2 * speed.pairs :: 2]]
    assert {"original", "candidate"} == set(first)


def test_rare_stalls_of_the_candidate_count() -> None:
    class Stalling(Machine):
        turns = itertools.count()

        def __call__(self, arm: Arm, first: int, steps: int) -> float:
            seconds = super().__call__(arm, first, steps)
            return 20 * seconds if arm == "candidate" and next(self.turns) % 10 == 9 else seconds

    assert run(Stalling(gain=0.3), budget_s=0.5)[1] is not Reason.FASTER


class Steps:
    """Steps whose seconds depend on the batch, by an arm's list of them, on a clock that they move."""

    def __init__(self, **seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self.clock = Clock()
        self.ran: list[tuple[Arm, range]] = []

    def __call__(self, arm: Arm, first: int, steps: int) -> float:
        self.ran.append((arm, range(first, first + steps)))
        seconds = sum(self.seconds[arm][index % len(self.seconds[arm])] for index in self.ran[-1][1])
        self.clock.now_s += seconds
        return seconds


def of_steps(made: Steps, samples: Sequence[int], accumulation: int = 1) -> tuple[Speed, Reason]:
    blocks, options = Blocks(made, samples, accumulation), TrialOptions()
    with shown_to(made.clock, "fxlib_workers.trial.selection.speed"):
        return measure(blocks, options, candidate="candidate", deadline=60.0, rng=random.Random(1))


def test_a_pair_runs_the_same_batches_and_the_next_one_goes_on_behind_them() -> None:
    made = Steps(original=[0.06], candidate=[0.05])
    speed, _ = of_steps(made, [1])
    assert speed.steps > 1
    for place in range(0, len(made.ran), 2):
        (one, ran), (other, the_same) = made.ran[place : place + 2]
        assert ({one, other}, ran) == ({"original", "candidate"}, the_same)
        assert ran.start == (made.ran[place - 1][1].stop if place else 0)


def test_a_candidate_that_is_slower_on_another_batch_than_the_first_is_measured_on_all() -> None:
    speed, verdict = of_steps(Steps(original=[0.2, 0.3], candidate=[0.15, 0.6]), [8, 800])
    assert verdict is not Reason.FASTER
    assert speed.steps == 1
    assert speed.qps("original").value == pytest.approx(808 / 0.5, rel=0.05)
    assert speed.qps("candidate").value == pytest.approx(808 / 0.75, rel=0.05)


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.5])
def test_blocks_have_the_share_of_updates_that_training_has(step_s: float) -> None:
    in_four = [step_s, step_s, step_s, 2 * step_s]
    made = Steps(original=in_four, candidate=[step_s] * 4)
    speed, verdict = of_steps(made, [1], accumulation=4)
    assert {len(steps) % 4 for _, steps in made.ran} == {0}
    assert verdict is Reason.FASTER
    assert speed.gain.value == pytest.approx(0.25, abs=0.01)


@pytest.mark.slow
def test_equal_arms_are_adopted_no_more_often_than_the_level_says() -> None:
    adopted = 0
    for seed in range(60):
        machine = Machine(gain=0.0, noise=0.05)
        machine.rng = np.random.default_rng(seed)
        adopted += run(machine, budget_s=0.4, min_gain=0.0)[1] is Reason.FASTER
    assert adopted <= 5  # 2.5% of 60 is 1.5
