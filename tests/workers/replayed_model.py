"""A model whose remote functions only the job has, and what a profile records of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import rpc

from fxlib.spec.profile import CallProfile, Profile, Push, Result, ServerProfile, Spread, TensorShape
from fxlib.spec.workload import Server, Workload
from tests.workers import remote_code

ROWS = TensorShape(shape=(8, 4), dtype=torch.float32)
SERVERS = (Server(name="ps0"), Server(name="ps1"))


class Weighed(nn.Module):
    """Three reads whose gradients are pushed, two of them on one server."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps0", remote_code.weigh, args=(rows.long(),))
        second = rpc.rpc_sync("ps0", remote_code.weigh, args=(rows.long() + 1,))
        third = rpc.rpc_sync("ps1", remote_code.weigh, args=(rows.long(),))
        return self.linear(x) + first * second * third


def spread(seconds: float) -> Spread:
    return Spread(quantiles=(seconds,))


def recorded(
    call: str,
    function: str,
    to: str,
    *,
    seconds: float = 0.01,
    returns: Result = ROWS,
    push: Push | None = None,
) -> CallProfile:
    return CallProfile(
        call=call,
        function=function,
        to=to,
        request_bytes=128,
        response_bytes=128,
        returns=returns,
        issue_s=1e-4,
        wait_s=1e-5,
        service_s=spread(seconds),
        push=push,
    )


def weighed_profile(*, per_item_s: float | None = None) -> Profile:
    name = "tests.workers.remote_code"
    push = Push(function=f"{name}:learn", request_bytes=128, issue_s=1e-4, service_s=spread(0.005), ready_s=1e-3)
    return Profile(
        calls=(
            recorded("weigh", f"{name}:weigh", "ps0", push=push),
            recorded("weigh_1", f"{name}:weigh", "ps0", push=push),
            recorded("weigh_2", f"{name}:weigh", "ps1", push=push),
        ),
        servers=tuple(
            ServerProfile(name=each, round_trip_s=1e-4, concurrency=16, bytes_per_s=1e9, per_item_s=per_item_s)
            for each in ("ps0", "ps1")
        ),
    )


def workload(**step: object) -> Workload:
    return Workload.describe([(torch.randn(8, 4), torch.arange(8))], **{"servers": SERVERS, **step})  # type: ignore[arg-type]
