"""How a trial on a real Ray comes to one of several candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest

import fxlib
from fxlib import TrialOptions
from fxlib.reasons import Reason
from fxlib.spec.profile import Profile
from fxlib.spec.workload import MAIN
from fxlib_workers.exchange import JobFolder
from fxlib_workers.rewrite.answer_worker import rewrite
from fxlib_workers.trial.driver import TrialDriver
from tests.workers.cases import Lookups, Wrong, candidate_of, descendants, fill, lookup_workload, request
from tests.workers.trial_settings import BRISK, MEASURED, PATIENT

pytestmark = pytest.mark.cluster


def job_with_candidates(path: Path, options: TrialOptions) -> JobFolder:
    """A job with three candidates: one that is wrong, one that is the original, and a faster one, in this order."""
    model = Lookups()
    folder = fill(path, model, lookup_workload(), options)
    (faster,) = folder.candidates()
    wrong, same = candidate_of("wrong", fxlib.capture(Wrong())), candidate_of("same", fxlib.capture(model))
    folder.write_rewrite(wrong.report, [wrong, same, faster])
    return folder


def test_the_better_of_several_candidates_is_chosen_and_confirmed(trials: TrialDriver, tmp_path: Path) -> None:
    folder = job_with_candidates(tmp_path / "job", PATIENT)
    phases: list[str] = []
    report = trials.run(folder, lambda phase, *_: phases.append(phase), lambda: None)
    assert (report.decision, report.reason) == ("adopt", Reason.FASTER)
    assert list(dict.fromkeys(phases)) == ["sameness", "choice", "qps"]
    wrong, same, faster = report.candidates
    assert "differ from the original's: after step 1" in wrong.verdict
    assert same.verdict.startswith("passed over")
    assert same.gain is not None
    assert same.gain.low < 0.05
    assert faster.verdict.startswith("chosen, and measured anew")
    assert faster.gain == report.gain
    assert folder.rewritten.read_bytes() == folder.candidates()[2].graph
    assert [call.action for call in report.calls] == ["moved"] * 4
    assert all(call.exposed_after_s is not None for call in report.calls)


def test_candidates_are_planned_by_what_the_trial_measured(trials: TrialDriver, tmp_path: Path) -> None:
    folder = request(tmp_path / "job", Lookups(), lookup_workload(), BRISK)
    rewrite(folder)
    planned: list[Profile | None] = []

    def plan() -> None:
        planned.append(folder.profile())
        rewrite(folder)

    phases: list[str] = []
    report = trials.run(folder, lambda phase, *_: phases.append(phase), lambda: None, {MAIN: plan})
    assert report.reason is Reason.FASTER, report.explanation
    assert list(dict.fromkeys(phases)) == ["sameness", "profile", "choice", "qps"]
    (profile,) = planned
    assert profile is not None
    assert {call.call for call in profile.calls} == {"lookup", "lookup_1", "lookup_2", "lookup_3"}
    assert all(call.issue_s + call.service_s.median >= 0.005 for call in profile.calls)
    assert 0.0 < report.phase_seconds["profile"] < 20.0
    assert all(each.predicted_step_s for each in report.candidates)


def test_a_job_cancelled_while_it_is_planned_anew_leaves_the_driver_alive(trials: TrialDriver, tmp_path: Path) -> None:
    folder = request(tmp_path / "job", Lookups(), lookup_workload(), BRISK)
    rewrite(folder)
    trials.start()
    driver = trials._driver

    def cancel() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trials.run(folder, lambda *_: None, lambda: None, {MAIN: cancel})
    assert trials._driver is driver
    assert folder.profile() is not None


@pytest.mark.parametrize("times, reasons", [(1, MEASURED), (9, {Reason.TRIAL_DIED})])
def test_a_trial_whose_trainer_is_killed_from_outside_is_run_again_a_few_times(
    trials: TrialDriver, tmp_path: Path, times: int, reasons: Collection[Reason]
) -> None:
    folder = job_with_candidates(tmp_path / "job", PATIENT)
    trials.start()
    driver = trials._driver
    assert driver is not None
    kills = 0
    again: list[str] = []

    def tell(phase: str, message: str, progress: float | None = None) -> None:
        nonlocal kills
        again.extend([message] * ("run again" in message))
        measures = phase in ("choice", "qps")  # on a busy machine there may be no time to choose
        if measures and kills == len(again) and kills < times:  # once in each run
            kills += 1
            for each in descendants(driver.pid):
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended with the first that was killed
                    if each.name() == "trainer0":
                        each.kill()

    report = trials.run(folder, tell, lambda: None)
    assert report.reason in reasons
    assert len(again) == min(times, 2)
    assert kills == min(times, 3)
    assert trials._driver is driver
