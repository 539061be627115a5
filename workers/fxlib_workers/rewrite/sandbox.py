"""The worker's side of a rewrite: it gets a forked process for each job, watches it, and may ask it again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fxlib.reasons import Reason
from fxlib.spec.report import Report
from fxlib_workers import logs
from fxlib_workers.config import RewriteLimits
from fxlib_workers.exchange import JobFolder
from fxlib_workers.process.cgroup import JobCgroup, job_cgroup
from fxlib_workers.process.child import ChildEndedError, Message
from fxlib_workers.process.containment import Containment, Part
from fxlib_workers.process.forking import ForkedChild, Forker, ForkError

_LOG: Final = logs.Log(__name__)

REWRITING: Final = "fxlib_workers.rewrite.answer_worker"
"""The module that the process of a rewrite runs, for its `Forker`."""

_POLL_S: Final = 0.2
_LIBRARIES_BYTES: Final = 1 << 30
"""Memory in bytes that the libraries use, which is not counted against a graph."""

_ENDED_BY_SIGNAL: Final = 128
"""The exit status of a process that a signal ended, minus the signal's number."""

_KILLED: Final = frozenset({_ENDED_BY_SIGNAL + signal.SIGKILL, _ENDED_BY_SIGNAL + signal.SIGTERM})
"""The exit statuses of a process that was killed from outside; the limits set here end it in other ways."""

_KILLS: Final = 2
"""The number of times that a killed process is restarted for one rewrite."""


class RewriteSandbox:
    """Rewrites one job's graph in a separate process, which lives until the context ends.

    Args:
        folder: the job's folder, which holds request, graph and blobs.
        limits: the resources that the process may use.
        forker: the forker that makes the process.
        check: a function that is called while the process works; its exceptions are raised here.
        containment: the policy by which the process is contained; in addition, it may write the job's folder.
        modules: the operator's modules, whose import registers the clients that passes may schedule.
    """

    def __init__(
        self,
        folder: JobFolder,
        limits: RewriteLimits,
        forker: Forker,
        check: Callable[[], None],
        containment: Containment,
        *,
        modules: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._check = check
        self._open = ExitStack()
        self._group = self._open.enter_context(_cgroup(containment, limits))
        joins = self._group.joins if self._group else ()
        self._forker = forker
        self._policy = replace(containment, writable=folder.writable, cgroup=joins)
        self._places = self._found()
        self._modules = list(modules)
        self._child = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._open:
            self._child.end()

    def rewrite(self) -> Report:
        """Rewrite the graph by the folder's current contents, write candidates there, and return what the passes did.

        If the rewrite fails, the candidates of an earlier one stay. A process that was killed from outside (by an
        operator, or by the kernel when the host was out of memory) is restarted a few times.

        Raises:
            OSError: this worker's disk fails.
        """
        for left in reversed(range(_KILLS + 1)):
            try:
                self._child.channel.send(rewrite=True)
                answer = self._await()
                break
            except ChildEndedError:
                report, killed = self._end_of_child()
            if self._group is not None and self._group.ran_out():
                wanted = f"more than {self._limits.memory_bytes} bytes were wanted"
                return _keep_original(Reason.REWRITE_LIMIT, wanted)
            if not killed or not left or self._found() != self._places:
                return report
            _LOG.warning("rewrite killed; started again", how=report.explanation)
            self._child.end()
            self._child = self._start()
        if answer is None:
            return _keep_original(Reason.REWRITE_LIMIT, f"no answer within {self._limits.wall_s:g} s")
        if (number := answer.get("disk")) is not None:
            raise OSError(number, answer["failed"])
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

    def _found(self) -> list[Path]:
        """Return where the folders are that the process is given; a link in place of one would give it another."""
        return [each.resolve() for each in self._policy.writable]

    def _start(self) -> ForkedChild:
        child = self._forker.fork("rewrite", self._policy)
        with suppress(ChildEndedError):  # which shows again on the next request
            child.channel.send(job=str(self._folder.path), limits=asdict(self._limits), modules=self._modules)
        return child

    def _end_of_child(self) -> tuple[Report, bool]:
        """Return a description of how a process ended, and whether it, or its fork server, was killed."""
        try:
            status = self._child.status()
        except ForkError as error:
            return _keep_original(Reason.REWRITE_FAILED, str(error)), True
        return _ended(status, self._limits), status in _KILLED

    def _await(self) -> Message | None:
        deadline = time.monotonic() + self._limits.wall_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._check()
            try:
                message = self._child.channel.receive(min(_POLL_S, left_s))
            except ValueError as error:
                return {"failed": str(error)}
            if message is not None:
                return message
        return None


def _cgroup(containment: Containment, limits: RewriteLimits) -> AbstractContextManager[JobCgroup | None]:
    """Bound the total resources of all processes of a rewrite, if this host allows it."""
    if Part.MEMORY not in containment.parts:
        return nullcontext()
    return job_cgroup(limits.memory_bytes + containment.scratch_bytes + _LIBRARIES_BYTES, containment.threads)


def _ended(status: int, limits: RewriteLimits) -> Report:
    if status == _ENDED_BY_SIGNAL + signal.SIGXCPU:
        return _keep_original(Reason.REWRITE_LIMIT, f"more than {limits.cpu_s} s of processor time were wanted")
    if status > _ENDED_BY_SIGNAL:
        name = signal.Signals(status - _ENDED_BY_SIGNAL).name
        return _keep_original(Reason.REWRITE_FAILED, f"the process was ended by {name}")
    return _keep_original(Reason.REWRITE_FAILED, f"the process ended with status {status}")


def _keep_original(reason: Reason, detail: str) -> Report:
    return Report(decision="keep_original", reason=reason, explanation=reason.sentence(detail))
