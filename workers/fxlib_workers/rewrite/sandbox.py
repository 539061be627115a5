"""The worker's side of a rewrite: one fresh process for each job, watched, which may be asked again."""

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

_GLANCE_S: Final = 0.2
_ENDED_BY_SIGNAL: Final = 128


class Rewriting:
    """Rewrites one job's graph in a process of its own, which lives until the context ends.

    Args:
        folder: holds request, graph and blobs.
        limits: of the process.
        root: the worker's folder.
        check: called all the time; what it raises is raised here.
        modules: the operator's, whose import registers the clients that passes may schedule.
        keeps: which of this process's environment variables it sees, besides what libraries need.
    """

    def __init__(
        self,
        folder: JobFolder,
        limits: RewriteLimits,
        root: Path,
        check: Callable[[], None],
        *,
        modules: Sequence[str] = (),
        keeps: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._check = check
        environment = {
            REWRITE_JOB: str(folder.path),
            REWRITE_LIMITS: json.dumps(asdict(limits)),
            REWRITE_MODULES: json.dumps(list(modules)),
        }
        self._child = Child("fxlib_workers.rewrite", root, environment, keeps=keeps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._child.end()

    def rewrite(self) -> Report:
        """Rewrite the graph by what the folder now holds, and return what the passes did; drafts are left there.

        A rewrite that fails leaves those of an earlier one.
        """
        try:
            self._child.channel.send(rewrite=True)
            answer = self._await()
        except ChildEndedError:
            return _ended(self._child.status(), self._limits)
        if answer is None:
            return _kept(Reason.REWRITE_LIMIT, f"no answer within {self._limits.wall_s:g} s")
        if answer.get("out_of_memory"):
            wanted = f"more than {self._limits.memory_bytes} bytes were wanted: {answer['failed']}"
            return _kept(Reason.REWRITE_LIMIT, wanted)
        if answer.get("too_large"):
            return _kept(Reason.REWRITE_LIMIT, f"a file of more than {self._limits.file_bytes} bytes was wanted")
        if "failed" in answer:
            return _kept(Reason.REWRITE_FAILED, answer["failed"])
        return self._folder.read_rewrite()

    def _await(self) -> Message | None:
        deadline = time.monotonic() + self._limits.wall_s
        while time.monotonic() < deadline:
            self._check()
            if (message := self._child.channel.receive(_GLANCE_S)) is not None:
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
