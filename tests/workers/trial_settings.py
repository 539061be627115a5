"""What tests of whole trials share: how long they take, what they may answer, and a model that calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.distributed import rpc

from fxlib import TrialOptions
from fxlib.reasons import Reason
from fxlib.spec.report import Report
from fxlib.spec.workload import Server, Workload
from fxlib_workers.config import TrialSettings

ALLOWED: Final = "tests.workers.remote_code"
BACKENDS: Final = "tests.workers.bad_backends"
HOST_MEMORY_BYTES: Final = 400 << 20
"""What all processes of a trial take together, at the most."""
SETTINGS: Final = TrialSettings(process_memory_bytes=1 << 30)
QUICK: Final = TrialOptions(budget_s=3, step_timeout_s=20, sameness_steps=2)
PATIENT: Final = TrialOptions(budget_s=40)
BRISK: Final = TrialOptions(budget_s=15)
MEASURED: Final = (Reason.FASTER, Reason.NOT_FASTER, Reason.BUDGET_EXHAUSTED)
Try = Callable[..., Report]
"""Runs a trial of a model and a workload, with the options given, and returns its report."""


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
    """The step of `Calls`, described."""
    fields = {"servers": [Server(name="ps0"), Server(name="ps1")], **step}
    return Workload.describe([torch.randn(8, 4)], **fields)  # type: ignore[arg-type]
