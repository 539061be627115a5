"""Comparing traces: what the original reproduces is the measure."""

from __future__ import annotations

from collections.abc import Sequence

from fxlib_workers.exchange.candidate import ORIGINAL, Arm
from fxlib_workers.trial.selection.bitwise_check import RunArm, Sameness, describe
from fxlib_workers.trial.servers import UNKNOWN
from fxlib_workers.trial.trainer import Trace

GOOD: list[Trace] = [{"output": "a", "loss": "b"}, {"output": "c", "loss": "d"}]


class Runs:
    """Hands out prepared traces, by arm, and the last one for ever."""

    def __init__(self, original: Sequence[Sequence[Trace]], candidate: Sequence[Sequence[Trace]]) -> None:
        self.prepared = {ORIGINAL: list(original), "candidate": list(candidate)}

    def __call__(self, arm: Arm) -> Sequence[Trace]:
        left = self.prepared[arm]
        return left.pop(0) if len(left) > 1 else left[0]


def compare(run: RunArm) -> tuple[str, tuple[str, ...]]:
    """What differs, and what was left out."""
    same = Sameness(run)
    return describe(same.difference("candidate")), same.not_reproduced


def changed(step: int, **digests: str) -> list[Trace]:
    return [{**trace, **(digests if index == step else {})} for index, trace in enumerate(GOOD)]


def test_equal_traces_are_the_same() -> None:
    same = compare(Runs([GOOD], [GOOD]))
    assert same == ("", ())


def test_the_first_step_that_differs_is_told() -> None:
    same = compare(Runs([GOOD], [changed(1, loss="x")]))
    assert same[0] == "after step 2: loss"


def test_a_candidate_that_differs_only_in_its_second_run_is_caught() -> None:
    same = compare(Runs([GOOD], [GOOD, changed(0, output="x")]))
    assert same[0] == "after step 1: output"


def test_what_the_original_does_not_reproduce_is_left_out_and_named() -> None:
    same = compare(Runs([GOOD, changed(1, loss="x")], [changed(1, loss="y")]))
    assert same == ("", ("loss (from step 2 on)",))


def test_the_original_gets_more_chances_to_differ_where_the_candidate_does() -> None:
    rarely = [GOOD, GOOD, GOOD, changed(0, loss="z")]
    same = compare(Runs(rarely, [changed(0, loss="y")]))
    assert same == ("", ("loss (from step 1 on)",))


def test_other_differences_still_count_beside_one_that_is_left_out() -> None:
    same = compare(Runs([GOOD, changed(0, loss="x")], [changed(0, loss="y", output="z")]))
    assert same[0] == "after step 1: output"


def test_a_trace_that_lacks_something_differs() -> None:
    lacking: list[Trace] = [{"output": "a"}, GOOD[1]]
    same = compare(Runs([GOOD], [lacking]))
    assert same[0] == "after step 1: loss"


def test_many_differences_are_counted() -> None:
    wide: list[Trace] = [{f"parameter {index}": "a" for index in range(9)}]
    same = compare(Runs([wide], [[dict.fromkeys(wide[0], "b")]]))
    assert same[0] == "after step 1: parameter 0, parameter 1, parameter 2 and 6 more"


def test_state_that_is_not_told_is_named() -> None:
    secret: list[Trace] = [{"server ps0: state of its setup": UNKNOWN}]
    assert compare(Runs([secret], [secret]))[1] == ("server ps0: state of its setup (from step 1 on)",)


def test_several_candidates_are_measured_by_one_reference() -> None:
    asked: list[Arm] = []

    def run(arm: Arm) -> Sequence[Trace]:
        asked.append(arm)
        return changed(1, loss="x") if arm == "wrong" else GOOD

    same = Sameness(run)
    assert [same.difference("right"), same.difference("wrong")] == [frozenset(), frozenset({(1, "loss")})]
    assert asked == [ORIGINAL, ORIGINAL, "right", "right", "wrong", ORIGINAL, ORIGINAL]
