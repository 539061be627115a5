"""The audit log: one line of JSON for each decision about a call, on the logger `fxlib.audit`.

Refusals are warnings, calls that change something are infos, those that look are debug. A line names the principal, and
never what it showed to prove it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

from fxlib.errors import FxlibError
from fxlib_service.errors import Code
from fxlib_service.roles import Caller

logger: Final = logging.getLogger("fxlib.audit")

_CHANGES: Final = frozenset(
    {
        "OptimizerService/Optimize",
        "OptimizerService/CancelJob",
        "BlobService/Write",
        "WorkerService/Claim",
        "WorkerService/Complete",
        "WorkerService/Release",
    }
)
_REFUSALS: Final = frozenset({Code.UNAUTHENTICATED.name, Code.PERMISSION_DENIED.name, Code.QUOTA_EXCEEDED.name})
_MAX_OBJECT: Final = 128


def write(*, method: str, code: str, caller: Caller | None, peer: str, about: str) -> None:
    """Write the line of one call.

    Args:
        method: what was called.
        code: "OK", the refusal's code, or "CANCELLED".
        caller: who called; None: nobody that is known.
        peer: where from.
        about: the job or blob that it was about, "" for none.
    """
    refused = code in _REFUSALS
    level = logging.WARNING if refused else logging.INFO if method in _CHANGES else logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    line = {
        "decision": "refused" if refused else "allowed",
        "code": code,
        "method": method,
        "caller": caller.name if caller else "",
        "roles": sorted(caller.roles) if caller else [],
        "namespace": (caller.namespace or "") if caller else "",
        "peer": peer,
        "about": about[:_MAX_OBJECT],
    }
    logger.log(level, "%s", json.dumps(line))


def write_to(path: Path | None) -> None:
    """Send all lines to a file that this user alone may read; without one, refusals go to the service's own log.

    Raises:
        FxlibError: the file cannot be written.
    """
    if path is None:
        logger.setLevel(logging.WARNING)
        return
    try:
        path.touch(mode=0o600)
        handler = logging.FileHandler(path)
    except OSError as error:
        raise FxlibError(f"cannot write {path}: {error.strerror}", where="--audit-log") from error
    handler.setFormatter(logging.Formatter('{"at": "%(asctime)s", "level": "%(levelname)s", "call": %(message)s}'))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
