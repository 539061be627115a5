"""Which deaths of a trial's processes came from outside, so that the trial is worth another run."""

from __future__ import annotations

import signal

import pytest

from fxlib.reasons import Reason
from fxlib.spec.report import Report
from fxlib_workers.trial.driver import killed_from_outside
from fxlib_workers.trial.host import _in_words


def died(how: str, reason: Reason = Reason.TRIAL_DIED) -> Report:
    return Report(decision="keep_original", reason=reason, explanation=reason.sentence(f"a trainer ended: {how}"))


@pytest.mark.parametrize("how", [_in_words(-signal.SIGKILL), _in_words(-signal.SIGTERM), "The actor's node died."])
def test_who_was_killed_or_lost_its_node_is_run_again(how: str) -> None:
    assert killed_from_outside(died(how))
    other = Report(decision="adopt", reason=Reason.FASTER, explanation="", variants={"eval": died(how)})
    assert killed_from_outside(other)


@pytest.mark.parametrize(
    "how", [_in_words(-signal.SIGSEGV), _in_words(-signal.SIGABRT), _in_words(-signal.SIGXCPU), _in_words(9), "a bug"]
)
def test_who_crashed_or_ended_by_itself_is_not(how: str) -> None:
    assert not killed_from_outside(died(how))


def test_another_reason_is_no_death() -> None:
    assert not killed_from_outside(died(_in_words(-signal.SIGKILL), Reason.OUT_OF_MEMORY))
