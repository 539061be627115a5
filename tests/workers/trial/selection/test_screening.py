"""Which candidates a trial goes on with: what the original reproduces is the measure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from typing_extensions import override

import fxlib
from fxlib import wire
from fxlib.reasons import Reason
from fxlib.spec.job import TrialOptions
from fxlib.spec.report import CompiledPart, PassReport
from fxlib_workers.exchange import ORIGINAL, REALIGNED, Arm, Candidate
from fxlib_workers.trial.failures import CandidateError, TrialError
from fxlib_workers.trial.selection.outcomes import CandidateOutcomes
from fxlib_workers.trial.selection.screening import BitwiseCheck, RunArm, Screening, describe
from fxlib_workers.trial.server_state import UNKNOWN
from fxlib_workers.trial.trainer import StepDigests
from tests.workers.clock import Clock, shown_to
from tests.workers.trial.selection.test_select import outcomes, report_of

GOOD: list[StepDigests] = [{"output": "a", "loss": "b"}, {"output": "c", "loss": "d"}]


class FakeCluster:
    """One trainer, whose arms leave behind what they are said to, and raise where they are said to."""

    def __init__(
        self,
        digests: Mapping[Arm, str] | None = None,
        failing: Mapping[str, Sequence[Arm]] | None = None,
        step_s: float = 0.01,
        errors: Mapping[str, float] | None = None,
        realigned: Mapping[str, float] | None = None,
        *,
        worse: Mapping[Arm, Mapping[str, float]] | None = None,
        parts: Sequence[CompiledPart] = (),
    ) -> None:
        self.clock = Clock()
        self.step_s = step_s
        self.step_trainers = self.trainers = [object()]
        self.digests = digests or {}
        self.failing = failing or {}
        self.errors = errors or {}
        self.realigned = realigned or {}
        self.worse = worse or {}
        self.parts = parts
        self.left: list[object] = []
        self.left_by: list[object] = []
        self.loaded: list[Arm] = []
        self.steps: dict[Arm, int] = {}

    def reset(self, _: float) -> None:
        """Nothing is kept here."""

    def load_candidate(self, arm: Arm, _: bytes, __: Mapping[str, bytes], *depths: int) -> None:
        self.loaded.append(arm)
        if arm in self.failing.get("load_candidate", ()):
            raise CandidateError(arm, Reason.NO_SERVER, "'f' on 'ps0'")

    def ask_of(self, arm: Arm, processes: Any, method: str, *args: object, timeout_s: float) -> list[Any]:
        if method == "time_parts":
            return [self.parts_of(each) for each in processes]
        if method == "leave_parts":
            self.left += args
            self.left_by += processes
            return [None]
        if method == "errors":
            return [self.realigned if arm == REALIGNED else self.worse.get(arm, self.errors)]
        self.clock.now_s += self.step_s
        self.steps[arm] = self.steps.get(arm, 0) + 1
        if arm in self.failing.get(method, ()):
            raise CandidateError(arm, Reason.CANDIDATE_FAILS, "IndexError")
        return [self.digested(arm)]

    def parts_of(self, _: object) -> Sequence[CompiledPart]:
        return self.parts

    def digested(self, arm: Arm) -> StepDigests:
        return {"loss": self.digests.get(arm, "same")}


def screen(
    cluster: FakeCluster, made: CandidateOutcomes, budget_s: float = 60.0, accumulation: int = 1
) -> CandidateOutcomes:
    fields: dict[str, Any] = {"cluster": cluster, "outcomes": made, "report_progress": lambda *_: None}
    options = TrialOptions(budget_s=budget_s)
    with shown_to(cluster.clock, "fxlib_workers.trial.selection.screening"):
        Screening(**fields, options=options, accumulation=accumulation, deadline=budget_s).run()
    return made


def test_all_that_are_the_same_go_on_up_to_three() -> None:
    cluster, made = FakeCluster(), outcomes("a", "b", "c", "d")
    screen(cluster, made)
    assert made.remaining == tuple(cluster.loaded) == ("a", "b", "c")
    assert made.report().candidates[3].verdict == "not tried: at most 3 are, and those were expected to be faster"


@pytest.mark.parametrize("step_s", [0.01, 0.3, 0.5])
def test_a_budget_that_would_suffice_is_named_where_one_does_not(step_s: float) -> None:
    cluster, made = FakeCluster(), outcomes("a", "b", "c")
    cluster.step_s = step_s
    screen(cluster, made, budget_s=10.0)
    assert made.remaining != ("a", "b", "c")
    named = re.search(
        r"the budget of 10 s had no room for it; (\d+) s should have", made.report().candidates[2].verdict
    )
    assert named is not None
    cluster, made = FakeCluster(), outcomes("a", "b", "c")
    cluster.step_s = step_s
    screen(cluster, made, budget_s=float(named[1]))
    assert made.remaining == ("a", "b", "c")


@pytest.mark.parametrize("pipeline, accumulation, steps", [(0, 1, 3), (0, 2, 3), (0, 4, 5), (1, 1, 11), (1, 4, 41)])
def test_the_step_behind_a_push_is_compared_and_under_a_pipeline_behind_so_many_that_each_way_was_taken(
    pipeline: int, accumulation: int, steps: int
) -> None:
    cluster, made = FakeCluster(), outcomes("a")
    (candidate,) = made.candidates.values()
    made = CandidateOutcomes([replace(candidate, report=replace(candidate.report, pipeline=pipeline))])
    screen(cluster, made, accumulation=accumulation)
    assert cluster.steps == {ORIGINAL: 2 * steps, "a": 2 * steps}


def test_a_candidate_that_differs_makes_way_for_the_next() -> None:
    made = screen(FakeCluster(digests={"a": "other"}), outcomes("a", "b", "c", "d"))
    assert made.remaining == ("b", "c", "d")
    assert made.report().candidates[0].verdict.endswith("after step 1: loss")


def test_a_candidate_that_raises_or_cannot_be_served_makes_way_for_the_next() -> None:
    made = screen(FakeCluster(failing={"digest_step": ["a"], "load_candidate": ["b"]}), outcomes("a", "b", "c"))
    assert made.remaining == ("c",)
    assert "IndexError" in made.report().candidates[0].verdict
    assert "'f' on 'ps0'" in made.report().candidates[1].verdict


def test_if_none_is_the_same_the_trial_ends_with_the_first_ones_reason() -> None:
    with pytest.raises(TrialError) as raised:
        screen(FakeCluster(digests={"b": "other"}, failing={"digest_step": ["a"]}), outcomes("a", "b"))
    assert raised.value.reason is Reason.CANDIDATE_FAILS


def test_a_small_budget_has_room_for_one() -> None:
    cluster = FakeCluster()
    screen(cluster, outcomes("a", "b", "c"), budget_s=4.0)
    assert cluster.loaded == ["a"]


def test_a_small_budget_still_looks_for_one_that_is_the_same() -> None:
    made = screen(FakeCluster(digests={"a": "other"}), outcomes("a", "b", "c"), budget_s=4.0)
    assert made.remaining == ("b",)


@pytest.mark.parametrize("step_s, room", [(0.1, 3), (2.0, 2), (3.0, 1)])
def test_slow_steps_leave_room_for_fewer(step_s: float, room: int) -> None:
    made = screen(FakeCluster(step_s=step_s), outcomes("a", "b", "c", "d"), budget_s=80.0)
    assert len(made.remaining) == room


def test_a_budget_that_ends_within_the_comparison_ends_the_trial() -> None:
    cluster = FakeCluster(step_s=30.0)
    with pytest.raises(TrialError) as raised:
        screen(cluster, outcomes("a"))
    assert raised.value.reason is Reason.BUDGET_EXHAUSTED
    assert cluster.clock.now_s <= 60.0 + 30.0


def tolerant(*names: Arm) -> CandidateOutcomes:
    reports = [replace(report_of(name), preserves="tolerance") for name in names]
    return CandidateOutcomes([Candidate(graph=b"", report=report) for report in reports])


def test_a_candidate_within_the_bound_goes_on_with_its_error() -> None:
    made = screen(FakeCluster(digests={"a": "other"}, errors={"loss": 5e-5, "output": 0.0}), tolerant("a"))
    assert made.remaining == ("a",)
    assert made.report("a").max_relative_error == 5e-5
    assert made.report("a").not_reproduced == ()


def test_a_candidate_beyond_the_bound_is_refused_with_name_error_and_bound() -> None:
    with pytest.raises(TrialError, match=r"loss has a relative error of 0\.002, and max_relative_error is 0\.0001"):
        screen(FakeCluster(digests={"a": "other"}, errors={"loss": 2e-3}), tolerant("a"))


def test_what_the_original_does_not_reproduce_has_no_error() -> None:
    made = screen(FakeCluster(errors={"loss": 2e-3}), tolerant("a"))
    assert made.report("a").max_relative_error == 0.0


def test_what_differs_and_cannot_be_measured_is_named() -> None:
    made = screen(FakeCluster(digests={"a": "other"}), tolerant("a"))
    assert made.report("a").not_reproduced == ("after step 1: loss (differs, and is not measured)",)


def test_a_bitwise_candidate_that_passed_has_no_error() -> None:
    assert screen(FakeCluster(), outcomes("a")).report("a").max_relative_error == 0.0


def test_a_bitwise_candidate_may_differ_as_little_as_the_original_does_elsewhere_in_memory() -> None:
    cluster = FakeCluster(digests={"a": "other"}, errors={"loss": 2e-7}, realigned={"loss": 1e-7})
    made = screen(cluster, outcomes("a"))
    assert made.remaining == ("a",)
    assert made.report("a").max_relative_error == 2e-7
    as_little = "loss (from step 1 on, by about as little as the original in other memory)"
    assert made.report("a").not_reproduced == (as_little,)


@pytest.mark.parametrize("realigned", [{}, {"loss": 0.0}, {"loss": 1e-8}, {"output": 1.0}])
def test_a_bitwise_candidate_that_differs_by_more_is_refused(realigned: Mapping[str, float]) -> None:
    cluster = FakeCluster(digests={"a": "other"}, errors={"loss": 2e-7}, realigned=realigned)
    with pytest.raises(TrialError, match="loss"):
        screen(cluster, outcomes("a"))


def test_a_difference_without_an_error_is_no_matter_of_alignment() -> None:
    cluster = FakeCluster(digests={"a": "-0.0"}, errors={"loss": 0.0}, realigned={"loss": 0.0})
    with pytest.raises(TrialError, match="after step 1: loss"):
        screen(cluster, outcomes("a"))


def test_what_alignment_excuses_in_one_candidate_is_held_against_the_next() -> None:
    realigned, far = {"loss": 1e-7}, {"loss": 1e-3}
    cluster = FakeCluster({"a": "other", "b": "wrong"}, errors={"loss": 2e-7}, realigned=realigned, worse={"b": far})
    made = screen(cluster, outcomes("a", "b", "c"))
    assert made.remaining == ("a", "c")
    assert made.report().candidates[1].verdict.endswith("after step 1: loss")
    assert made.report("c").not_reproduced == ()


class InTheLastRun(FakeCluster):
    """A cluster in which candidates differ in the loss, and after six steps in the output, too."""

    @override
    def digested(self, arm: Arm) -> StepDigests:
        is_late = arm not in (ORIGINAL, REALIGNED) and self.steps[arm] > 6
        return {**super().digested(arm), "output": "other" if is_late else "same"}


def test_a_candidate_that_alignment_excuses_runs_once_more() -> None:
    cluster = InTheLastRun(digests={"a": "other"}, errors={"loss": 2e-7}, realigned={"loss": 1e-7})
    with pytest.raises(TrialError, match="after step 1: output"):
        screen(cluster, outcomes("a"))


def test_a_candidate_that_differs_within_the_bound_runs_twice() -> None:
    cluster = FakeCluster(digests={"a": "other"}, errors={"loss": 5e-5})
    screen(cluster, tolerant("a"))
    assert cluster.steps["a"] == 6


def test_a_candidate_beyond_the_bound_runs_once() -> None:
    cluster = FakeCluster(digests={"a": "other"}, errors={"loss": 5e-1})
    with pytest.raises(TrialError):
        screen(cluster, tolerant("a"))
    assert cluster.steps["a"] == 3


FAST, SLOW = (
    CompiledPart(first="conv", nodes=2, backend="x==1"),
    CompiledPart(first="add", nodes=1, backend="x==1", compiled=False, why="it is slow"),
)


def lowered(name: Arm, others: int = 0) -> Candidate:
    """A candidate with parts for a backend, and as many changes by another pass."""
    passes = tuple(PassReport(name=name, changes=count, seconds=0.0) for name, count in (("lower", 2), ("cse", others)))
    graph = wire.serialize(wire.encode(fxlib.capture(nn.ReLU())).graph)
    return Candidate(graph=graph, report=replace(report_of(name), passes=passes))


@pytest.mark.parametrize(
    "parts, others, remains",
    [([FAST, SLOW], 0, True), ([SLOW], 1, True), ([SLOW], 0, False)],
    ids=["one is faster", "another pass did something", "nothing is left"],
)
def test_parts_that_are_not_faster_stay_as_they_are_and_where_that_is_all_the_candidate_goes(
    parts: Sequence[CompiledPart], others: int, remains: bool
) -> None:
    cluster, made = FakeCluster(parts=parts), outcomes("b")
    screen(cluster, found := CandidateOutcomes([lowered("a", others), made.candidates["b"]]))
    assert (cluster.left, "a" in found.remaining) == ([["add"]], remains)
    assert found.report("a").parts == tuple(parts)
    assert remains or "no part of it is faster compiled: it is slow" in found.report("a").candidates[0].verdict


class SlowerInTheSecond(FakeCluster):
    """Two trainers without collectives, of which the second one's parts are slower compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.trainers = [*self.step_trainers, object()]

    @override
    def parts_of(self, process: object) -> Sequence[CompiledPart]:
        return [FAST, replace(SLOW, compiled=process is self.trainers[0])]


def test_all_trainers_run_the_same_parts_compiled() -> None:
    cluster = SlowerInTheSecond()
    screen(cluster, found := CandidateOutcomes([lowered("a")]))
    assert (cluster.left, cluster.left_by) == ([["add"]], cluster.trainers)
    assert found.report("a").parts == (FAST, SLOW)


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


def test_the_differences_of_both_runs_count_where_one_is_no_end() -> None:
    check = BitwiseCheck(Runs([GOOD], [changed(0, loss="x"), changed(0, loss="x", output="y")]))
    assert check.difference("candidate", lambda _: None) == {(0, "loss"), (0, "output")}


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
