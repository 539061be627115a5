"""Read a failed gRPC call: whether to try again, and what to tell the user."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fxlib.errors import RejectedError, RemoteError, ServiceUnavailableError
from fxlib.utils.text import plain

_AWAY = frozenset((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed call. `retry_after_s` is the service's own word for when the call may succeed, if it gave one."""

    status: grpc.StatusCode
    code: str
    message: str
    retry_after_s: float | None

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later."""
        return self.status in _AWAY or self.retry_after_s is not None

    def error(self, where: str) -> RemoteError:
        """Return the exception to raise; `where` names the call and the service."""
        if self.status in _AWAY:
            return ServiceUnavailableError(self.message, where=where)
        return RejectedError(self.message, code=self.code, where=where)


def understand(error: grpc.RpcError) -> Failure:
    """Read status and `google.rpc` details of a failed call."""
    code, retry_after_s = "", None
    for detail in _details(error):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        with suppress(DecodeError):
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                code = info.reason
            elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    status = error.code()
    message = plain(error.details() or "") or status.name.lower().replace("_", " ")
    return Failure(status=status, code=code, message=message, retry_after_s=retry_after_s)


def _details(error: grpc.RpcError) -> list[Any]:
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except (ValueError, DecodeError):  # the details contradict the status, or are none: a proxy's doing
        return []
    return list(status.details) if status is not None else []
