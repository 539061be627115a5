"""What a trial on a real Ray answers when something goes wrong, and that it can go on afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

import fxlib
from fxlib import TrialOptions
from fxlib.reasons import Reason
from fxlib_workers.trial.driver import TrialDriver
from tests.workers import remote_code
from tests.workers.cases import Lookups, Wrong, alive, candidate_of, fill, lookup_workload, request
from tests.workers.trial_settings import MEASURED, QUICK, Calls, Try, calls_workload

pytestmark = pytest.mark.cluster


def test_a_model_that_raises_keeps_its_original(attempt: Try) -> None:
    class Model(Calls):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).index_select(0, torch.tensor([1000]))

    report = attempt(Model(remote_code.double), calls_workload())
    assert (report.decision, report.reason) == ("keep_original", Reason.ORIGINAL_FAILS)
    assert "IndexError" in report.explanation


def test_each_candidate_that_fails_is_refused_for_its_own_reason(trials: TrialDriver, tmp_path: Path) -> None:
    class Greedy(Lookups):
        def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
            return super().forward(dense, sparse) + torch.ones(1 << 30, 4)[:16, :1]

    class Failing(Lookups):
        def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
            return super().forward(dense, sparse).index_select(0, torch.tensor([1000]))

    folder = request(tmp_path / "job", Lookups(), lookup_workload())
    models = {"greedy": Greedy(), "failing": Failing(), "wrong": Wrong()}
    candidates = [candidate_of(name, fxlib.capture(model)) for name, model in models.items()]
    folder.write_rewrite(candidates[0].report, candidates)
    report = trials.run(folder, lambda *_: None, lambda: None)
    assert (report.decision, report.reason) == ("keep_original", Reason.OUT_OF_MEMORY)
    assert report.gain is None
    greedy, failing, wrong = (each.verdict for each in report.candidates)
    assert greedy == report.explanation
    assert "the candidate fails in the trial: IndexError" in failing
    assert "differ from the original's: after step 1" in wrong


def test_a_server_that_dies_in_the_trial_is_named(attempt: Try) -> None:
    report = attempt(Calls(remote_code.die), calls_workload())
    assert report.reason is Reason.TRIAL_DIED
    assert "ps" in report.explanation


def test_a_process_whose_answer_is_not_one_ends_the_trial_and_is_named(attempt: Try) -> None:
    report = attempt(Calls(remote_code.lie), calls_workload())
    assert report.reason is Reason.TRIAL_DIED
    assert "sent a malformed answer to not_served: it is not JSON" in report.explanation


def test_a_cancelled_trial_ends_at_once_and_the_driver_lives_on(trials: TrialDriver, tmp_path: Path) -> None:
    folder = fill(tmp_path / "job", Calls(remote_code.hang), calls_workload(), TrialOptions(step_timeout_s=300))
    begun: list[float] = []

    def tell(phase: str, message: str, progress: float | None = None) -> None:
        if message.startswith("running"):
            begun.append(time.monotonic())

    def check() -> None:
        if begun and time.monotonic() - begun[0] > 0.5:
            raise KeyboardInterrupt

    trials.start()
    driver = trials._driver
    with pytest.raises(KeyboardInterrupt):
        trials.run(folder, tell, check)
    assert trials._driver is driver  # which is ended where it does not answer


def test_a_driver_that_is_killed_is_started_again(trials: TrialDriver, tmp_path: Path) -> None:
    trials.start()
    driver = trials._driver
    assert driver is not None
    folder = fill(tmp_path / "job", Lookups(), lookup_workload(), QUICK)
    killed: list[int] = []

    def tell(phase: str, message: str, progress: float | None = None) -> None:
        if message.startswith("running") and not killed:
            (python,) = psutil.Process(driver.pid).children()
            killed.append(python.pid)
            python.kill()

    report = trials.run(folder, tell, lambda: None)
    assert killed
    assert report.reason in MEASURED, report.explanation
    assert not alive(str(driver.folder))
    assert not driver.folder.exists()
