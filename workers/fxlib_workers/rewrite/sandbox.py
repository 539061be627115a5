"""The worker's side of a rewrite: it starts a fresh process for each job, watches it, and may ask it again."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fxlib.reasons import Reason
from fxlib.spec.report import Report
from fxlib_workers.config import REWRITE_JOB, REWRITE_LIMITS, REWRITE_MODULES, RewriteLimits
from fxlib_workers.exchange.job_folder import JobFolder
from fxlib_workers.process.child import Child, ChildEndedError, Message

_POLL_S: Final = 0.2
_ENDED_BY_SIGNAL: Final = 128
"""The exit status of a process that a signal ended, less the signal's number."""


class RewriteSandbox:
    """Rewrites one job's graph in a process of its own, which lives until the context ends.

    Args:
        folder: the job's folder, which holds request, graph and blobs.
        limits: what the process may take.
        root: the worker's folder.
        check: a function that is called while the process works; what it raises is raised here.
        modules: the operator's modules, whose import registers the clients that passes may schedule.
        keep_variables: names of environment variables that the process sees besides those that libraries need.
    """

    def __init__(
        self,
        folder: JobFolder,
        limits: RewriteLimits,
        root: Path,
        check: Callable[[], None],
        *,
        modules: Sequence[str] = (),
        keep_variables: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._check = check
        environment = {
            REWRITE_JOB: str(folder.path),
            REWRITE_LIMITS: json.dumps(asdict(limits)),
            REWRITE_MODULES: json.dumps(list(modules)),
        }
        self._child = Child("fxlib_workers.rewrite", root, environment, keep_variables=keep_variables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._child.end()

    def rewrite(self) -> Report:
        """Rewrite the graph by what the folder now holds, write the candidates there, and return what the passes did.

        If the rewrite fails, the candidates of an earlier one stay.
        """
        try:
            self._child.channel.send(rewrite=True)
            answer = self._await()
        except ChildEndedError:
            return _ended(self._child.status(), self._limits)
        if answer is None:
            return _keep_original(Reason.REWRITE_LIMIT, f"no answer within {self._limits.wall_s:g} s")
        if answer.get("out_of_memory"):
            wanted = f"more than {self._limits.memory_bytes} bytes were wanted: {answer['failed']}"
            return _keep_original(Reason.REWRITE_LIMIT, wanted)
        if answer.get("too_large"):
            return _keep_original(
                Reason.REWRITE_LIMIT, f"a file of more than {self._limits.file_bytes} bytes was wanted"
            )
        if "failed" in answer:
            return _keep_original(Reason.REWRITE_FAILED, answer["failed"])
        return self._folder.read_rewrite()

    def _await(self) -> Message | None:
        deadline = time.monotonic() + self._limits.wall_s
        while time.monotonic() < deadline:
            self._check()
            if (message := self._child.channel.receive(_POLL_S)) is not None:
                return message
        return None


def _ended(status: int, limits: RewriteLimits) -> Report:
    if status == _ENDED_BY_SIGNAL + signal.SIGXCPU:
        return _keep_original(Reason.REWRITE_LIMIT, f"more than {limits.cpu_s} s of processor time were wanted")
    if status > _ENDED_BY_SIGNAL:
        name = signal.Signals(status - _ENDED_BY_SIGNAL).name
        return _keep_original(Reason.REWRITE_FAILED, f"the process was ended by {name}")
    return _keep_original(Reason.REWRITE_FAILED, f"the process ended with status {status}")


def _keep_original(reason: Reason, detail: str) -> Report:
    return Report(decision="keep_original", reason=reason, explanation=reason.sentence(detail))
