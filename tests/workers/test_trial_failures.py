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
from fxlib.workload import Server
from tests.workers import remote_code
from tests.workers.cases import Lookups, alive, fill, lookup_workload
from tests.workers.trying import BRISK, MEASURED, Calls, Try, calls_workload
from workers.config import TrialSettings
from workers.trials import Trials

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def test_a_model_that_raises_keeps_its_original(attempt: Try) -> None:
    class Model(Calls):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).index_select(0, torch.tensor([1000]))

    report = attempt(Model(remote_code.double), calls_workload())
    assert (report.decision, report.reason) == ("keep_original", Reason.ORIGINAL_FAILS)
    assert "IndexError" in report.explanation


def test_a_candidate_that_raises_is_refused(attempt: Try) -> None:
    class Failing(Calls):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).index_select(0, torch.tensor([1000]))

    report = attempt(Calls(remote_code.double), calls_workload(), candidate=fxlib.capture(Failing(remote_code.double)))
    assert report.reason is Reason.CANDIDATE_FAILS


def test_a_model_that_hangs_is_ended(attempt: Try) -> None:
    report = attempt(Calls(remote_code.hang), calls_workload())
    assert report.reason is Reason.TRIAL_HUNG


def test_a_model_without_memory_is_told_so(attempt: Try) -> None:
    class Model(Calls):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.ones(1 << 30, 4)[:8]

    report = attempt(Model(remote_code.double), calls_workload())
    assert report.reason is Reason.OUT_OF_MEMORY


def test_a_server_that_dies_in_the_trial_is_named(attempt: Try) -> None:
    report = attempt(Calls(remote_code.die), calls_workload())
    assert report.reason is Reason.TRIAL_DIED
    assert "ps" in report.explanation


def test_functions_that_no_server_has_are_named(attempt: Try) -> None:
    workload = calls_workload(servers=[Server(name="ps0")])
    report = attempt(Calls(remote_code.double), workload)
    assert report.reason is Reason.NO_SERVER
    assert "'ps1'" in report.explanation


def test_an_infeasible_placement_is_a_reason_and_not_a_hang(root: Path, tmp_path: Path) -> None:
    trials = Trials(TrialSettings(cpus_per_process=100.0, placement_timeout_s=2.0), root)
    try:
        report = trials.run(fill(tmp_path / "job", Lookups(), lookup_workload()), lambda *_: None, lambda: None)
    finally:
        trials.end()
    assert report.reason is Reason.NO_CAPACITY
    assert "100 CPUs" in report.explanation


def test_a_cancelled_trial_ends_at_once_and_the_driver_lives_on(trials: Trials, tmp_path: Path) -> None:
    folder = fill(tmp_path / "job", Calls(remote_code.hang), calls_workload(), TrialOptions(step_timeout_s=300))
    begun: list[float] = []

    def tell(phase: str, message: str, progress: float | None = None) -> None:
        if message.startswith("running"):
            begun.append(time.monotonic())

    def check() -> None:
        if begun and time.monotonic() - begun[0] > 1.0:
            raise KeyboardInterrupt

    trials.start()
    driver = trials._driver
    with pytest.raises(KeyboardInterrupt):
        trials.run(folder, tell, check)
    assert trials._driver is driver  # which is ended where it does not answer


def test_a_driver_that_is_killed_is_started_again(trials: Trials, tmp_path: Path) -> None:
    trials.start()
    driver = trials._driver
    assert driver is not None
    folder = fill(tmp_path / "job", Lookups(), lookup_workload(), BRISK)
    killed: list[int] = []

    def tell(phase: str, message: str, progress: float | None = None) -> None:
        if phase == "qps" and not killed:
            (python,) = psutil.Process(driver.pid).children()
            killed.append(python.pid)
            python.kill()

    report = trials.run(folder, tell, lambda: None)
    assert killed
    assert report.reason in MEASURED, report.explanation
    assert not alive(str(driver.folder))
    assert not driver.folder.exists()
