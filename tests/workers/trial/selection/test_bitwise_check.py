"""Comparing digests of steps: what the original reproduces is the measure."""

from __future__ import annotations

from collections.abc import Sequence

from fxlib_workers.exchange import ORIGINAL, Arm
from fxlib_workers.trial.selection.screening import BitwiseCheck, RunArm, describe
from fxlib_workers.trial.servers import UNKNOWN
from fxlib_workers.trial.trainer import StepDigests

GOOD: list[StepDigests] = [{"output": "a", "loss": "b"}, {"output": "c", "loss": "d"}]


class Runs:
    """Returns prepared digests, by arm, and the last ones for ever."""

    def __init__(self, original: Sequence[Sequence[StepDigests]], candidate: Sequence[Sequence[StepDigests]]) -> None:
        self.prepared = {ORIGINAL: list(original), "candidate": list(candidate)}

    def __call__(self, arm: Arm) -> Sequence[StepDigests]:
        left = self.prepared[arm]
        return left.pop(0) if len(left) > 1 else left[0]


def compare(run: RunArm) -> tuple[str, tuple[str, ...]]:
    """What differs, and what was excluded."""
    check = BitwiseCheck(run)
    return describe(check.difference("candidate")), check.not_reproduced


def changed(step: int, **digests: str) -> list[StepDigests]:
    return [{**step_digests, **(digests if index == step else {})} for index, step_digests in enumerate(GOOD)]


def test_equal_digests_are_the_same() -> None:
    found = compare(Runs([GOOD], [GOOD]))
    assert found == ("", ())


def test_the_first_step_that_differs_is_named() -> None:
    found = compare(Runs([GOOD], [changed(1, loss="x")]))
    assert found[0] == "after step 2: loss"


def test_a_candidate_that_differs_only_in_its_second_run_is_caught() -> None:
    found = compare(Runs([GOOD], [GOOD, changed(0, output="x")]))
    assert found[0] == "after step 1: output"


def test_what_the_original_does_not_reproduce_is_excluded_and_named() -> None:
    found = compare(Runs([GOOD, changed(1, loss="x")], [changed(1, loss="y")]))
    assert found == ("", ("loss (from step 2 on)",))


def test_the_original_gets_more_chances_to_differ_where_the_candidate_does() -> None:
    rarely = [GOOD, GOOD, GOOD, changed(0, loss="z")]
    found = compare(Runs(rarely, [changed(0, loss="y")]))
    assert found == ("", ("loss (from step 1 on)",))


def test_other_differences_still_count_beside_one_that_is_excluded() -> None:
    found = compare(Runs([GOOD, changed(0, loss="x")], [changed(0, loss="y", output="z")]))
    assert found[0] == "after step 1: output"


def test_a_step_that_lacks_something_differs() -> None:
    lacking: list[StepDigests] = [{"output": "a"}, GOOD[1]]
    found = compare(Runs([GOOD], [lacking]))
    assert found[0] == "after step 1: loss"


def test_many_differences_are_counted() -> None:
    wide: list[StepDigests] = [{f"parameter {index}": "a" for index in range(9)}]
    found = compare(Runs([wide], [[dict.fromkeys(wide[0], "b")]]))
    assert found[0] == "after step 1: parameter 0, parameter 1, parameter 2 and 6 more"


def test_state_that_is_unknown_is_named() -> None:
    secret: list[StepDigests] = [{"server ps0: state of its setup": UNKNOWN}]
    assert compare(Runs([secret], [secret]))[1] == ("server ps0: state of its setup (from step 1 on)",)


def test_several_candidates_are_measured_by_one_reference() -> None:
    asked: list[Arm] = []

    def run(arm: Arm) -> Sequence[StepDigests]:
        asked.append(arm)
        return changed(1, loss="x") if arm == "wrong" else GOOD

    check = BitwiseCheck(run)
    assert [check.difference("right"), check.difference("wrong")] == [frozenset(), frozenset({(1, "loss")})]
    assert asked == [ORIGINAL, ORIGINAL, "right", "right", "wrong", ORIGINAL, ORIGINAL]
