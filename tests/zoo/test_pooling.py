"""A gain over several machines: as wide as they differ, and no wider than what was measured where there is one."""

import random

import pytest
from scipy import stats

from fxlib.spec.report import Estimate
from fxlib.zoo.pooling import pooled, t_quantile


def gain(value: float, half: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value - half, high=value + half)


@pytest.mark.parametrize("free", [1, 2, 3, 4, 7, 30, 121])
def test_the_bounds_of_student_s_t_are_those_of_scipy(free: int) -> None:
    for confidence in (0.5, 0.9, 0.95, 0.999):
        assert t_quantile(confidence, free) == pytest.approx(stats.t.ppf(0.5 + confidence / 2, free), rel=1e-9)


def test_one_measurement_is_told_as_it_is() -> None:
    assert pooled([[gain(0.3)]], 0.95) == gain(0.3)


def test_a_machine_that_measured_twice_is_one_machine() -> None:
    found = pooled([[gain(0.3), gain(0.3)]], 0.95)
    assert found.value == pytest.approx(0.3, abs=1e-4)
    assert found.high - found.low == pytest.approx(0.02 / 2**0.5, rel=0.01)
    twice = pooled([[gain(0.3), gain(0.3)], [gain(0.32)]], 0.95)
    assert twice.high - twice.low > 0.1  # one degree of freedom


def test_machines_that_differ_make_the_interval_wide() -> None:
    alike = pooled([[gain(each)] for each in (0.30, 0.31, 0.32)], 0.95)
    unlike = pooled([[gain(each)] for each in (0.30, 0.60, 0.05)], 0.95)
    assert 0.28 < alike.low < alike.value < alike.high < 0.34
    assert unlike.low < 0 < unlike.value < unlike.high


def test_machines_that_agree_by_chance_do_not_make_it_narrower_than_their_noise() -> None:
    found = pooled([[gain(0.3)], [gain(0.3)], [gain(0.3)]], 0.95)
    assert found.high - found.low > 2 * 0.01 / 3**0.5


@pytest.mark.parametrize("between", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("machines", [2, 3, 8])
def test_the_interval_holds_the_mean_of_all_machines_as_often_as_it_says(machines: int, between: float) -> None:
    drawn, rounds = random.Random(machines), 400
    missed = 0
    for _ in range(rounds):
        gains = [[gain(drawn.gauss(drawn.gauss(0.3, between), 0.01 / 1.96))] for _ in range(machines)]
        found = pooled(gains, 0.95)
        missed += not found.low < 0.3 < found.high
    assert missed / rounds < 0.1  # of 5%, and DerSimonian's and Laird's variance is a little low for a few machines


def test_an_interval_without_width_and_a_total_loss_are_figures() -> None:
    found = pooled([[gain(0.3, 0.0)], [gain(0.3, 0.0)], [gain(-1.0, 0.0)]], 0.95)
    assert found.low < found.value < found.high
