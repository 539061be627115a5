"""The worker's side of a rewrite: one fresh process for each job, watched."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from fxlib.reasons import Reason
from fxlib.result import Report
from workers.child import Child, ChildEndedError, Message
from workers.config import REWRITE_JOB, REWRITE_LIMITS, RewriteLimits
from workers.folder import JobFolder

_GLANCE_S: Final = 0.2
_ENDED_BY_SIGNAL: Final = 128


def rewrite(folder: JobFolder, limits: RewriteLimits, root: Path, check: Callable[[], None]) -> Report:
    """Rewrite the job's graph and return what the passes did; the rewritten graph, if any, is left in `folder`.

    Args:
        folder: holds request, graph and blobs.
        limits: of the process.
        root: the worker's folder.
        check: called all the time; what it raises ends the process.
    """
    environment = {REWRITE_JOB: str(folder.path), REWRITE_LIMITS: json.dumps(asdict(limits))}
    child = Child("workers.sandbox", root, environment)
    try:
        answer = _await(child, limits, check)
    except ChildEndedError:
        return _ended(child.status(), limits)
    finally:
        child.end()
    if answer is None:
        return _kept(Reason.REWRITE_LIMIT, f"no answer within {limits.wall_s:g} s")
    if answer.get("out_of_memory"):
        return _kept(Reason.REWRITE_LIMIT, f"more than {limits.memory_bytes} bytes were wanted: {answer['failed']}")
    if "failed" in answer:
        return _kept(Reason.REWRITE_FAILED, answer["failed"])
    return folder.read_rewrite()


def _await(child: Child, limits: RewriteLimits, check: Callable[[], None]) -> Message | None:
    deadline = time.monotonic() + limits.wall_s
    while time.monotonic() < deadline:
        check()
        if (message := child.channel.receive(_GLANCE_S)) is not None:
            return message
    return None


def _ended(status: int, limits: RewriteLimits) -> Report:
    if status == _ENDED_BY_SIGNAL + signal.SIGXCPU:
        return _kept(Reason.REWRITE_LIMIT, f"more than {limits.cpu_s} s of processor time were wanted")
    if status > _ENDED_BY_SIGNAL:
        name = signal.Signals(status - _ENDED_BY_SIGNAL).name
        return _kept(Reason.REWRITE_FAILED, f"the process was ended by {name}")
    return _kept(Reason.REWRITE_FAILED, f"the process ended with status {status}")


def _kept(reason: Reason, detail: str) -> Report:
    return Report(decision="keep_original", reason=reason, explanation=reason.sentence(detail))
