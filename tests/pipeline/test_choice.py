"""Of two exact ways, a loop keeps to the one that was faster in it."""

from __future__ import annotations

from unittest import mock

import pytest

from fxlib.pipeline.choice import MeasuredChoice


def steps(choice: MeasuredChoice, count: int, took_s: dict[bool, float]) -> list[bool]:
    """Make steps that take so long each way; return how each was made."""
    made = []
    with mock.patch("fxlib.pipeline.choice.time.perf_counter", return_value=0.0) as clock:
        choice.loop_began()
        choice.step_ended()
        for _ in range(count):
            made.append(choice.by_keys)
            clock.return_value += took_s[choice.by_keys]
            choice.step_ended()
    return made


@pytest.mark.parametrize("by_keys_s, better", [(0.010, True), (0.030, False)])
def test_the_faster_way_is_kept_once_both_were_tried_twice(by_keys_s: float, better: bool) -> None:
    made = steps(MeasuredChoice(), 120, {True: by_keys_s, False: 0.020})
    assert made[:20] == [True] * 5 + [False] * 5 + [True] * 5 + [False] * 5
    assert set(made[20:]) == {better}


def test_both_are_tried_again_after_many_steps() -> None:
    made = steps(MeasuredChoice(), 600, {True: 0.030, False: 0.020})
    assert sum(made) > 15


def test_what_lies_between_two_loops_is_no_step() -> None:
    choice = MeasuredChoice()
    for _ in range(30):  # each loop of two steps, an hour apart
        choice.loop_began()
        steps(choice, 2, {True: 0.010, False: 0.020})
    assert choice.by_keys
