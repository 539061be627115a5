"""The whole loop for jobs whose remote functions nobody but the job has: measured in its own world, then replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.client import Client
from fxlib.profiles import Profile
from fxlib.reasons import Reason
from fxlib.workload import Server, Workload
from tests.loop import own_functions
from tests.runtime.world import rpc_world
from tests.workers.trying import MEASURED

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

INPUTS = (torch.randn(8, 4), torch.arange(8))


class Own(nn.Module):
    """Reads of two servers whose gradients are pushed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", own_functions.rows, args=(ids,))
        second = rpc.rpc_sync("ps1", own_functions.rows, args=(ids,))
        third = rpc.rpc_sync("ps0", own_functions.rows, args=(ids + 1,))
        return self.linear(x) + first * second * third


def workload(trainers: int = 1) -> Workload:
    """The step of `Own`, of whose servers it says nothing."""
    return Workload.describe([INPUTS], loss="mean", trainers=trainers)


@pytest.fixture(scope="module")
def profile() -> Profile:
    """What the job measures in its own world."""
    with rpc_world(Server(name="ps0"), Server(name="ps1")):
        return fxlib.profile(Own(), workload())


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_job_is_measured_by_its_profile_and_gets_a_module_for_its_own_world(
    client: Client, profile: Profile, tmp_path: Path, trainers: int
) -> None:
    fxlib.save_profile(profile, tmp_path / "own.fxp")
    model, sent = Own(), fxlib.load_profile(tmp_path / "own.fxp")
    result = client.optimize(model, workload(trainers), profile=sent, budget_s=12)
    assert result.reason is Reason.FASTER, result.explanation
    assert result.not_reproduced == ()
    assert "profile" not in result.phase_seconds
    assert [(call.function, call.to) for call in result.calls] == [
        ("tests.loop.own_functions:rows", to) for to in ("ps0", "ps1", "ps0")
    ]
    with rpc_world():
        assert torch.equal(result.module(*INPUTS), model(*INPUTS))


def test_a_later_measurement_is_answered_by_the_result_of_an_earlier_one(client: Client, profile: Profile) -> None:
    asked = workload()
    first = client.optimize(Own(), asked, profile=profile, budget_s=4)
    with rpc_world():
        anew = fxlib.profile(Own(), asked)
    again = client.optimize(Own(), asked, profile=anew, budget_s=4)
    assert first.reason in MEASURED
    assert again.cached
    assert (again.reason, again.gain) == (first.reason, first.gain)


def test_without_a_profile_the_original_is_kept_and_the_way_out_is_named(client: Client) -> None:
    result = client.optimize(Own(), workload(), budget_s=4)
    assert result.reason is Reason.NO_SERVER
    assert "fxlib.profile" in result.explanation
