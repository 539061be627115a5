"""Trials of jobs whose ranks meet in collectives: on a real Ray, each rank a process of its own, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import rpc

import fxlib
from fxlib import TrialOptions
from fxlib.reasons import Reason
from fxlib.spec.workload import Workload
from fxlib_workers.trial.driver import TrialDriver
from tests.workers import remote_code
from tests.workers.cases import Reducing, candidate_of, lookup_workload, reduced, request
from tests.workers.hybrid import hybrid
from tests.workers.trial_settings import MEASURED, Try

pytestmark = pytest.mark.cluster

RANKS = 2


class Wrong(Reducing):
    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        return reduced(super().forward(dense, sparse))


class Uneven(Reducing):
    """One rank raises before the others' collective: whoever comes second."""

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        once = rpc.rpc_sync("ps0", remote_code.once, args=(dense,))
        return super().forward(once, sparse)


def workload(**step: object) -> Workload:
    return lookup_workload(tables=2, service_time_s=0.01, **{"trainers": RANKS, "mode": "forward", **step})


def test_gradients_come_back_through_collectives(attempt: Try) -> None:
    report = attempt(Reducing(), workload(mode="local"))
    assert report.reason in MEASURED, report.explanation
    assert not [name for name in report.not_reproduced if "output" in name]


def test_gradients_of_modules_inside_ddp_are_reduced_over_the_trainers(attempt: Try) -> None:
    report = attempt(hybrid(), workload(mode="distributed"))
    assert report.reason in MEASURED, report.explanation
    assert not [name for name in report.not_reproduced if "gradient of bottom" in name]


def test_candidates_are_refused_on_the_rank_that_shows_it_and_leave_no_rank_waiting(
    trials: TrialDriver, tmp_path: Path
) -> None:
    folder = request(tmp_path / "job", Reducing(), workload(), TrialOptions(budget_s=20, sameness_steps=1))
    candidates = [candidate_of("wrong", fxlib.capture(Wrong())), candidate_of("uneven", fxlib.capture(Uneven()))]
    folder.write_rewrite(candidates[0].report, candidates)
    report = trials.run(folder, lambda *_: None, lambda: None)
    assert "differ from the original's: after step 1: rank 0: output" in report.candidates[0].verdict
    # One rank raised, and the others cannot go on: only new processes could, and no candidate is left for them.
    assert "only once" in report.candidates[1].verdict
    assert report.reason is Reason.NOT_SAME, report.explanation
