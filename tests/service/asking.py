"""Requests that differ from the usual one."""

from collections.abc import Callable

from fxlib.v1 import jobs_pb2, profile_pb2
from tests.service.support import (
    request,
)

Change = Callable[[jobs_pb2.OptimizeRequest], object]


def profiled(*, service_s: float = 0.002, function: str = "my.ps:lookup") -> jobs_pb2.OptimizeRequest:
    asked = request()
    call = asked.profile.calls.add(call="lookup", function=function, to="ps0")
    call.returns.tensor.CopyFrom(profile_pb2.TensorShape(shape=[2], dtype="float32"))
    call.service_s.CopyFrom(profile_pb2.Spread(quantiles=[service_s], count=1))
    return asked
