"""Checks of the plain fields of requests: names, labels, versions and messages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from fxlib.spec.labels import MAX_LABELS as MOST
from fxlib.spec.labels import is_namespace, problems_of
from fxlib.utils.text import plain
from fxlib.v1 import jobs_pb2
from fxlib_service.errors import Code, ServiceError, Violation, invalid

DEFAULT_NAMESPACE: Final = "default"
DEFAULT_NAME: Final = "model"
PHASES: Final = ("rewrite", "profile", "sameness", "choice", "qps")

_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_VERSION: Final = re.compile(r"[0-9A-Za-z.+_-]{1,63}")
_TOKEN: Final = re.compile(r"[0-9]{1,18}")
_CONTAINMENT: Final = re.compile(r"[a-z]{0,32}")
_FAILURE: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_BACKEND: Final = re.compile(r"[a-z_]{1,40}==[0-9A-Za-z.+!_-]{1,60}")
_MAX_BACKENDS: Final = 16
_MAX_MODULES: Final = 1_000
_MAX_MODULES_TEXT: Final = 64 << 10
_MAX_TEXT: Final = 256
_MAX_MESSAGE: Final = 4_000
_MAX_RATE: Final = 1e15
_MAX_GAIN: Final = 1e6
_MAX_LIVE_BYTES: Final = 1_000
"""Size in bytes of the largest live report, of which a listing holds hundreds. Figures take a tenth of it; the rest is
left for fields of later versions."""


def check_submission(request: jobs_pb2.OptimizeRequest) -> None:
    """Check the request id, name, namespace, torch version, labels, allowed workers and backends of a submission.

    Raises:
        ServiceError: INVALID_REQUEST, with every field at fault.
    """
    violations = list(_submission(request))
    if violations:
        raise ServiceError(Code.INVALID_REQUEST, violations=violations)


def check_worker(worker: jobs_pb2.WorkerInfo) -> None:
    """Check a worker's description of itself.

    Raises:
        ServiceError: INVALID_REQUEST, with every field at fault.
    """
    violations = [
        Violation(field=f"worker.{field}", problem=problem)
        for field, ok, problem in (
            ("worker_id", _is_text(worker.worker_id) and worker.worker_id, "must be a line of 1 to 256 characters"),
            ("torch_version", _VERSION.fullmatch(worker.torch_version), "must be a version"),
            ("hardware", len(worker.hardware) <= _MAX_MESSAGE, "is too long"),
            (
                "fxlib_version",
                not worker.fxlib_version or _VERSION.fullmatch(worker.fxlib_version),
                "must be a version",
            ),
            ("allowed_modules", len(worker.allowed_modules) <= _MAX_MODULES, f"must be at most {_MAX_MODULES}"),
            ("allowed_modules", all(map(_is_text, worker.allowed_modules)), "must be names"),
            (
                "allowed_modules",
                sum(map(len, worker.allowed_modules)) <= _MAX_MODULES_TEXT,
                f"must be at most {_MAX_MODULES_TEXT} characters together",
            ),
            ("containment", _CONTAINMENT.fullmatch(worker.containment), "must be the name of a level"),
        )
        if not ok
    ]
    violations += _labels(worker.labels, "worker.labels")
    if violations:
        raise ServiceError(Code.INVALID_REQUEST, violations=violations)


def check_listing(request: jobs_pb2.ListJobsRequest) -> None:
    """Check the filters and the page of a listing.

    Raises:
        ServiceError: INVALID_REQUEST.
    """
    if request.page_size < 0:
        raise invalid("page_size", "must not be negative")
    if request.page_token and not _TOKEN.fullmatch(request.page_token):
        raise invalid("page_token", "must be a token that this service has returned")
    if request.id_prefix and not _ID.fullmatch(request.id_prefix):
        raise invalid("id_prefix", "must be the beginning of a job's id")
    if len(request.labels) > MOST:
        raise invalid("labels", f"must be at most {MOST}")


def check_report(phase: str, progress: float) -> None:
    """Check the phase and the progress that a worker reports.

    Raises:
        ServiceError: INVALID_REQUEST.
    """
    if phase not in PHASES:
        raise invalid("phase", f"must be one of {', '.join(PHASES)}")
    if not (math.isfinite(progress) and progress <= 1.0):
        raise invalid("progress", "must be 0 to 1, or negative when unknown")


def check_failure(code: str) -> None:
    """Check the code of a job's failure.

    Raises:
        ServiceError: INVALID_REQUEST.
    """
    if not _FAILURE.fullmatch(code):
        raise invalid("failure.code", "must be a name like WORKER_LOST")


def check_reason(code: str) -> None:
    """Check the code of an answer's reason, which is in every listing.

    Raises:
        ServiceError: INVALID_REQUEST.
    """
    if code and not _FAILURE.fullmatch(code):
        raise invalid("result.reason_code", "must be a name like NOT_FASTER")


def check_live(live: jobs_pb2.LiveFigures) -> None:
    """Check the figures that a launcher reports of its own steps.

    Raises:
        ServiceError: INVALID_REQUEST.
    """
    if live.ByteSize() > _MAX_LIVE_BYTES:
        raise invalid("live", f"must be at most {_MAX_LIVE_BYTES} bytes")
    for field in ("qps_original", "qps_optimized"):
        if not 0.0 <= getattr(live, field) <= _MAX_RATE:
            raise invalid(f"live.{field}", f"must be a rate: 0 to {_MAX_RATE:g}")
    gain = live.gain
    if not -1.0 <= gain.low <= gain.value <= gain.high <= _MAX_GAIN:
        raise invalid("live.gain", f"must be a figure within its interval, -1 to {_MAX_GAIN:g}")


def clip(message: str) -> str:
    """Return a message as one plain line, truncated to the length that is stored."""
    return plain(message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "...")


def _submission(request: jobs_pb2.OptimizeRequest) -> Iterator[Violation]:
    if not _ID.fullmatch(request.request_id):
        yield Violation(field="request_id", problem="must be 1 to 128 letters, digits or ._:-, such as a UUID")
    if not _is_text(request.name):
        yield Violation(field="name", problem="must be one line of at most 256 characters")
    if request.namespace and not is_namespace(request.namespace):
        yield Violation(field="namespace", problem="must be up to 63 letters, digits or ._-")
    if not _VERSION.fullmatch(request.torch_version):
        yield Violation(field="torch_version", problem="must be the version of the launcher's torch")
    yield from _labels(request.labels, "labels")
    yield from _labels(request.where, "where")
    if len(request.backends) > _MAX_BACKENDS or not all(map(_BACKEND.fullmatch, request.backends)):
        problem = f"must be at most {_MAX_BACKENDS} backends with versions, such as openvino==2026.4.1"
        yield Violation(field="backends", problem=problem)


def _labels(labels: Mapping[str, str], field: str) -> Iterator[Violation]:
    for key, problem in problems_of(labels):
        yield Violation(field=f"{field}[{key}]" if key else field, problem=problem)


def _is_text(text: str) -> bool:
    return len(text) <= _MAX_TEXT and (not text or text.isprintable())
