"""The error catalogue: every refusal of the service, by name. `interceptor` maps them to gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from fxlib.errors import FxlibError


class Code(Enum):
    """A code that programs can rely on. Its value is a sentence for people."""

    UNAUTHENTICATED = "the call has no valid credentials"
    PERMISSION_DENIED = "the caller may not do this"
    INVALID_REQUEST = "a field of the request is not valid"
    INVALID_GRAPH = "the graph is not a valid fxlib graph, or lacks the weights that a pass needs"
    BLOB_MISSING = "the request refers to blobs that were not uploaded"
    BLOB_CORRUPT = "the bytes received, or those that were stored, do not have the blob's digest"
    BLOB_OFFSET = "the data does not continue what is stored of the blob"
    BLOB_NOT_FOUND = "there is no such blob"
    UPLOAD_STALLED = "an upload sent nothing, or too little, for too long"
    STORAGE_FULL = "the service has no room to store this"
    STORAGE_UNAVAILABLE = "the service cannot read or write its storage now"
    REQUEST_ID_REUSED = "the request id belongs to another request"
    QUOTA_EXCEEDED = "the namespace has reached one of its quotas"
    MESSAGE_TOO_LARGE = "the message is larger than messages of its kind may be"
    SERVICE_BUSY = "the service has as much in hand as it has room for"
    QUEUE_FULL = "the namespace has as many queued jobs as it may have"
    JOB_NOT_FOUND = "there is no such job"
    SEQUENCE_AHEAD = "the job's history is shorter than that"
    LEASE_LOST = "the lease ended, and the job went to another worker or was finished"
    WORKER_LOST = "the job's workers disappeared, too many times in a row"
    CALL_TIMEOUT = "the service did not finish the call in its own time limit"
    SHUTTING_DOWN = "the service is shutting down"
    INTERNAL = "the service itself failed"


LOST: Final = frozenset({Code.BLOB_NOT_FOUND, Code.BLOB_CORRUPT})
"""The codes for a blob that is gone or damaged when it is read; the next upload restores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A field of a request, with what is wrong with it."""

    field: str
    problem: str


class ServiceError(FxlibError):
    """A refusal with a code of the catalogue.

    Args:
        code: entry of the catalogue.
        message: what was wrong, as a sentence for people.
        violations: the fields at fault.
        metadata: facts for programs, such as `committed_bytes`.
        retry_after_s: seconds after which the same call may succeed; None if it never will.
        hint: what the caller can do about it.
    """

    def __init__(
        self,
        code: Code,
        message: str = "",
        *,
        violations: Sequence[Violation] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        hint: str = "",
    ) -> None:
        fields = "; ".join(f"{violation.field}: {violation.problem}" for violation in violations)
        super().__init__(message or fields or code.value, hint=hint)
        self.code = code
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s

    def copy(self) -> ServiceError:
        """Return an equal error without a traceback."""
        return _restored(*self._parts())

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling, so that it can pass between processes."""
        return _restored, self._parts()

    def _parts(self) -> tuple[Code, str, tuple[Violation, ...], dict[str, str], float | None]:
        return self.code, str(self), self.violations, self.metadata, self.retry_after_s


def _restored(
    code: Code, text: str, violations: tuple[Violation, ...], metadata: dict[str, str], retry_after_s: float | None
) -> ServiceError:
    return ServiceError(code, text, violations=violations, metadata=metadata, retry_after_s=retry_after_s)


def invalid(field: str, problem: str) -> ServiceError:
    """Return the refusal for one field that is not valid."""
    return ServiceError(Code.INVALID_REQUEST, violations=[Violation(field=field, problem=problem)])
