"""Trials on a real Ray, in real processes, over real TCP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.reasons import Reason
from fxlib.spec.workload import MAIN, RemoteObject, Server, Workload
from fxlib_workers.trial.driver import TrialDriver
from tests.workers import remote_code
from tests.workers.cases import Lookups, fill, lookup_workload
from tests.workers.trial_settings import ALLOWED, MEASURED, PATIENT, QUICK, Calls, Try, calls_workload

pytestmark = pytest.mark.cluster


def test_a_faster_candidate_is_adopted_with_figures_and_timelines(attempt: Try) -> None:
    # Calls take long beside what a busy machine adds to a single step, of which a timeline is.
    report = attempt(Lookups(), lookup_workload(service_time_s=0.03), PATIENT)
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


def test_a_small_budget_is_all_measurement_and_does_not_adopt_the_original_itself(
    trials: TrialDriver, tmp_path: Path
) -> None:
    model = Lookups()
    folder = fill(tmp_path / "job", model, lookup_workload(service_time_s=0.0), QUICK, candidate=fxlib.capture(model))
    report = trials.run(folder, lambda *_: None, lambda: None, {MAIN: lambda: pytest.fail("planned anew")})
    assert "profile" not in report.phase_seconds
    assert report.decision == "keep_original"
    assert report.reason in (Reason.NOT_FASTER, Reason.BUDGET_EXHAUSTED)
    assert report.gain is not None
    assert report.gain.low < 0.02


class Objects(nn.Module):
    """Methods of objects behind RRefs, and a call to what their servers were set up with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, near: object, far: object) -> torch.Tensor:
        a = near.rpc_sync().forward(x)  # type: ignore[attr-defined]
        b = far.rpc_sync().forward(x)  # type: ignore[attr-defined]
        c = rpc.rpc_sync("ps0", remote_code.weigh, args=(x,))
        return self.linear(x) + a + b + c


@pytest.mark.parametrize(
    "mode, secretive", [("local", ("server ps1: state of its setup (from step 1 on)",)), ("distributed", ())]
)
def test_servers_are_set_up_and_make_objects_and_hidden_state_is_named(
    attempt: Try, mode: str, secretive: tuple[str, ...]
) -> None:
    servers = [
        Server(name="ps0", setup=f"{ALLOWED}:prepare"),
        Server(name="ps1", setup=f"{ALLOWED}:keep_quiet" if secretive else None),
    ]
    rrefs = {
        "near": RemoteObject(owner="ps0", cls="torch.nn:Linear", args=(4, 4)),
        "far": RemoteObject(owner="ps1", cls=f"{ALLOWED}:Scale", kwargs={"width": 4}),
    }
    report = attempt(Objects(), calls_workload(servers=servers, rrefs=rrefs, mode=mode, assume="reads"))
    assert report.reason in MEASURED, report.explanation
    assert report.gain is not None
    assert report.not_reproduced == secretive


def test_what_the_original_does_not_reproduce_is_named_and_left_out(attempt: Try) -> None:
    report = attempt(Calls(remote_code.count), calls_workload())
    assert report.reason is not Reason.NOT_SAME
    assert "output (from step 1 on)" in report.not_reproduced


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
