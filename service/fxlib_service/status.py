"""The gRPC status and the google.rpc details of each error of the catalogue; no other file maps errors to gRPC."""

from __future__ import annotations

from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from fxlib.utils.text import plain
from fxlib_service.errors import Code, ServiceError

DOMAIN: Final = "fxlib"

_MAX_MESSAGE: Final = 1_000
_MAX_TEXT: Final = 160
_MAX_VIOLATIONS: Final = 20

STATUS: Final = {
    Code.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Code.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Code.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Code.INVALID_GRAPH: grpc.StatusCode.INVALID_ARGUMENT,
    Code.BLOB_MISSING: grpc.StatusCode.FAILED_PRECONDITION,
    Code.BLOB_CORRUPT: grpc.StatusCode.DATA_LOSS,
    Code.BLOB_OFFSET: grpc.StatusCode.OUT_OF_RANGE,
    Code.BLOB_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.UPLOAD_STALLED: grpc.StatusCode.ABORTED,
    Code.STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.STORAGE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.REQUEST_ID_REUSED: grpc.StatusCode.ALREADY_EXISTS,
    Code.QUOTA_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.MESSAGE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.SERVICE_BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.JOB_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.SEQUENCE_AHEAD: grpc.StatusCode.OUT_OF_RANGE,
    Code.LEASE_LOST: grpc.StatusCode.FAILED_PRECONDITION,
    Code.WORKER_LOST: grpc.StatusCode.ABORTED,
    Code.CALL_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
}


def to_status(error: ServiceError) -> status_pb2.Status:
    """Return an error as a google.rpc.Status, with ErrorInfo, and with BadRequest and RetryInfo where they apply."""
    metadata = {key: _short(value) for key, value in error.metadata.items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.code.name, domain=DOMAIN, metadata=metadata)]
    if error.violations:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=_short(violation.field), description=_short(violation.problem)
            )
            for violation in error.violations[:_MAX_VIOLATIONS]
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    number: int = STATUS[error.code].value[0]
    message = _short(str(error), _MAX_MESSAGE)
    return status_pb2.Status(code=number, message=message, details=[_packed(detail) for detail in details])


def _short(text: str, limit: int = _MAX_TEXT) -> str:
    """Return text, which may quote a request, cut so short that all details fit into the trailers of a call."""
    return plain(text if len(text) <= limit else text[: limit - 3] + "...")


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
