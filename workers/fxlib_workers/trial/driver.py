"""The worker's side of the process that drives trials: started once, asked for one trial after another."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from fxlib.reasons import Reason
from fxlib.spec.report import Report
from fxlib_workers import logs
from fxlib_workers.config import TRIAL_SETTINGS, TrialSettings
from fxlib_workers.exchange.job_folder import JobFolder, Tell
from fxlib_workers.process.child import Child, ChildEndedError, Message

Check = Callable[[], None]
"""Raises when the job is not wanted any more."""

Plans = Mapping[str, Callable[[], object]]
_NO_PLANS: Final[Plans] = {}

_GLANCE_S: Final = 0.2
_RAY_START_S: Final = 120.0
_SILENCE_S: Final = 90.0
"""A driver that has said nothing for so long hangs: it tells that it is alive every few seconds."""

_PATIENCE_S: Final = 5.0
_TRIES: Final = 2


class DriverError(Exception):
    """The driver's process failed, not the job: Ray could not be started, or broke down."""


class Trials:
    """Runs trials in a driver process, which keeps Ray up between them.

    Args:
        settings: the operator's.
        root: the worker's folder.
    """

    def __init__(self, settings: TrialSettings, root: Path) -> None:
        self._settings = settings
        self._root = root
        self._driver: Child | None = None
        self._ready = False

    def start(self) -> None:
        """Start the driver, unless it runs; returns at once, while Ray comes up."""
        if self._driver is None:
            environment = {TRIAL_SETTINGS: json.dumps(asdict(self._settings))}
            if not self._settings.ray_address:
                # As Ray itself would decide, and then warn of; it reads this when it is imported.
                environment["RAY_AUTH_MODE"] = os.environ.get("RAY_AUTH_MODE", "token")
            self._driver = Child(
                "fxlib_workers.trial", self._root, environment, keeps=("RAY_*", *self._settings.keep_variables)
            )
            self._ready = False

    def end(self) -> None:
        """End the driver, Ray, and all processes of a trial."""
        if self._driver is not None:
            self._driver.end()
            self._driver = None

    def run(self, folder: JobFolder, tell: Tell, check: Check, plans: Plans = _NO_PLANS) -> Report:
        """Run the trial of the job in `folder`, and of its variants, and return the whole report.

        Args:
            folder: holds request, original, drafts and what the passes did.
            tell: passes progress on.
            check: called all the time; what it raises ends the trial.
            plans: by name ("main": the job's own step; else a variant's), what writes the drafts anew, by the profile
                that the trial has then left in the folder. None where no profile is wanted.
        """
        for attempt in range(1, _TRIES + 1):
            try:
                return self._run(folder, tell, check, plans)
            except DriverError as error:
                self.end()
                logs.warning("trial driver failed", attempt=attempt, error=error)
                reason, detail = Reason.TRIAL_DIED if self._ready else Reason.NO_CAPACITY, str(error)
            except BaseException:
                self._interrupt()
                raise
        variants = {name: _kept(each.read_rewrite(), reason, detail) for name, each in folder.variants.items()}
        return replace(_kept(folder.read_rewrite(), reason, detail), variants=variants)

    def _run(self, folder: JobFolder, tell: Tell, check: Check, plans: Plans) -> Report:
        self.start()
        if not self._ready:
            self._await({"ready"}, tell, check, silence_s=_RAY_START_S)
            self._ready = True
        self._send(folder=str(folder.path), profile=list(plans))
        while "profiled" in (message := self._await({"profiled", "done"}, tell, check, silence_s=_SILENCE_S)):
            plans[message["profiled"]]()
            self._send(planned=True)
        return folder.read_report()

    def _await(self, wanted: AbstractSet[str], tell: Tell, check: Check, *, silence_s: float) -> Message:
        heard_at = time.monotonic()
        while time.monotonic() - heard_at < silence_s:
            check()
            message = self._receive(_GLANCE_S)
            if message is None:
                continue
            heard_at = time.monotonic()
            if "failed" in message:
                raise DriverError(message["failed"])
            if "phase" in message:
                tell(message["phase"], message["message"], message["progress"])
            if wanted & message.keys():
                return message
        raise DriverError(f"nothing was heard of the driver for {silence_s:.0f} s")

    def _interrupt(self) -> None:
        """Stop the trial; a driver that does not answer is ended."""
        deadline = time.monotonic() + _PATIENCE_S
        try:
            self._send(stop=True)
            while self._ready and time.monotonic() < deadline:
                message = self._receive(_GLANCE_S)
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


def _kept(report: Report, reason: Reason, detail: str) -> Report:
    """Keep the original for this reason, unless there was another one before."""
    if report.reason is not None:
        return report
    return replace(report, decision="keep_original", reason=reason, explanation=reason.sentence(detail))
