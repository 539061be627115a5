"""Of several exact ways, a loop keeps to the one that is fastest in it; that of no pipeline is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import mock

import pytest

from fxlib.analysis.effects.prologue import Way
from fxlib.pipeline.choice import MeasuredChoice

KEYS, PUSH = Way.BY_KEYS, Way.BEHIND_PUSH


def choice_of(*ways: Way, depth: int = 1) -> MeasuredChoice:
    choice = MeasuredChoice()
    choice.offer(ways)
    choice.loop_began(depth)
    return choice


def steps(choice: MeasuredChoice, count: int, took_s: Mapping[Way | None, float]) -> list[Way | None]:
    """Make steps that take so long each way; return how each was made."""
    made = []
    with mock.patch("fxlib.pipeline.choice.time.perf_counter", return_value=0.0) as clock:
        choice.step_ended()
        for _ in range(count):
            made.append(choice.way)
            clock.return_value += took_s[choice.way]
            choice.step_ended()
    return made


def test_rows_may_be_updated_here_or_read_again_whichever_is_faster() -> None:
    for faster in (True, False):
        choice = MeasuredChoice()
        choice.offer((KEYS, PUSH), updates=True)
        choice.loop_began(1)
        with mock.patch("fxlib.pipeline.choice.time.perf_counter", return_value=0.0) as clock:
            choice.step_ended()
            for _ in range(100):
                clock.return_value += 0.010 if (choice.way, choice.updates) == (KEYS, faster) else 0.020
                choice.step_ended()
        assert (choice.way, choice.updates) == (KEYS, faster)


@pytest.mark.parametrize("best", [KEYS, PUSH, None])
def test_the_fastest_way_is_kept_once_all_were_tried_twice(best: Way | None) -> None:
    took_s = {way: 0.020 if way is best else 0.022 for way in (KEYS, PUSH, None)}
    made = steps(choice_of(KEYS, PUSH), 120, took_s)
    assert made[:36] == ([KEYS] * 6 + [PUSH] * 6 + [None] * 6) * 2
    assert set(made[36:]) == {best}


def test_a_way_that_is_much_slower_is_tried_but_once() -> None:
    made = steps(choice_of(KEYS, PUSH), 120, {KEYS: 0.050, PUSH: 0.020, None: 0.021})
    assert made[:30] == [KEYS] * 6 + [PUSH] * 6 + [None] * 6 + [PUSH] * 6 + [None] * 6
    assert set(made[30:]) == {PUSH}


def test_all_are_tried_again_after_many_steps() -> None:
    made = steps(choice_of(PUSH), 600, {PUSH: 0.030, None: 0.020})
    assert made.count(PUSH) == 12


def test_what_the_way_before_has_left_is_not_counted() -> None:
    choice = choice_of(PUSH, depth=4)
    made = steps(choice, 18, {PUSH: 0.020, None: 0.020})
    assert made == [PUSH] * 9 + [None] * 9


def test_what_lies_between_two_loops_is_no_step() -> None:
    choice = choice_of(KEYS, PUSH)
    for _ in range(60):  # each loop of two steps, an hour apart
        choice.loop_began(1)
        steps(choice, 2, {KEYS: 0.010, PUSH: 0.020, None: 0.020})
    assert choice.way is KEYS


def deepening(shorter: Mapping[int, float], given: int | None = None, count: int = 60) -> list[int]:
    """Return the depths of a loop whose steps take 20 ms within the step, and behind the push so long at each depth."""
    choice, depths = MeasuredChoice(), []
    choice.offer((PUSH,))
    choice.loop_began(given)
    with mock.patch("fxlib.pipeline.choice.time.perf_counter", return_value=0.0) as clock:
        choice.step_ended()
        for _ in range(count):
            depths.append(choice.depth)
            clock.return_value += 0.020 if choice.way is None else shorter[choice.depth]
            choice.step_ended()
    return depths


def test_the_depth_doubles_as_long_as_steps_become_shorter() -> None:
    assert deepening({1: 0.016, 2: 0.008, 4: 0.004, 8: 0.002})[-1] == 8
    assert deepening({1: 0.016, 2: 0.008, 4: 0.0079})[-1] == 2
    assert set(deepening({1: 0.016, 2: 0.0159})) == {1, 2}
    assert deepening({1: 0.016, 2: 0.0159})[-1] == 1


def test_a_loop_within_its_steps_has_no_depth_to_choose() -> None:
    assert set(deepening({1: 0.030})) == {1}


def test_a_depth_that_the_loop_gives_is_kept() -> None:
    assert set(deepening({3: 0.010}, given=3, count=600)) == {3}


def test_a_depth_is_chosen_anew_with_the_way() -> None:
    depths = deepening({1: 0.016, 2: 0.008, 4: 0.008}, count=1200)
    assert [depth for depth, before in zip(depths[1:], depths, strict=False) if depth != before] == [
        2,
        4,
        2,
        1,
        2,
        4,
        2,
        1,
        2,
        4,
        2,
    ]
