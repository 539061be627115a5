"""What a trial does when a candidate ends its processes, in a cluster of none, and what it says of its figures."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import pytest
import torch

from fxlib import TrialOptions, Workload
from fxlib.reasons import Reason
from fxlib.spec.report import PassReport, Report, Timeline
from fxlib.spec.workload import MAIN
from fxlib_workers.exchange import ORIGINAL, Arm, Candidate
from fxlib_workers.trial.failures import LostCandidateError, TrialError
from fxlib_workers.trial.run_trial import (
    TrialRequest,
    TrialResult,
    _recorded_steps,
    reconciled,
    run_trial,
    shared_cores_note,
)
from fxlib_workers.trial.selection.speed import Round, Speed
from fxlib_workers.trial.trainer import EncodedProgram
from tests.workers.clock import Clock, shown_to
from tests.workers.trial.selection.test_screening import FakeCluster
from tests.workers.trial.selection.test_select import report_of


def test_a_bound_that_a_measured_step_went_below_is_not_told() -> None:
    told = Report(decision="adopt", reason=None, explanation="", bound_s=0.04, pipeline_bound_s=0.03, pipeline=2)
    assert reconciled(told, 0.05, 0.035) == told  # a loop is bound by that of loops
    broken = reconciled(replace(told, pipeline=0), 0.05, 0.03)
    assert (broken.bound_s, broken.pipeline_bound_s) == (None, 0.03)
    (note,) = broken.notes
    assert "no bound is told" in note
    assert "25% less" in note
    assert "saves local work" in note
    (stale,) = reconciled(replace(told, pipeline=0), 0.03, 0.05).notes
    assert "saves local work" not in stale
    assert reconciled(told, 0.05, 0.02).pipeline_bound_s is None


def test_it_is_told_from_a_tenth_on() -> None:
    assert shared_cores_note(0.05) == ()
    (note,) = shared_cores_note(0.31)
    assert "cores were shared: a trainer waited for one in 31% of the measured time" in note


class MortalCluster(FakeCluster):
    """A cluster whose candidates take the times that they are given; one ends the processes where it is told to."""

    made: ClassVar[list[MortalCluster]] = []
    step_seconds: ClassVar[Mapping[Arm, float]] = {}
    deadly: ClassVar[Mapping[Arm, str]] = {}
    instructions: ClassVar[tuple[str, ...]] = ("avx2",)
    one_thread: ClassVar[float] = 1.0
    """The times as long that a step takes on one thread."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.trainers = self.step_trainers
        self.made.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainers = []

    def prepare(self) -> None:
        assert self.trainers

    def settle_buckets(self, _: float) -> None:
        pass

    def settle_inputs(self, _: float) -> None:
        pass

    def switch_program(self, *_: object) -> None:
        pass

    def ask(self, _: object, method: str, *args: object, timeout_s: float) -> list[Any]:
        return [{"samples": [1.0], "run_delay_share": 0.0, "instructions": self.instructions}[method]]

    def ask_of(self, arm: Arm, processes: object, method: str, *args: Any, timeout_s: float) -> list[Any]:
        if self.deadly.get(arm) == method:
            raise LostCandidateError(arm, TrialError(Reason.TRIAL_DIED, "trainer0: Segmentation fault (signal 11)"))
        if method == "block":
            _, steps, *threads = args
            of_thread = self.one_thread if threads == [1] else 1.0
            return [steps * self.step_seconds[arm] * of_thread * random.uniform(0.99, 1.01)]
        if method == "timelines":
            return [[Timeline(spans=(), step_s=self.step_seconds[arm])]]
        return super().ask_of(arm, processes, method, *args, timeout_s=timeout_s)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[MortalCluster]:
    monkeypatch.setattr("fxlib_workers.trial.run_trial.ClusterRun", MortalCluster)
    monkeypatch.setattr(MortalCluster, "made", [])
    monkeypatch.setattr(MortalCluster, "step_seconds", {ORIGINAL: 0.02, "slow": 0.015, "fast": 0.01, "deadly": 0.001})
    return MortalCluster


def run(
    *names: str, programs: Collection[str] = (MAIN,), threads: Sequence[int] = (), int8: str = ""
) -> dict[str, TrialResult]:
    workload, options = Workload.describe([torch.ones(1)], mode="forward", threads=2), TrialOptions()
    program = EncodedProgram(original=b"", workload=b"", blobs={})
    passes = {int8: (PassReport(name="quantize", changes=1, seconds=0.0),)}
    reports = [replace(report_of(name), passes=passes.get(name, ())) for name in names]
    candidates = [Candidate(graph=b"", report=each) for each in reports]
    asked = {
        name: TrialRequest(workload=workload, options=options, program=program, candidates=candidates, threads=threads)
        for name in programs
    }
    return run_trial(asked, Any, lambda *_: None, lambda: False)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["digest_step", "block", "timelines"])
def test_a_candidate_that_ends_the_processes_is_named_and_the_others_are_tried_in_new_ones(
    cluster: type[MortalCluster], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(cluster, "deadly", {"deadly": method})
    (result,) = run("slow", "deadly", "fast").values()
    assert (result.report.decision, result.chosen.name) == ("adopt", "fast")
    assert len(cluster.made) == 2
    slow, deadly, fast = result.report.candidates
    assert "trainer0: Segmentation fault (signal 11)" in deadly.verdict
    assert slow.gain is not None
    assert fast.gain == result.report.gain


def test_a_program_whose_candidates_all_end_the_processes_keeps_its_original_and_the_next_one_goes_on(
    cluster: type[MortalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "deadly", {"deadly": "block"})
    found = run("deadly", programs=(MAIN, "eval"))
    assert [(each.report.decision, each.report.reason) for each in found.values()] == [
        ("keep_original", Reason.TRIAL_DIED)
    ] * 2
    assert len(cluster.made) == 2


def test_a_program_whose_comparison_takes_its_share_of_the_budget_leaves_the_rest_to_the_next(
    cluster: type[MortalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    class Slow(cluster):  # type: ignore[misc, valid-type]
        def __init__(self, *_: object) -> None:
            super().__init__()
            self.clock, self.step_s = clock, 8.0

        def switch_program(self, *_: object) -> None:
            self.step_s = 0.01

    monkeypatch.setattr("fxlib_workers.trial.run_trial.ClusterRun", Slow)
    at = "fxlib_workers.trial."
    looking = ("run_trial", "selection.screening", "selection.select", "selection.speed")
    with shown_to(clock, *(at + name for name in looking)):
        found = run("fast", programs=(MAIN, "eval"))
    assert [(each.report.decision, each.report.reason) for each in found.values()] == [
        ("keep_original", Reason.BUDGET_EXHAUSTED),
        ("adopt", Reason.FASTER),
    ]


def test_processes_are_not_started_anew_for_ever(cluster: type[MortalCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"deadly {index}" for index in range(9)]
    monkeypatch.setattr(cluster, "deadly", dict.fromkeys(names, "digest_step"))
    (result,) = run(*names).values()
    assert (result.report.reason, len(cluster.made)) == (Reason.TRIAL_DIED, 4)


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_what_is_adopted_is_tried_with_fewer_threads_which_is_told_and_left_to_the_launcher(
    cluster: type[MortalCluster], monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    monkeypatch.setattr(cluster, "one_thread", times)
    (result,) = run("fast", threads=(1,)).values()
    _, row = result.report.candidates
    assert row.name == "fast, 1 thread"
    assert ("+" if times < 1.0 else "-") in row.verdict
    assert "QPS beside 2 threads: a graph cannot set threads" in row.verdict
    assert bool(result.report.notes) == (times < 1.0)
    assert all("call torch.set_num_threads(1), and ask with threads=1" in each for each in result.report.notes)
    assert result.report.decision == "adopt"


def test_a_number_of_threads_that_ends_the_processes_takes_nothing_from_what_was_found(
    cluster: type[MortalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_of(self: MortalCluster, arm: Arm, processes: object, method: str, *args: Any, timeout_s: float) -> Any:
        if args[2:] == (1,):
            raise LostCandidateError(arm, TrialError(Reason.TRIAL_HUNG, "block"))
        return plain(self, arm, processes, method, *args, timeout_s=timeout_s)

    plain = cluster.ask_of
    monkeypatch.setattr(cluster, "ask_of", ask_of)
    (result,) = run("fast", threads=(1,)).values()
    assert (result.report.decision, len(cluster.made)) == ("adopt", 1)
    assert "made no progress within its time limit: block" in result.report.candidates[1].verdict


@pytest.mark.parametrize("accumulation, pairs, steps", [(1, 12, 5), (2, 12, 4), (8, 12, 8), (1, 0, 1), (8, 0, 8)])
def test_pushes_have_their_share_of_what_is_recorded(accumulation: int, pairs: int, steps: int) -> None:
    speed = Speed(candidate="fast", confidence=0.95, steps=1)
    for _ in range(pairs):
        speed.add(Round(seconds={ORIGINAL: 0.02, "fast": 0.01}, samples=1))
    assert _recorded_steps(speed, 60.0, accumulation) == steps


NO_INT8 = "on a processor without instructions that add up products of 8-bit integers"


def test_int8_layers_that_are_not_faster_are_told_with_what_the_processor_lacks(
    cluster: type[MortalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "step_seconds", {ORIGINAL: 0.02, "slower": 0.03, "fast": 0.01})
    (kept,) = run("slower", int8="slower").values()
    assert (kept.report.decision, kept.report.reason) == ("keep_original", Reason.NOT_FASTER)
    assert NO_INT8 in kept.report.explanation
    (other,) = run("slower", "fast", int8="slower").values()
    assert (other.report.decision, other.chosen.name) == ("adopt", "fast")
    assert any(NO_INT8 in each for each in other.report.notes)
    (adopted,) = run("fast", int8="fast").values()
    assert (adopted.report.decision, adopted.report.notes) == ("adopt", ())
    monkeypatch.setattr(cluster, "instructions", ("avx2", "avx512_vnni"))
    (kept,) = run("slower", int8="slower").values()
    assert NO_INT8 not in kept.report.explanation
