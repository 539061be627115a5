"""Run a zoo: capture each entry in a process of its own, ask about it, and follow it to its answer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, cast

from fxlib.client import Client, Endpoint
from fxlib.errors import FxlibError, RejectedError, RemoteError, ServiceUnavailableError
from fxlib.reasons import Reason
from fxlib.spec.job import Job
from fxlib.spec.labels import show_labels
from fxlib.spec.report import Estimate, plain
from fxlib.utils.local_service import TOKEN_FILE
from fxlib.zoo import reaper
from fxlib.zoo.manifest import Entry
from fxlib.zoo.pooling import pooled
from fxlib.zoo.runs import Replica, Row, Run, RunError
from fxlib.zoo.source_files import Dependencies, environment

_POLL_S: Final = 0.1
_END_S: Final = 2.0
"""Time limit for a process to end after its last message, in seconds."""
_REAPED_S: Final = 10.0
"""Time limit for it and all processes that it started to end once they are told to, in seconds."""
_LONGEST_POLL_S: Final = 2.0
_LONGEST_LINE: Final = 64 << 20
_IDS: Final = uuid.UUID("8a0f6a52-3f0b-4a5e-9a55-7c8d2f6b1e11")
"""The namespace of request ids: a run that was interrupted hands in the same request again, with the same id."""

_UNKNOWN_JOB: Final = "JOB_NOT_FOUND"
_BUSY: Final = ("SERVICE_BUSY", "QUOTA_EXCEEDED")
"""The service's error codes for a call that it would take at another time, which say nothing about the job."""

_BY_SPEED: Final = (Reason.NOT_FASTER.name, Reason.BUDGET_EXHAUSTED.name)
"""Reasons to keep an original that rest only on its figures, so that the figures of other machines also count."""

Listener = Callable[[Row], None]
"""A function that is called with each row that changed, from any thread, one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run.

    Attributes:
        service: the endpoint of the service.
        max_parallel: maximum number of entries that are captured or measured at a time.
        captures: maximum number of them that are captured at a time.
        fresh: whether to measure anew even if an answer is known.
        retry_failed: whether to begin again with rows that failed.
        fail_fast: whether to stop at the first failure that is not expected.
    """

    service: Endpoint
    max_parallel: int = 8
    captures: int = 1
    fresh: bool = False
    retry_failed: bool = False
    fail_fast: bool = False


def run_zoo(
    run: Run, entries: Sequence[Entry], earlier: Sequence[Run], options: RunOptions, listener: Listener
) -> list[Row]:
    """Finish a run: ask about each entry that has no answer yet, and return all rows of these entries.

    Args:
        run: the run, which may have been interrupted before.
        entries: the entries to ask about.
        earlier: the runs before it, the newest first; their answers are taken over if nothing has changed.
        options: the options of the run.
        listener: a function that is called with each row that changed.

    Raises:
        RunError: a file of the run cannot be read or written.
        KeyboardInterrupt: the user interrupts; the run continues from there when it is run again, and jobs in the
            service go on meanwhile.
    """
    with options.service.connect() as client:
        return _Course(run, options, client, listener).completed(entries, earlier)


class _InterruptedError(Exception):
    """The run has to stop."""


class _Course:
    """The state that the threads of one run share."""

    def __init__(self, run: Run, options: RunOptions, client: Client, listener: Listener) -> None:
        self._run = run
        self._options = options
        self._client = client
        self._listener = listener
        self._stop = threading.Event()
        self._telling = threading.Lock()
        self._captures = threading.Semaphore(options.captures)

    def completed(self, entries: Sequence[Entry], earlier: Sequence[Run]) -> list[Row]:
        pending = []
        known = _Known(earlier, self._client) if not self._options.fresh else None
        for entry in entries:
            row = self._run.row(entry.name)
            again = row.state == "failed" and self._options.retry_failed
            if row.over and not again and row.asked == entry.digest:
                continue
            if known is not None and not again and row.state == "waiting" and (found := known.row(entry)) is not None:
                self._take_over(entry, *found)
                continue
            pending.append((entry, row))
        with ThreadPoolExecutor(self._options.max_parallel, thread_name_prefix="fxlib-zoo") as pool:
            futures = [pool.submit(self._complete, entry, row) for entry, row in pending]
            try:
                for future in futures:
                    while not future.done():
                        time.sleep(_POLL_S)  # Future.result would keep an interrupt waiting
                    future.result()
            except BaseException:
                self._stop.set()
                for future in futures:
                    future.cancel()
                raise
        return [self._run.row(entry.name) for entry in entries]

    def _anew(self, entry: Entry, row: Row) -> Row:
        return Row(
            name=entry.name,
            asked=entry.digest,
            recipe=", ".join(name for name, _ in entry.steps) or entry.recipe,
            attempt=row.attempt + 1,
            confidence=entry.confidence,
        )

    def _take_over(self, entry: Entry, row: Row, run: Run) -> None:
        expected = entry.expects(row.decision, row.reason, measured=row.gain is not None, failed=False)
        if (report := run.report(entry.name)) and run.folder != self._run.folder:
            self._run.write_report(entry.name, report)
        self._tell(replace(row, reused=True, expected=expected))

    def _complete(self, entry: Entry, found: Row) -> None:
        """Finish an entry whose row was `found`, unless another command in the run's folder does so meanwhile."""
        try:
            with self._run.locked(entry.name, lambda: self._check(_POLL_S)):
                row = self._run.row(entry.name)
                if row.over and row.asked == entry.digest and row != found:
                    with self._telling:
                        self._listener(row)
                    return
                goes_on = row.asked == entry.digest and not row.over
                self._finish(entry, row if goes_on else self._anew(entry, row))
        except _InterruptedError:
            return

    def _finish(self, entry: Entry, row: Row) -> None:
        start = time.monotonic()
        deadline = start + entry.deadline_s
        try:
            if row.state == "asked":  # it was asked before the run was interrupted
                row = self._followed(entry, row, deadline) or self._anew(entry, row)
            if row.state == "waiting":
                with self._turn() as waited_s:  # the captures of other models take none of this one's time
                    deadline += waited_s
                    row = self._ask(entry, row, deadline)
            if row.state == "asked":
                row = self._followed(entry, row, deadline) or _failed(row, "SERVICE", "the service forgot the job")
        except RemoteError as error:
            row = _failed(row, "SERVICE", str(error))
        failed = row.state == "failed"
        expected = entry.expects(row.decision, row.reason, measured=row.gain is not None, failed=failed)
        self._tell(
            replace(row, expected=expected, seconds=time.monotonic() - start, finished_at=datetime.now(UTC).isoformat())
        )
        if self._options.fail_fast and not expected:
            self._stop.set()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[float]:
        """Have no more captures in the block than are wanted at a time; yield the seconds that this took."""
        start = time.monotonic()
        while not self._captures.acquire(timeout=_POLL_S):
            self._check()
        try:
            yield time.monotonic() - start
        finally:
            self._captures.release()

    def _ask(self, entry: Entry, row: Row, deadline: float) -> Row:
        """Capture the model in a process of its own, which hands its question in."""
        self._check()
        self._tell(row)
        limit = min(deadline, time.monotonic() + entry.capture_s)
        request = f"{self._run.name}/{entry.name}/{row.attempt}/{row.asked}"
        requests = [request, *(f"{request}/{index}" for index in range(1, len(entry.wheres)))]
        asked = {
            "entry": asdict(entry),
            "service": _elsewhere(self._options.service),
            "request_ids": [uuid.uuid5(_IDS, each).hex for each in requests],
            "fresh": self._options.fresh,
        }
        answer = _ModelProcess(asked, self._run.log(entry.name)).answer(limit, self._check)
        try:
            row = replace(row, capture_s=answer.get("capture_s"), dependencies=_dependencies(answer))
            if "failed" in answer:
                return Row.of(asdict(_failed(row, answer["failed"], answer["message"])))
            if "report" in answer:
                row = Row.of(asdict(_answered(row, answer["report"])))
                self._run.write_report(entry.name, answer["report"])
                return row
            row = Row.of(
                asdict(replace(_with_jobs(row, entry, answer["jobs"]), state="asked", cached=answer["cached"]))
            )
        except (KeyError, TypeError, ValueError, AttributeError):  # the model wrote the message
            return _failed(
                replace(row, capture_s=None, dependencies=None),
                "ANSWER",
                "the process wrote an answer of another form than its own",
            )
        self._tell(row)
        return row

    def _followed(self, entry: Entry, row: Row, deadline: float) -> Row | None:
        """Wait for the service's answer, across its restarts; return None if it no longer knows a job."""
        if not (row.job_ids and _are_ids(row.job_ids)):
            return None
        jobs = list[Job]()
        for job_id in row.job_ids:
            try:
                job = self._ended(job_id, deadline)
            except RejectedError as error:
                return None if error.code == _UNKNOWN_JOB else _failed(row, error.code or "SERVICE", str(error))
            if job is None:
                for each in row.job_ids[len(jobs) :]:
                    with contextlib.suppress(RemoteError):
                        self._client.cancel(each, timeout_s=5.0)
                which = f" of a worker with {show_labels(row.replicas[len(jobs)].where)}" if row.replicas else ""
                return _failed(row, "DEADLINE", f"there is no answer{which} after {entry.deadline_s:g} s")
            jobs.append(job)
        return self._concluded(entry, row, jobs)

    def _ended(self, job_id: str, deadline: float) -> Job | None:
        """Return a job once it has ended; None if it has not ended by the deadline."""
        pause_s = _POLL_S
        while True:
            try:
                if (job := self._client.job(job_id, timeout_s=5.0)).done:
                    return job
            except RemoteError as error:
                if not (isinstance(error, ServiceUnavailableError) or getattr(error, "code", "") in _BUSY):
                    raise
            if time.monotonic() > deadline:
                return None
            self._check(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _concluded(self, entry: Entry, row: Row, jobs: Sequence[Job]) -> Row:
        reports = []
        for index, job in enumerate(jobs):
            if job.report is None:
                problem = f"{job.failure.message} ({job.failure.code})" if job.failure else f"the job was {job.state}"
                if row.replicas:
                    problem = f"where {show_labels(row.replicas[index].where)}: {problem}"
                return _failed(row, job.failure.code if job.failure else job.state.upper(), problem)
            reports.append(cast("dict[str, Any]", plain(job.report.to_dict())))
        self._run.write_report(entry.name, reports[0])
        row = replace(row, cached=row.cached or all(job.cached for job in jobs))
        return _between(entry, row, jobs, reports) if row.replicas else _answered(row, reports[0])

    def _tell(self, row: Row) -> None:
        with self._telling:
            self._run.write(row)
            self._listener(row)

    def _check(self, wait_s: float = 0.0) -> None:
        if self._stop.wait(wait_s):
            raise _InterruptedError


class _Known:
    """The answers of earlier runs that still hold."""

    def __init__(self, earlier: Sequence[Run], client: Client) -> None:
        self._earlier = earlier
        self._client = client
        self._states: dict[str, tuple[int, int] | None] = {}
        self._environment = environment() if earlier else ""
        self._away = False

    def row(self, entry: Entry) -> tuple[Row, Run] | None:
        """Return the newest answer to the same question about the same files, if the service still has it."""
        for run in self._earlier:
            try:
                row = run.row(entry.name)
            except FxlibError:
                continue
            if row.state == "waiting":
                continue
            if row.state != "done" or row.asked != entry.digest or row.dependencies is None:
                return None
            if not row.dependencies.unchanged(self._states, self._environment):
                return None
            return (row, run) if all(map(self._knows, row.job_ids)) else None
        return None

    def _knows(self, job_id: str) -> bool:
        if self._away:
            return False
        try:
            return self._client.job(job_id, timeout_s=5.0).state == "succeeded"
        except ServiceUnavailableError:
            self._away = True
        except RemoteError:
            pass
        return False


class _ModelProcess:
    """A process that makes and captures one model; it and the processes that it started end with `answer`."""

    def __init__(self, asked: dict[str, Any], log: Any) -> None:
        self._asked = json.dumps(asked).encode()
        self._log = log

    def answer(self, limit: float, check: Callable[[], None]) -> dict[str, Any]:
        """Return the process's last message; a failure if there is none by `limit`, a time of `time.monotonic`.

        Raises:
            RunError: the process's log cannot be written.
        """
        try:
            log = self._log.open("wb")
        except OSError as error:
            raise RunError(error.strerror or str(error), where=str(self._log)) from error
        reading, writing = os.pipe()
        with log, os.fdopen(reading, "rb") as answers:
            command = [sys.executable, "-P", "-m", "fxlib.zoo.model_process", str(writing)]
            if sys.platform == "linux":
                command = [sys.executable, "-I", "-S", reaper.__file__, str(writing), *command]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                env={"PYTHONHASHSEED": "0", **os.environ},
                start_new_session=True,
            )
            os.close(writing)
            try:
                with cast("IO[bytes]", process.stdin) as questions, contextlib.suppress(BrokenPipeError):
                    questions.write(self._asked)
                return self._last(process, answers, limit, check)
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_REAPED_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _last(
        self, process: subprocess.Popen[bytes], answers: IO[bytes], limit: float, check: Callable[[], None]
    ) -> dict[str, Any]:
        received, phase, closed = bytearray(), "starting", False
        while True:
            check()
            ended = process.poll() is not None
            # Processes that it forked may hold the other end open, so that there is no end of file.
            while not closed and select.select([answers], [], [], 0.0 if ended else _POLL_S)[0]:
                data = os.read(answers.fileno(), 1 << 16)
                received += data
                closed = not data or len(received) > _LONGEST_LINE
            while b"\n" in received:
                line, _, received = received.partition(b"\n")
                message = _read(line)
                if "phase" not in message:
                    return message
                phase = message["phase"]
            if ended:
                return {"failed": "CRASHED", "message": f"the process ended {_how(process.returncode)} while {phase}"}
            if closed:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                    continue
                return {"failed": "CRASHED", "message": f"the process stopped answering while {phase}"}
            if time.monotonic() > limit:
                return {"failed": "TIME", "message": f"the time for it passed while {phase}"}


def _read(line: bytearray) -> dict[str, Any]:
    """Return a line of the process as a message, or a failure if it is none: the model may write anything."""
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        message = None
    return message if isinstance(message, dict) else {"failed": "ANSWER", "message": "the process wrote no answer"}


def _how(status: int) -> str:
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def _failed(row: Row, code: str, message: str) -> Row:
    return replace(row, state="failed", failure=code, explanation=message, decision="", reason="", gain=None)


def _answered(row: Row, report: dict[str, Any]) -> Row:
    """Return the row with the figures of a report, as `Result.to_dict` has it."""
    gain = report.get("gain")
    before, after = ((report.get(name) or {}).get("value") for name in ("qps_original", "qps_optimized"))
    return replace(
        row,
        state="done",
        decision=report["decision"],
        reason=report["reason"] or "",
        explanation=report["explanation"],
        gain=None if gain is None else Estimate(**gain),
        max_relative_error=report.get("max_relative_error"),
        hardware=report.get("hardware", ""),
        torch_version=report.get("torch_version", ""),
        qps_original=before,
        qps_optimized=after,
    )


def _with_jobs(row: Row, entry: Entry, jobs: Sequence[str]) -> Row:
    """Return the row with its job, or with its jobs on several machines.

    Raises:
        ValueError: there is another number of jobs, or one of them has an impossible id.
    """
    if not _are_ids(jobs):
        raise ValueError("no ids of jobs")
    if not entry.replicas:
        (job_id,) = jobs
        return replace(row, job_id=job_id)
    made = [Replica(where=where, job_id=job_id) for where, job_id in zip(entry.wheres, jobs, strict=True)]
    return replace(row, replicas=tuple(made))


def _between(entry: Entry, row: Row, jobs: Sequence[Job], reports: Sequence[dict[str, Any]]) -> Row:
    """Return the row with the mean gain over the machines that measured it, and the decision that follows from it."""
    rows = [_answered(row, report) for report in reports]
    replicas = tuple(
        replace(
            each, worker=job.worker_id, hardware=one.hardware, decision=one.decision, reason=one.reason, gain=one.gain
        )
        for each, job, one in zip(row.replicas, jobs, rows, strict=True)
    )
    errors = [one.max_relative_error for one in rows if one.max_relative_error is not None]
    row = replace(
        rows[0],
        replicas=replicas,
        qps_original=None,
        qps_optimized=None,
        max_relative_error=max(errors) if errors else None,
        hardware="; ".join(dict.fromkeys(one.hardware for one in rows)),
    )
    machines = defaultdict[str, list[Estimate]](list)
    for each, one in zip(replicas, rows, strict=True):
        if one.gain is None or (one.decision != "adopt" and one.reason not in _BY_SPEED):
            why = f"where {show_labels(each.where)}: {one.explanation}"
            return replace(row, decision="keep_original", reason=one.reason, explanation=why, gain=None)
        machines[each.worker or each.job_id].append(one.gain)
    gain = pooled(list(machines.values()), entry.confidence)
    reason = Reason.FASTER if gain.low > entry.min_gain else Reason.NOT_FASTER
    over = f"over {len(machines)} machines" if len(machines) > 1 else "on one machine, which measured all"
    return replace(
        row,
        decision="adopt" if reason is Reason.FASTER else "keep_original",
        reason=reason.name,
        explanation=f"{reason.sentence()} ({over})",
        gain=gain,
    )


def _are_ids(jobs: Sequence[str]) -> bool:
    return all(re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", each) for each in jobs)


def _elsewhere(service: Endpoint) -> dict[str, Any]:
    """Return how to reach the service for a process whose model may change the folder."""
    found = asdict(service)
    found["token_file"] = found["token_file"] or os.environ.get(TOKEN_FILE) or None
    paths = {name: found[name] for name in ("ca", "certificate", "key", "token_file")}
    return found | {name: None if path is None else str(Path(path).absolute()) for name, path in paths.items()}


def _dependencies(answer: dict[str, Any]) -> Dependencies | None:
    found = answer.get("dependencies")
    return None if found is None else Dependencies(**found)
