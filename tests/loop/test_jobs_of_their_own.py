"""The whole loop for jobs whose remote functions nobody but the job has: measured in its own world, then replayed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.client import Client
from fxlib.reasons import Reason
from fxlib.spec.report import Result
from fxlib.spec.workload import Server, Workload
from tests.loop import own_functions
from tests.loop.processes import Service, Worker
from tests.runtime.world import rpc_world

pytestmark = pytest.mark.cluster

SERVERS = (Server(name="ps0"), Server(name="ps1"))
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


def workload() -> Workload:
    """The step of `Own`, of whose servers it says nothing."""
    return Workload.describe([INPUTS], loss="mean")


@dataclass(frozen=True)
class Answered:
    """A job, and its answer."""

    model: nn.Module
    workload: Workload
    result: Result


@pytest.fixture(scope="module")
def answered(service: Service, workers: list[Worker], tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """What the service says of what the job measured in its own world."""
    model, asked, path = Own(), workload(), tmp_path_factory.mktemp("own") / "own.fxp"
    with rpc_world(*SERVERS):
        fxlib.save_profile(fxlib.profile(Own(), asked), path)
    with fxlib.connect(service.address) as client:
        return Answered(model, asked, client.optimize(model, asked, profile=fxlib.load_profile(path), budget_s=20))


def test_a_job_is_measured_by_its_profile_and_gets_a_module_for_its_own_world(answered: Answered) -> None:
    result = answered.result
    assert result.reason is Reason.FASTER, result.explanation
    assert result.not_reproduced == ()
    assert "profile" not in result.phase_seconds
    assert [(call.function, call.to) for call in result.calls] == [
        ("tests.loop.own_functions:rows", to) for to in ("ps0", "ps1", "ps0")
    ]
    with rpc_world():
        assert torch.equal(result.module(*INPUTS), answered.model(*INPUTS))


def test_a_later_measurement_is_answered_by_the_result_of_an_earlier_one(client: Client, answered: Answered) -> None:
    with rpc_world(*SERVERS):
        anew = fxlib.profile(Own(), answered.workload)
    again = client.optimize(Own(), answered.workload, profile=anew, budget_s=20)
    assert (answered.result.cached, again.cached) == (False, True)
    assert (again.reason, again.gain) == (answered.result.reason, answered.result.gain)


def test_without_a_profile_the_original_is_kept_and_the_way_out_is_named(client: Client) -> None:
    result = client.optimize(Own(), workload(), budget_s=4)
    assert result.reason is Reason.NO_SERVER
    assert "fxlib.profile" in result.explanation
