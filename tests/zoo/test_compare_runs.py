"""Comparing two runs: a regression is one beyond chance, over all rows together."""

import random
from dataclasses import replace
from statistics import NormalDist

import pytest

from fxlib.spec.report import Estimate
from fxlib.zoo import Row, compare
from fxlib.zoo.compare_runs import holm

Z = NormalDist().inv_cdf(0.975)


def measured(name: str, gain: float, *, half: float = 0.02, job: str = "") -> Row:
    estimate = Estimate(value=gain, low=gain - half, high=gain + half)
    return Row(name=name, state="done", decision="adopt", reason="FASTER", gain=estimate, job_id=job)


def kinds(before: list[Row], after: list[Row]) -> dict[str, str]:
    return {change.name: change.kind for change in compare(before, after).changes}


def test_an_interval_below_the_last_one_is_slower() -> None:
    before, after = [measured("a", 0.5), measured("b", 0.5)], [measured("a", 0.3), measured("b", 0.5)]
    found = compare(before, after)
    assert {each.name: each.kind for each in found.regressions} == {"a": "slower"}
    assert found.compared == 2


def test_overlapping_intervals_are_no_regression() -> None:
    assert kinds([measured("a", 0.5, half=0.1)], [measured("a", 0.45, half=0.1)]) == {}


def test_faster_is_told_and_is_no_regression() -> None:
    found = compare([measured("a", 0.3)], [measured("a", 0.5)])
    assert [each.kind for each in found.changes] == ["faster"]
    assert not found.regressions


def test_models_that_fail_now_or_are_measured_no_longer_are_regressions() -> None:
    failing = Row(name="a", state="failed", failure="CRASHED")
    kept = Row(name="b", state="done", decision="keep_original", reason="NO_SERVER")
    found = compare([measured("a", 0.3), measured("b", 0.3)], [failing, kept])
    assert {each.name: each.kind for each in found.regressions} == {"a": "newly failing", "b": "no longer measured"}


def test_new_gone_and_recovered_models_are_told_apart() -> None:
    failing = Row(name="a", state="failed", failure="CRASHED")
    found = kinds([failing, measured("b", 0.1)], [measured("a", 0.3), measured("c", 0.3)])
    assert found == {"a": "measured again", "b": "gone", "c": "new"}


def test_an_answer_that_both_runs_share_is_not_compared() -> None:
    assert compare([measured("a", 0.5, job="j")], [measured("a", 0.5, job="j")]).compared == 0


def test_an_answer_that_was_taken_over_from_a_run_between_them_is_compared() -> None:
    again = replace(measured("a", 0.1, job="k"), reused=True)
    assert kinds([measured("a", 0.5, job="j")], [again]) == {"a": "slower"}


def test_a_row_that_is_not_over_is_not_compared() -> None:
    assert kinds([measured("a", 0.5)], [Row(name="a", state="asked")]) == {"a": "gone"}


def test_holm_multiplies_the_smallest_value_by_the_number_of_all() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([]) == []


@pytest.mark.slow
def test_equal_runs_of_many_models_seldom_have_a_regression() -> None:
    drawn = random.Random(7)
    false = 0
    for _ in range(200):
        before = [measured(str(n), drawn.gauss(0.3, 0.02 / Z)) for n in range(60)]
        after = [measured(str(n), drawn.gauss(0.3, 0.02 / Z)) for n in range(60)]
        false += bool(compare(before, after).regressions)
    assert false <= 20  # 5% of 200 are expected at most, and twice that is beyond chance
