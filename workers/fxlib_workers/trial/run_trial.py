"""One trial from end to end: start, profile, sameness, choice, speed, timelines, and the decision."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from fxlib.reasons import Reason
from fxlib.runtime import exposed_s
from fxlib.spec.job import TrialOptions
from fxlib.spec.profile import Profile
from fxlib.spec.report import WAYS, CallReport, CandidateReport, Report, Timeline, interval
from fxlib.spec.workload import MAIN, Workload
from fxlib.utils.hardware import FOR_INT8
from fxlib.utils.text import seconds
from fxlib_workers import logs
from fxlib_workers.exchange import ORIGINAL, Arm, Candidate, ReportProgress
from fxlib_workers.trial.cluster_run import ClusterRun
from fxlib_workers.trial.failures import LostCandidateError, TrialError
from fxlib_workers.trial.nodes import Nodes
from fxlib_workers.trial.selection.outcomes import CandidateOutcomes
from fxlib_workers.trial.selection.screening import Screening
from fxlib_workers.trial.selection.select import Selection
from fxlib_workers.trial.selection.speed import Blocks, RunBlock, Speed, measure
from fxlib_workers.trial.trainer import MOST_LEAD, EncodedProgram

_LOG: Final = logs.Log(__name__)

_BY_PROCESSOR: Final = frozenset({"bfloat16", "lower", "quantize"})
"""The names of the passes whose gain depends on the processor's instructions."""

_NO_INT8: Final = (
    "int8 layers were tried and are not adopted, on a processor without instructions that add up products of 8-bit "
    f"integers ({', '.join(sorted(FOR_INT8))})"
)
_MOST_LOST: Final = 3
"""The number of times that a trial restarts in new processes, without the candidate that ended the earlier ones."""

_FIRST_SHARE: Final = 0.5
"""The share of the budget for the job's own step if there are also variants."""

_RECORDED_STEPS: Final = 5
"""The largest number of steps of an arm that are recorded as timelines."""

_RECORDING_SHARE: Final = 0.05
"""The share of the budget that recording may take in addition to the budget and to one update by each arm."""

_MUCH_EXPOSED: Final = 0.1
"""The share of a step from which on a call's exposed time is given a reason."""

_BLOCK_SLACK: Final = 20
"""The multiple of its expected seconds after which, plus the time limit of a single step, a block counts as hung."""

_NOTEWORTHY_DELAY: Final = 0.1
"""The share of the measured time from which on a trainer's waiting for a core is reported."""

_BUDGET_TO_PROFILE_S: Final = 10.0
"""The least budget in seconds for a profile: with less, the measurement would lack the time that a profile takes."""

_PROFILE_SHARE: Final = 0.1
"""The share of the budget for the steps of a profile, and for planning again, which takes as long as the first time."""

_PROFILE_SLACK: Final = 5
"""The multiple of its expected seconds after which a profile counts as hung."""

_PROBES_S: Final = 30.0
"""The longest time in seconds that a profile's probing of the servers may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """A request to run the trial of one program.

    Attributes:
        workload: how a step runs.
        options: the options of the trial.
        program: the original, its workload and their blobs, encoded.
        candidates: the candidates planned without a measurement, the most promising first.
        plan_anew: a function that takes the measured profile and returns candidates planned by it; None if the
            candidates stay as they are.
        profile: the profile from which remote functions that no server has are replayed.
        threads: the numbers of threads, in addition to the workload's own, with which to try the chosen program.
    """

    workload: Workload
    options: TrialOptions
    program: EncodedProgram
    candidates: Sequence[Candidate]
    plan_anew: Callable[[Profile], Sequence[Candidate]] | None = None
    profile: Profile | None = None
    threads: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        report: the answer.
        chosen: the candidate that the report is about.
    """

    report: Report
    chosen: Candidate


def run_trial(
    requests: Mapping[str, TrialRequest],
    nodes: Nodes,
    report_progress: ReportProgress,
    interrupted: Callable[[], bool],
) -> dict[str, TrialResult]:
    """Run a trial of each program of a job, one after another in the same processes, and return the results by name.

    A result's report says what the passes did for the chosen candidate, and what the trial found. The programs share
    the budget of the first. A candidate that takes processes with it, or hangs, is left out, and the programs that are
    undecided by then are tried again in new processes, a few times. A program that ends the trial for good also ends it
    for later programs.

    Args:
        requests: the programs by name, at least one; all have the same servers and as many trainers.
        nodes: the nodes of Ray on which it runs.
        report_progress: the function that passes progress on.
        interrupted: a function that returns whether the trial has to end at once.

    Raises:
        InterruptedTrialError: `interrupted` returned True.
    """
    trials = {name: _Trial(each, _named(name, report_progress)) for name, each in requests.items()}
    results: dict[str, TrialResult] = {}
    first = next(iter(requests.values()))
    report_progress("sameness", "starting trainers and parameter servers")
    budget = _Budget(first.options.budget_s, len(requests))
    try:
        for losses_left in reversed(range(_MOST_LOST + 1)):
            start = time.monotonic()
            with ClusterRun(nodes, first.workload, first.program, interrupted, first.profile) as cluster:
                budget.resume()
                lost = _run(trials, results, cluster, budget, start)
            if lost is None or results.keys() == trials.keys():
                break
            if not losses_left:
                raise lost
            report_progress("sameness", f"starting anew without the candidate {lost.candidate!r}: {lost}")
    except TrialError as error:
        for name, trial in trials.items():
            if name not in results:
                results[name] = trial.decide(None, error.reason, error.detail)
    for name, result in results.items():
        _LOG.debug("trial ended", program=name, chosen=result.chosen.name, **result.report.phase_seconds)
    return results


def _run(
    trials: Mapping[str, _Trial],
    results: dict[str, TrialResult],
    cluster: ClusterRun,
    budget: _Budget,
    start: float,
) -> LostCandidateError | None:
    """Run the trials that have no result yet, and return the loss after which the processes cannot continue.

    Raises:
        TrialError: the trial is over for all of them.
    """
    first = next(iter(trials))
    for name in [each for each in trials if each not in results]:
        trial, lost, result = trials[name], None, None
        try:
            result = trial.run(cluster, start if name == first else None, budget.next())
        except LostCandidateError as error:
            lost, result = error, trial.lose(error)
        except TrialError as error:
            if not error.survived:
                raise
            result = trial.decide(None, error.reason, error.detail)
        if result is not None:
            results[name] = result
            budget.end_program()
        if lost is not None:
            return lost
    return None


class _Budget:
    """Divides the budget: the first program may take half of it, and the rest is divided equally.

    A lost attempt takes nothing from it.
    """

    def __init__(self, budget_s: float, programs: int) -> None:
        self._left_s = budget_s
        self._ends = math.inf
        self._left = programs
        self._first = True

    def next(self) -> float:
        """Return the seconds for the next program.

        Raises:
            TrialError: nothing of the budget is left.
        """
        self._left_s = self._ends - time.monotonic()
        if self._left_s <= 0:
            raise TrialError(Reason.BUDGET_EXHAUSTED, "", survived=True)
        return self._left_s * (1.0 if self._left == 1 else _FIRST_SHARE if self._first else 1.0 / self._left)

    def end_program(self) -> None:
        """Continue with the next program."""
        self._left, self._first = self._left - 1, False

    def resume(self) -> None:
        """Let the rest of the budget run from now on."""
        self._ends = time.monotonic() + self._left_s


def _named(name: str, report_progress: ReportProgress) -> ReportProgress:
    if name == MAIN:
        return report_progress
    return lambda phase, message, progress=None: report_progress(phase, f"{name}: {message}", progress)


class _Trial:
    """The trial of one program, phase by phase."""

    def __init__(self, request: TrialRequest, report_progress: ReportProgress) -> None:
        self.request = request
        self._options = request.options
        self._report_progress = report_progress
        self._outcomes = CandidateOutcomes(request.candidates)
        self._planned = False
        self._phase_seconds: dict[str, float] = {}
        self._ended = 0.0

    def run(self, cluster: ClusterRun, start: float | None, budget_s: float) -> TrialResult:
        """Run the trial.

        Args:
            cluster: the processes of the trial.
            start: the time at which they began to start; None if they have run another program already.
            budget_s: the seconds for this program.
        """
        begun = time.monotonic() if start is None else start
        if start is None:
            cluster.switch_program(self.request.workload, self.request.program, self.request.profile)
        cluster.prepare()
        cluster.settle_buckets(self._options.step_timeout_s)
        self._options = replace(self._options, budget_s=budget_s)
        started = self._end_phase("start", begun)
        deadline = started + budget_s
        planned = self._plan(cluster, started)
        Screening(
            cluster=cluster,
            outcomes=self._outcomes,
            options=self._options,
            accumulation=self.request.workload.accumulation,
            deadline=deadline,
            report_progress=self._report_progress,
        ).run()
        checked = self._end_phase("sameness", planned)
        selection = self._selection(cluster, deadline)
        ranking, steps = self._outcomes.remaining, None
        if len(ranking) > 1:
            ranking, steps = selection.choose()
            checked = self._end_phase("choice", checked)
        speed, verdict = selection.confirm(ranking, steps)
        measured = self._end_phase("qps", checked)
        timelines = self._timelines(cluster, speed)
        self._end_phase("timeline", measured)
        result = self.decide(speed.candidate, verdict)
        shares = cluster.ask(cluster.trainers, "run_delay_share", timeout_s=self._options.step_timeout_s)
        report = replace(
            result.report,
            notes=shared_cores_note(max(shares)),
            instructions=self._instructions(cluster, result.report),
            staleness=self._staleness(cluster, result.report, speed.candidate),
        )
        report = self._about_int8(cluster, _with_speed(_with_timelines(report, *timelines), speed))
        return replace(result, report=self._with_threads(cluster, report, speed, deadline))

    def decide(self, chosen: str | None, reason: Reason, detail: str = "") -> TrialResult:
        """Return the result for the chosen candidate, or for the most promising one if none was chosen."""
        candidate = self._outcomes.candidates[chosen or next(iter(self._outcomes.candidates))]
        report = self._outcomes.report(candidate.name)
        report = replace(
            report,
            decision="adopt" if reason is Reason.FASTER else "keep_original",
            reason=reason,
            explanation=reason.sentence(detail),
            phase_seconds={**report.phase_seconds, **self._phase_seconds},
        )
        return TrialResult(report=report, chosen=candidate)

    def lose(self, error: LostCandidateError) -> TrialResult | None:
        """Remove a candidate that ended the processes, and return the result if none is left."""
        self._end_phase("sameness", self._ended)  # most are lost in this phase, in which they run for the first time
        try:
            self._outcomes.fail(error.candidate, error)
        except TrialError as over:
            return self.decide(None, over.reason, over.detail)
        return None

    def _end_phase(self, phase: str, since: float) -> float:
        now = time.monotonic()
        self._phase_seconds[phase] = self._phase_seconds.get(phase, 0.0) + now - since
        self._ended = now
        return now

    def _plan(self, cluster: ClusterRun, since: float) -> float:
        """Measure the original and get candidates planned by its profile, if that is wanted and there is time."""
        planned_s = self.request.candidates[0].report.phase_seconds.get("rewrite", 0.0)
        rich = self._options.budget_s >= _BUDGET_TO_PROFILE_S and planned_s < _PROFILE_SHARE * self._options.budget_s
        if self.request.plan_anew is None or self._planned or not rich:
            return since
        self._planned = True
        self._report_progress("profile", "measuring calls, servers and local work of the original")
        seconds, limit_s = _PROFILE_SHARE * self._options.budget_s, self._options.step_timeout_s
        allowed_s = 2 * limit_s + _PROFILE_SLACK * seconds + _PROBES_S
        try:
            # A step that hangs is found here, within the time limit of one step.
            cluster.ask_of(ORIGINAL, cluster.step_trainers, "block", 0, 1, timeout_s=limit_s)
            profile, *_ = cluster.ask(
                cluster.step_trainers, "profile", seconds, timeout_s=allowed_s, reason=Reason.ORIGINAL_FAILS
            )
        except TrialError as error:
            if not error.survived:
                raise
            # If the original fails, the comparison will show it again.
            self._report_progress("profile", f"not measured: {error.detail}")
            return self._end_phase("profile", since)
        self._report_progress("profile", "planning by what was measured")
        self._outcomes = CandidateOutcomes(self.request.plan_anew(profile))
        return self._end_phase("profile", since)

    def _instructions(self, cluster: ClusterRun, report: Report) -> tuple[str, ...]:
        """Return the instructions that all trainers have, if the candidate is only for processors like theirs."""
        ran = _changed_by(report) & _BY_PROCESSOR
        if not ran - {"lower"} and not any(each.compiled for each in report.parts):
            return ()
        return self._of_all_trainers(cluster)

    def _of_all_trainers(self, cluster: ClusterRun) -> tuple[str, ...]:
        first, *others = cluster.ask(cluster.trainers, "instructions", timeout_s=self._options.step_timeout_s)
        return tuple(each for each in first if all(each in other for other in others))

    def _staleness(self, cluster: ClusterRun, report: Report, candidate: str) -> Mapping[int, int]:
        """Return how many reads of a candidate with stale reads missed how many steps' pushes."""
        if not report.stale:
            return {}
        limit_s = self._options.step_timeout_s
        found = cluster.ask_of(candidate, cluster.step_trainers, "staleness", timeout_s=limit_s)
        return dict(sum(map(Counter, found), Counter[int]()))

    def _about_int8(self, cluster: ClusterRun, report: Report) -> Report:
        """Say so if int8 layers were tried in vain on processors without instructions for them."""
        adopted = report.decision == "adopt" and "quantize" in _changed_by(report)
        tried = any("quantize" in _changed_by(each.report) for each in self._outcomes.candidates.values())
        if adopted or not tried or not FOR_INT8.isdisjoint(self._of_all_trainers(cluster)):
            return report
        if report.reason is Reason.NOT_FASTER:
            return replace(report, explanation=f"{report.explanation}; {_NO_INT8}")
        return replace(report, notes=(*report.notes, _NO_INT8))

    def _selection(self, cluster: ClusterRun, deadline: float) -> Selection:
        limit_s, expected_s = self._options.step_timeout_s, 0.0
        cluster.reset(limit_s)
        cluster.settle_inputs(limit_s)
        begin = time.monotonic()

        def run_block(arm: Arm, first: int, steps: int) -> float:
            nonlocal expected_s
            allowed_s = limit_s * self.request.workload.accumulation + _BLOCK_SLACK * expected_s
            longest_s: float = max(cluster.ask_of(arm, cluster.trainers, "block", first, steps, timeout_s=allowed_s))
            expected_s = max(expected_s, 2 * longest_s)  # the next block may have twice the steps
            return longest_s

        def progress(phase: str, line: str) -> None:
            spent = (time.monotonic() - begin) / max(deadline - begin, 1e-9)
            self._report_progress(phase, line, min(1.0, spent))

        return Selection(
            self._blocks(cluster, run_block),
            self._outcomes,
            self._options,
            deadline=deadline,
            recover=lambda: cluster.reset(limit_s),
            progress=progress,
        )

    def _blocks(self, cluster: ClusterRun, run_block: RunBlock) -> Blocks:
        limit_s, trainers = self._options.step_timeout_s, len(cluster.trainers)
        (samples,) = cluster.ask(cluster.trainers[:1], "samples", timeout_s=limit_s)
        return Blocks(run_block, [trainers * each for each in samples], self.request.workload.accumulation)

    def _with_threads(self, cluster: ClusterRun, report: Report, speed: Speed, deadline: float) -> Report:
        """Try the returned program with other numbers of threads, and report the outcome.

        No graph can set the number of threads, and fxlib does not, since it is the whole process's. So none is ever
        adopted.
        """
        arm = speed.candidate if report.decision == "adopt" else ORIGINAL
        usual, limit_s = self.request.workload.threads, self._options.step_timeout_s
        compile_s = 2 * sum(each.compile_s for each in report.parts if each.compiled and arm != ORIGINAL)
        allowed_s = limit_s * self.request.workload.accumulation + compile_s + _BLOCK_SLACK
        rows, notes = list[CandidateReport](), list[str]()
        for threads in self.request.threads:
            name = f"{arm}, {_in_words(threads)}"
            if time.monotonic() + compile_s > deadline:
                rows.append(CandidateReport(name=name, verdict="not tried: the budget had no room for it"))
                continue
            self._report_progress("qps", f"running {name!r}")

            def run_block(each: Arm, first: int, steps: int, threads: int = threads) -> float:
                of = first, steps, 0 if each == ORIGINAL else threads
                longest_s: float = max(cluster.ask_of(arm, cluster.trainers, "block", *of, timeout_s=allowed_s))
                return longest_s

            try:
                blocks = self._blocks(cluster, run_block)
                found, verdict = measure(blocks, self._options, candidate=name, deadline=deadline)
            except TrialError as error:
                rows.append(CandidateReport(name=name, verdict=str(error)))
                break
            faster = f"{interval(found.gain)} QPS beside {_in_words(usual)}" if found.pairs else "no figure"
            rows.append(CandidateReport(name=name, verdict=f"{faster}: a graph cannot set threads"))
            if verdict is Reason.FASTER:
                notes.append(
                    f"with {_in_words(threads)} it is faster still ({interval(found.gain)} QPS): threads are the "
                    f"whole process's, so fxlib sets none; call torch.set_num_threads({threads}), and ask with "
                    f"threads={threads}"
                )
        return replace(report, candidates=(*report.candidates, *rows), notes=(*report.notes, *notes))

    def _timelines(self, cluster: ClusterRun, speed: Speed) -> tuple[list[Timeline], list[Timeline]]:
        steps = _recorded_steps(speed, self._options.budget_s, self.request.workload.accumulation)
        limit_s = self._options.step_timeout_s * (steps + MOST_LEAD + 1)
        original, candidate = (
            cluster.ask_of(arm, cluster.step_trainers, "timelines", steps, timeout_s=limit_s)[0]
            for arm in (ORIGINAL, speed.candidate)
        )
        return original, candidate


def _changed_by(report: Report) -> set[str]:
    return {each.name for each in report.passes if each.changes}


def _recorded_steps(speed: Speed, budget_s: float, accumulation: int) -> int:
    """Return how many steps of each arm to record: few if they take long, or were never measured.

    They are a multiple of the steps for each update, so that pushes have their share.
    """
    if not speed.pairs:
        return accumulation
    both_s = sum(sum(seconds) for seconds in speed.seconds.values()) / (speed.pairs * speed.steps)
    most = min(_RECORDED_STEPS, int(_RECORDING_SHARE * budget_s / both_s))
    return accumulation * max(1, most // accumulation)


def _with_timelines(report: Report, before: Sequence[Timeline], after: Sequence[Timeline]) -> Report:
    return replace(
        report,
        timeline_original=_typical(before),
        timeline_optimized=_typical(after),
        calls=_with_exposure(report.calls, before, after),
    )


def _with_speed(report: Report, speed: Speed) -> Report:
    if not speed.pairs:
        return report
    original_s, candidate_s = (sum(each) / speed.pairs / speed.steps for each in speed.seconds.values())
    compile_s = sum(each.compile_s for each in report.parts if each.compiled)
    pays = compile_s > 0.0 and candidate_s < original_s
    return replace(
        reconciled(report, *(median(each) / speed.steps for each in speed.seconds.values())),
        pays_after_steps=math.ceil(compile_s / (original_s - candidate_s)) if pays else None,
        qps_original=speed.qps(ORIGINAL),
        qps_optimized=speed.qps(speed.candidate),
        gain=speed.gain,
        blocks=2 * speed.pairs,
    )


def reconciled(report: Report, original_s: float, candidate_s: float) -> Report:
    """Remove a bound that a measured step fell below.

    The figures behind the bound were slower than in this trial, or the candidate's passes save work of the original.
    """
    alone_s = original_s if report.pipeline else min(original_s, candidate_s)
    if report.bound_s is not None and alone_s < report.bound_s:
        note = _below("any schedule", report.bound_s, alone_s, of_candidate=original_s >= report.bound_s)
        report = replace(report, bound_s=None, timeline_bound=None, notes=(*report.notes, note))
    if report.pipeline and report.pipeline_bound_s is not None and candidate_s < report.pipeline_bound_s:
        note = _below("a pipeline", report.pipeline_bound_s, candidate_s, of_candidate=True)
        report = replace(report, pipeline_bound_s=None, pipeline_limit="", notes=(*report.notes, note))
    return report


def _below(what: str, bound_s: float, step_s: float, *, of_candidate: bool) -> str:
    drift = f"a step took {seconds(step_s)} here, {1 - step_s / bound_s:.0%} less"
    why = "the profile was made on slower servers or a busier machine, so predictions are too long as well"
    saving = "the candidate saves local work, which the bound takes as the original has it, or "
    return (
        f"no bound is told: by the least that the profile saw, {what} takes {seconds(bound_s)}, and {drift}; "
        f"{saving if of_candidate else ''}{why}"
    )


def _typical(timelines: Sequence[Timeline]) -> Timeline:
    """Return the step of median length."""
    return sorted(timelines, key=lambda timeline: timeline.step_s)[len(timelines) // 2]


def _with_exposure(
    calls: Sequence[CallReport], before: Sequence[Timeline], after: Sequence[Timeline]
) -> tuple[CallReport, ...]:
    way_of = {span.name: way for way in WAYS for each in after for span in each.spans if span.kind == way}
    exposed_before, exposed_after = [exposed_s(each) for each in before], [exposed_s(each) for each in after]
    step_s = fmean(each.step_s for each in after)
    return tuple(
        _explained(
            replace(
                call,
                exposed_before_s=fmean(each.get(call.node, 0.0) for each in exposed_before),
                exposed_after_s=fmean(each.get(call.node, 0.0) for each in exposed_after),
                way=way_of.get(call.node, ""),
            ),
            step_s,
        )
        for call in calls
    )


def _explained(call: CallReport, step_s: float) -> CallReport:
    """Give a reason if a call exposes much of the step although the cost model does not expect it."""
    unforeseen = call.limited_by is None and (call.exposed_after_s or 0.0) > _MUCH_EXPOSED * step_s
    return replace(call, limited_by=Reason.LIMITED_BEYOND_MODEL) if unforeseen else call


def _in_words(threads: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)}"


def shared_cores_note(share: float) -> tuple[str, ...]:
    """Return a note that a trainer waited for a core for this share of the measured time, unless the share is small."""
    if share < _NOTEWORTHY_DELAY:
        return ()
    delay = f"cores were shared: a trainer waited for one in {share:.0%} of the measured time"
    return (f"{delay}, so the gain may be another on a machine of its own",)
