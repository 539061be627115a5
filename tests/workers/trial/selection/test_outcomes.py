"""What is rows of each candidate of a trial."""

from __future__ import annotations

import pytest

from fxlib.reasons import Reason
from fxlib.spec.report import CandidateReport, Report
from fxlib_workers.exchange import Candidate
from fxlib_workers.trial.failures import CandidateError, TrialError
from fxlib_workers.trial.selection.outcomes import CandidateOutcomes


def outcomes() -> CandidateOutcomes:
    rows = [
        CandidateReport(name="a", predicted_step_s=0.01),
        CandidateReport(name="b", predicted_step_s=0.02),
        CandidateReport(name="c"),
    ]
    return CandidateOutcomes(
        [
            Candidate(
                graph=each.name.encode(),
                report=Report(decision="keep_original", reason=None, explanation=each.name, candidates=(each,)),
            )
            for each in rows
        ]
    )


def test_a_candidate_that_fails_is_no_longer_chosen() -> None:
    made = outcomes()
    made.fail("a", CandidateError("a", Reason.NOT_SAME, "after step 1: loss"))
    assert made.remaining == ("b", "c")
    first = made.report("b").candidates[0]
    assert first.verdict == "the candidate's results differ from the original's: after step 1: loss"
    assert first.predicted_step_s == 0.01


def test_the_failure_of_the_most_promising_is_that_of_all() -> None:
    made = outcomes()
    made.drop("b", "not tried")
    made.fail("c", CandidateError("c", Reason.CANDIDATE_FAILS, "no"))
    with pytest.raises(TrialError) as raised:
        made.fail("a", CandidateError("a", Reason.NOT_SAME, "loss"))
    assert raised.value.reason is Reason.NOT_SAME


def test_a_trial_that_ends_early_says_so_of_those_it_did_not_reach() -> None:
    made = outcomes()
    made.note("a", "leading")
    assert [each.verdict for each in made.report().candidates] == ["leading", *["the trial ended before it"] * 2]


def test_the_report_is_the_chosen_candidates_and_names_all() -> None:
    made = outcomes()
    made.not_reproduced, made.unmeasured = ("output (from step 1 on)",), {"b": "after step 1: loss (unmeasured)"}
    report = made.report("b")
    assert report.explanation == "b"
    assert [each.name for each in report.candidates] == ["a", "b", "c"]
    assert report.not_reproduced == ("output (from step 1 on)", "after step 1: loss (unmeasured)")
    assert made.report("a").not_reproduced == ("output (from step 1 on)",)
