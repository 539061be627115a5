"""The worker's side of the process that drives trials: it starts the process once and asks it for each trial."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from fxlib.errors import FxlibError
from fxlib.reasons import Reason
from fxlib.spec.report import Report
from fxlib_workers import logs
from fxlib_workers.config import TRIAL_SETTINGS, TrialSettings
from fxlib_workers.exchange import JobFolder, ReportProgress
from fxlib_workers.process.child import COMPILER_CACHE, Child, ChildEndedError, Message
from fxlib_workers.trial.failures import came_from_outside

_LOG: Final = logs.Log(__name__)

Check = Callable[[], None]
"""A function that raises when this worker may no longer finish the job."""

Plans = Mapping[str, Callable[[], object]]
"""Functions, by program, that remake the candidates in the program's folder from the profile written there."""

_NO_PLANS: Final[Plans] = {}

_POLL_S: Final = 0.2
_RAY_START_S: Final = 120.0
_SILENCE_S: Final = 90.0
"""Seconds without a message after which the driver counts as hung; it sends one every few seconds."""

_STOP_TIMEOUT_S: Final = 5.0
_ATTEMPTS: Final = 3
"""The number of attempts at a trial whose processes are killed from outside, or whose driver fails."""


class DriverError(Exception):
    """The driver's process failed through no fault of the job: Ray could not be started, or broke down."""


class RefusedJobError(FxlibError):
    """The driver cannot read a file of the job, although the service accepted it."""


class TrialDriver:
    """Runs trials in a driver process, which keeps Ray up between them.

    Args:
        settings: the operator's settings.
        root: the worker's folder.
    """

    def __init__(self, settings: TrialSettings, root: Path) -> None:
        self._settings = settings
        self._root = root
        self._driver: Child | None = None
        self._ready = False

    def start(self) -> None:
        """Start the driver unless it is running; return at once, while Ray is starting."""
        if self._driver is None:
            environment = {
                TRIAL_SETTINGS: json.dumps(asdict(self._settings)),
                COMPILER_CACHE: str(self._root / "torchinductor"),
            }
            if not self._settings.ray_address:
                # Ray would choose the same with a warning; it reads the variable when it is imported.
                environment["RAY_AUTH_MODE"] = os.environ.get("RAY_AUTH_MODE", "token")
            self._driver = Child(
                "fxlib_workers.trial", self._root, environment, keep_variables=("RAY_*", *self._settings.keep_variables)
            )
            self._ready = False

    def end(self) -> None:
        """End the driver, Ray, and all processes of a trial."""
        if self._driver is not None:
            self._driver.end()
            self._driver = None

    def run(self, folder: JobFolder, report_progress: ReportProgress, check: Check, plans: Plans = _NO_PLANS) -> Report:
        """Run the trial of the job in `folder`, and of its variants, and return the whole report.

        Args:
            folder: the job's folder, which holds request, original, candidates and what the passes did.
            report_progress: the function that passes progress on.
            check: a function that is called while the trial runs; an exception from it ends the trial.
            plans: functions, by program ("main" for the job's own step, else a variant), that plan anew after the trial
                has written a profile; programs that need no profile are missing.

        Raises:
            RefusedJobError: the job cannot be read.
            OSError: this worker's disk fails.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                report = self._run(folder, report_progress, check, plans)
                if attempt == _ATTEMPTS or not killed_from_outside(report):
                    return report
                _LOG.warning("a process of the trial was killed", attempt=attempt, how=report.explanation)
                report_progress("sameness", "a process of the trial was killed; it is run again")
            except DriverError as error:
                self.end()
                _LOG.warning("trial driver failed", attempt=attempt, error=error)
                reason, detail = Reason.TRIAL_DIED if self._ready else Reason.NO_CAPACITY, str(error)
            except RefusedJobError:
                raise
            except BaseException:
                self._interrupt()
                raise
        variants = {name: _keep_original(each.read_rewrite(), reason, detail) for name, each in folder.variants.items()}
        return replace(_keep_original(folder.read_rewrite(), reason, detail), variants=variants)

    def _run(self, folder: JobFolder, report_progress: ReportProgress, check: Check, plans: Plans) -> Report:
        self.start()
        if not self._ready:
            self._await({"ready"}, report_progress, check, silence_s=_RAY_START_S)
            self._ready = True
        self._send(folder=str(folder.path), profile=list(plans))
        while "profiled" in (
            message := self._await({"profiled", "done"}, report_progress, check, silence_s=_SILENCE_S)
        ):
            plans[message["profiled"]]()
            self._send(planned=True)
        return folder.read_report()

    def _await(
        self, wanted: AbstractSet[str], report_progress: ReportProgress, check: Check, *, silence_s: float
    ) -> Message:
        last_message_at = time.monotonic()
        while time.monotonic() - last_message_at < silence_s:
            check()
            message = self._receive(_POLL_S)
            if message is None:
                continue
            last_message_at = time.monotonic()
            if "failed" in message:
                if (number := message.get("disk")) is not None:
                    raise OSError(number, message["failed"])
                raise DriverError(message["failed"])
            if "refused" in message:
                raise RefusedJobError(message["refused"])
            if "phase" in message:
                report_progress(message["phase"], message["message"], message["progress"])
            if wanted & message.keys():
                return message
        raise DriverError(f"the driver sent no message for {silence_s:.0f} s")

    def _interrupt(self) -> None:
        """Stop the trial and end a driver that does not answer."""
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        try:
            self._send(stop=True)
            while self._ready and time.monotonic() < deadline:
                message = self._receive(_POLL_S)
                if message is not None and ("interrupted" in message or "done" in message):
                    return
        except DriverError:
            pass
        self.end()

    def _send(self, **message: object) -> None:
        try:
            self._present().channel.send(**message)
        except ChildEndedError:
            raise DriverError("the driver ended") from None

    def _receive(self, timeout_s: float) -> Message | None:
        try:
            return self._present().channel.receive(timeout_s)
        except (ChildEndedError, ValueError):
            raise DriverError("the driver ended") from None

    def _present(self) -> Child:
        if self._driver is None:
            raise DriverError("the driver is not running")
        return self._driver


def killed_from_outside(report: Report) -> bool:
    """Return whether a trial ended because one of its processes was killed, by whomever or with its node."""
    reports = (report, *report.variants.values())
    return any(came_from_outside(each.reason, each.explanation) for each in reports)


def _keep_original(report: Report, reason: Reason, detail: str) -> Report:
    """Return a report that keeps the original, for this reason unless it has one already."""
    if report.reason is not None:
        return report
    return replace(report, decision="keep_original", reason=reason, explanation=reason.sentence(detail))
