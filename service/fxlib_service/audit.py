"""The audit log: one line of JSON for each decision about a call, on the logger `fxlib.audit`.

Jobs that are submitted, cancelled or retried, the answers that workers give, and refusals are logged as INFO, and so
appear in the service's own log. Denied permissions and failures of the service itself are logged as WARNING, and all
other calls as DEBUG, for a separate log. A line names the principal and never holds its credentials. At most ten lines
a second are written for unknown callers, since nobody without a token may be able to fill a disk. The next line says
how many were left out.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Final

from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib_service.errors import Code
from fxlib_service.roles import Caller

logger: Final = logging.getLogger("fxlib.audit")

_OF_JOBS: Final = frozenset(
    {
        "OptimizerService/Optimize",
        "OptimizerService/CancelJob",
        "OptimizerService/RetryJob",
        "WorkerService/Complete",
    }
)
_OF_WHO_MAY: Final = frozenset({Code.UNAUTHENTICATED.name, Code.PERMISSION_DENIED.name, Code.QUOTA_EXCEEDED.name})
_FAILURES: Final = frozenset(
    {
        Code.STORAGE_FULL.name,
        Code.STORAGE_UNAVAILABLE.name,
        Code.CALL_TIMEOUT.name,
        Code.SHUTTING_DOWN.name,
        Code.INTERNAL.name,
    }
)
"""The codes of failures that the service causes, and not its caller."""
_NO_REFUSALS: Final = frozenset({"OK", "CANCELLED", *_FAILURES})
_MAX_TEXT: Final = 256
_MAX_OBJECT: Final = 128
_UNKNOWN_PER_S: Final = 10


class _File(WatchedFileHandler):
    """The file of the audit log. Once it was moved away, as logrotate does, a new one is begun."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # no new one can be made, which no call fails for
            self.handleError(record)


class Limiter:
    """Lets a limited number of lines through in each second, and counts the others.

    Args:
        per_s: number of lines that are let through in each second.
        clock: returns a time in seconds that never goes backwards.
    """

    def __init__(self, per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._second, self._passed, self._left_out = -1, 0, 0

    def passes(self) -> int | None:
        """Return how many lines were left out before this one, or None if this one is to be left out as well."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._passed = second, 0
        if self._passed >= self._per_s:
            self._left_out += 1
            return None
        self._passed += 1
        left_out, self._left_out = self._left_out, 0
        return left_out


_unknown = Limiter(_UNKNOWN_PER_S)


def write(
    *,
    method: str,
    code: str,
    caller: Caller | None,
    peer: str,
    about: str,
    trace_id: str = "",
    why: str = "",
    facts: Mapping[str, object] | None = None,
) -> None:
    """Write the line for one call.

    Args:
        method: name of the method that was called.
        code: "OK", the refusal's code, or "CANCELLED".
        caller: the authenticated caller; None if it could not be authenticated.
        peer: where the call came from, as gRPC writes it.
        about: id of the job or SHA-256 of the blob that the call concerns; "" if there is none.
        trace_id: id of the trace that the call is part of; "" if it is not traced.
        why: why it was refused or failed.
        facts: other facts about the job that it concerns, by name.
    """
    decision = "failed" if code in _FAILURES else "allowed" if code in _NO_REFUSALS else "refused"
    level = logging.INFO if method in _OF_JOBS or decision == "refused" else logging.DEBUG
    level = logging.WARNING if code in _OF_WHO_MAY or decision == "failed" else level
    if not logger.isEnabledFor(level):
        return
    left_out = 0 if caller else _unknown.passes()
    if left_out is None:
        return
    line: dict[str, object] = {
        "decision": decision,
        "code": code,
        "method": method,
        "caller": caller.name if caller else "",
        "roles": sorted(caller.roles) if caller else [],
        "namespace": (caller.namespace or "") if caller else "",
        "peer": peer,
        "about": about[:_MAX_OBJECT],
    }
    line |= {name: fact[:_MAX_TEXT] if isinstance(fact, str) else fact for name, fact in (facts or {}).items()}
    if why:
        line["why"] = why[:_MAX_TEXT]
    if trace_id:
        line["trace_id"] = trace_id
    if left_out:
        line["left_out"] = left_out
    logger.log(level, "%s", json.dumps(line))


def write_change(decision: str, **about: object) -> None:
    """Write a line that says whether permissions have changed.

    Args:
        decision: "changed", or "kept" if the new settings cannot be used.
        about: what was changed, or what is wrong.
    """
    logger.info("%s", json.dumps({"decision": decision, **about}))


def write_to(path: Path | None) -> None:
    """Send all lines to a file that only this user may read, or those of jobs and refusals to the service's own log.

    Raises:
        FxlibError: the file cannot be written.
    """
    if path is None:
        logger.setLevel(logging.INFO)
        return
    try:
        path.touch(mode=0o600)
        handler = _File(path)
    except OSError as error:
        raise FxlibError(f"cannot write {path}: {error.strerror}", where="--audit-log") from error
    handler.setFormatter(logging.Formatter('{"at": "%(asctime)s", "level": "%(levelname)s", "call": %(message)s}'))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
