"""The whole loop for jobs that call services of their own, through handles that the model holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import fxlib
from fxlib.client import Client
from fxlib.reasons import Reason
from fxlib.runtime import is_issue
from fxlib.spec.workload import Workload
from fxlib_workers.trial.nodes import connected
from tests.capture import grpc_store, ray_tables
from tests.workers.trial_settings import SETTINGS

pytestmark = pytest.mark.cluster

X = torch.arange(4.0)
_MIN_GAIN = 0.05
"""The gain of which a trial has to be sure, which a busy machine shows within the budget; the gain itself is larger."""


class Features(nn.Module):
    """Two independent lookups through two stubs, beside work."""

    def __init__(self, *stubs: grpc_store.StoreStub) -> None:
        super().__init__()
        self.stubs = list(stubs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = grpc_store.lookup(self.stubs[0], x)
        second = grpc_store.lookup(self.stubs[1], x + 1.0)
        return torch.sin(x) + first * second


@contextmanager
def features() -> Iterator[nn.Module]:
    def doubled(rows: torch.Tensor) -> torch.Tensor:
        time.sleep(ray_tables.SERVICE_S)
        return rows * 2.0

    with grpc_store.serving([], doubled) as first, grpc_store.serving([], doubled) as second:
        yield Features(first, second)


@contextmanager
def tables() -> Iterator[nn.Module]:
    with TemporaryDirectory(prefix="fxlib-test-", dir="/tmp") as folder, connected(SETTINGS, Path(folder)):
        kind: Any = ray_tables.Table
        yield ray_tables.Sums(*(kind.options(num_cpus=0.1).remote() for _ in range(2)))


@pytest.mark.parametrize("program", [features, tables], ids=["gRPC", "Ray"])
def test_a_job_that_calls_its_own_services_is_replayed_adopted_and_bound_to_its_own_handles(
    client: Client, program: Any
) -> None:
    with program() as model:
        workload = Workload(batches=[X], mode="forward")
        profile = fxlib.profile(model, workload)
        assert all(call.issue_s + call.service_s.median >= ray_tables.SERVICE_S for call in profile.calls)
        alone = fxlib.optimize(fxlib.capture(model), profile=profile)
        assert sum(map(is_issue, alone.graph.nodes)) == 2
        assert torch.equal(alone(X), model(X))
        result = client.optimize(model, workload, profile=profile, min_gain=_MIN_GAIN, budget_s=60, fresh=True)
        assert result.reason is Reason.FASTER, result.explanation
        assert result.gain is not None
        assert result.gain.low > _MIN_GAIN
        assert result.gain.value > 0.3
        reached = [call.to for call in profile.calls]
        assert [call.to for call in result.calls] == reached
        assert result.timeline_optimized is not None
        assert {span.to for span in result.timeline_optimized.spans if span.kind == "issue"} == set(reached)
        assert isinstance(result.module, GraphModule)
        assert sum(map(is_issue, result.module.graph.nodes)) == 2
        assert torch.equal(result.module(X), model(X))
