"""Trials on a real Ray, in real processes, over real TCP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import TrialOptions
from fxlib.reasons import Reason
from fxlib.result import Report
from fxlib.workload import RemoteObject, Server, Workload
from tests.workers import remote_code
from tests.workers.cases import Lookups, alive, fill, lookup_workload
from workers.config import TrialSettings
from workers.trials import Trials

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ALLOWED = "tests.workers.remote_code"
QUICK = TrialOptions(budget_s=4, step_timeout_s=3, sameness_steps=2)
PATIENT = TrialOptions(budget_s=40)
MEASURED = (Reason.FASTER, Reason.NOT_FASTER, Reason.BUDGET_EXHAUSTED)
Try = Callable[..., Report]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = Path("/tmp") / f"fxlib-test-{tmp_path_factory.getbasetemp().name[-6:]}"  # noqa: S108 - a socket's path is short
    path.mkdir()
    yield path
    path.rmdir()


@pytest.fixture(scope="module")
def trials(root: Path) -> Iterator[Trials]:
    made = Trials(TrialSettings(allowed_modules=(ALLOWED,), process_memory_bytes=1 << 30), root)
    yield made
    made.end()


@pytest.fixture
def attempt(trials: Trials, tmp_path: Path) -> Try:
    def run(model: nn.Module, workload: Workload, options: TrialOptions = QUICK, **rest: object) -> Report:
        folder = fill(tmp_path / "job", model, workload, options, **rest)  # type: ignore[arg-type]
        return trials.run(folder, lambda *_: None, lambda: None)

    return run


class Calls(nn.Module):
    """Two calls of one remote function with local work in between."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", self.function, args=(x,))
        second = rpc.rpc_sync("ps1", self.function, args=(x,))
        return self.linear(x) + first + second


def calls_workload(**step: object) -> Workload:
    fields = {"servers": [Server(name="ps0"), Server(name="ps1")], **step}
    return Workload.describe([torch.randn(8, 4)], **fields)  # type: ignore[arg-type]


def test_a_faster_candidate_is_adopted_with_figures_and_timelines(attempt: Try) -> None:
    report = attempt(Lookups(), lookup_workload(), PATIENT)
    assert (report.decision, report.reason) == ("adopt", Reason.FASTER)
    assert report.gain is not None
    assert report.gain.low > 0.02
    assert report.qps_original is not None
    assert report.qps_optimized is not None
    assert report.qps_original.high < report.qps_optimized.low
    assert report.not_reproduced == ()
    assert {call.node for call in report.calls} == {"lookup", "lookup_1", "lookup_2", "lookup_3"}
    before = sum(call.exposed_before_s or 0 for call in report.calls)
    after = sum(call.exposed_after_s or 0 for call in report.calls)
    assert after < 0.75 * before
    assert report.timeline_original is not None
    assert {"call", "forward", "backward", "push", "optimizer"} <= {s.kind for s in report.timeline_original.spans}
    assert report.timeline_optimized is not None
    assert {"issue", "wait", "in_flight"} <= {span.kind for span in report.timeline_optimized.spans}


def test_the_original_against_itself_is_not_adopted(attempt: Try) -> None:
    model = Lookups()
    report = attempt(model, lookup_workload(service_time_s=0.0), candidate=fxlib.capture(model))
    assert report.decision == "keep_original"
    assert report.reason in (Reason.NOT_FASTER, Reason.BUDGET_EXHAUSTED)
    assert report.gain is not None
    assert report.gain.low < 0.02


@pytest.mark.parametrize("mode", ["local", "distributed"])
def test_objects_behind_rrefs_are_made_on_their_owners(attempt: Try, mode: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, near: object, far: object) -> torch.Tensor:
            a = near.rpc_sync().forward(x)  # type: ignore[attr-defined]
            b = far.rpc_sync().forward(x)  # type: ignore[attr-defined]
            return self.linear(x) + a + b

    rrefs = {
        "near": RemoteObject(owner="ps0", cls="torch.nn:Linear", args=(4, 4)),
        "far": RemoteObject(owner="ps1", cls=f"{ALLOWED}:Scale", kwargs={"width": 4}),
    }
    report = attempt(Model(), calls_workload(rrefs=rrefs, mode=mode, assume="reads"))
    assert report.reason in MEASURED, report.explanation
    assert report.gain is not None
    assert report.not_reproduced == ()


def test_servers_are_set_up_by_allowed_modules_and_hidden_state_is_named(attempt: Try) -> None:
    servers = [Server(name="ps0", setup=f"{ALLOWED}:prepare"), Server(name="ps1", setup=f"{ALLOWED}:keep_quiet")]
    report = attempt(Calls(remote_code.weigh), calls_workload(servers=servers))
    assert report.reason in MEASURED, report.explanation
    assert report.not_reproduced == ("server ps1: state of its setup (from step 1 on)",)


def test_a_wrong_candidate_is_refused_with_what_differs(attempt: Try) -> None:
    class Wrong(Lookups):
        def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
            return super().forward(dense, sparse) * 1.0001

    report = attempt(Lookups(), lookup_workload(), candidate=fxlib.capture(Wrong()))
    assert (report.decision, report.reason) == ("keep_original", Reason.NOT_SAME)
    assert "after step 1" in report.explanation
    assert report.gain is None


def test_what_the_original_does_not_reproduce_is_named_and_left_out(attempt: Try) -> None:
    report = attempt(Calls(remote_code.count), calls_workload())
    assert report.reason is not Reason.NOT_SAME
    assert "output (from step 1 on)" in report.not_reproduced


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
    start = time.monotonic()
    report = attempt(Calls(remote_code.hang), calls_workload())
    assert report.reason is Reason.TRIAL_HUNG
    assert time.monotonic() - start < 40


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
    assert time.monotonic() - begun[0] < 10
    assert trials._driver is driver


def test_a_driver_that_is_killed_is_started_again(trials: Trials, tmp_path: Path) -> None:
    trials.start()
    driver = trials._driver
    assert driver is not None
    folder = fill(tmp_path / "job", Lookups(), lookup_workload(), PATIENT)
    killed: list[int] = []

    def tell(phase: str, message: str, progress: float | None = None) -> None:
        if phase == "qps" and not killed:
            (python,) = psutil.Process(driver.pid).children()
            killed.append(python.pid)
            python.kill()

    report = trials.run(folder, tell, lambda: None)
    assert killed
    assert report.reason is Reason.FASTER
    assert not alive(str(driver.folder))
    assert not driver.folder.exists()


def test_several_trainers_train_on_real_batches_with_a_captured_loss(attempt: Try) -> None:
    class Loss(nn.Module):
        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (output - target).abs().mean()

    batches = [torch.randn(8, 4) for _ in range(2)]
    workload = Workload(
        batches=batches,
        targets=[torch.randn(8, 4) for _ in range(2)],
        loss=fxlib.capture(Loss()),
        optimizer="adam",
        trainers=2,
        servers=[Server(name="ps0"), Server(name="ps1")],
    )
    assert attempt(Calls(remote_code.double), workload, PATIENT).reason is Reason.FASTER
