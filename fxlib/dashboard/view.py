"""Collect the data of the pages as plain data, from the service, with the dashboard's own credential.

A model's gain over time is a picture: a point for each job, and a square for the gain that its training measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from markupsafe import Markup

from fxlib.client import Client
from fxlib.dashboard.recent import Recent
from fxlib.spec.job import Event, Job, JobFilter
from fxlib.spec.report import plain
from fxlib.utils.text import plain as one_line

PAGE: Final = 100
"""Number of jobs on a page, unless the visitor asks for another number."""

LARGEST_PAGE: Final = 500
_MODELS_FROM: Final = 1000
"""Number of newest jobs from which the list of models is made."""
_HISTORY: Final = 200
"""Maximum number of jobs that the history of one model shows."""
_RUNNING: Final = 500
_TIMEOUT_S: Final = 10.0

_WIDTH: Final = 900
_HEIGHT: Final = 240
_LEFT: Final = 60
_EDGE: Final = 16
_BESIDE: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The requested page of a listing."""

    size: int = PAGE
    token: str = ""


class View:
    """Queries the service for the pages. Until something happens, the same query within a second is made once.

    Args:
        client: a client of the service, with the credential of a viewer.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._recent = Recent()

    def forget(self) -> None:
        """Query anew from now on, because something happened."""
        self._recent.forget()

    def workers(self) -> dict[str, Any]:
        """Return the live workers, each with its current job, and the capabilities of the service."""
        return self._recent.get("workers", self._workers)

    def queue(self, page: Page) -> dict[str, Any]:
        """Return the running jobs, and a page of the queued ones, the longest-waiting one first."""
        return self._recent.get(("queue", page), lambda: self._queue(page))

    def jobs(self, wanted: JobFilter, page: Page) -> dict[str, Any]:
        """Return a page of the jobs that fit the filter, the newest first."""
        key = (repr(wanted), page)
        return self._recent.get(key, lambda: self._jobs(wanted, page))

    def job(self, job_id: str) -> dict[str, Any]:
        """Return one job, its whole report, and its events."""
        return self._recent.get(("job", job_id), lambda: self._job(job_id))

    def _job(self, job_id: str) -> dict[str, Any]:
        job = self._client.job(job_id, timeout_s=_TIMEOUT_S)
        report = None if job.report is None else job.report.to_dict()
        return {**_line(job), **_times(job), "report": report, "events": self._events(job)}

    def models(self) -> dict[str, Any]:
        """Return the models of the newest jobs, each with its last answer."""
        return self._recent.get("models", self._models)

    def model(self, namespace: str, name: str) -> dict[str, Any]:
        """Return one model's answered jobs, the newest first."""
        return self._recent.get(("model", namespace, name), lambda: self._model(namespace, name))

    def _model(self, namespace: str, name: str) -> dict[str, Any]:
        wanted = JobFilter(namespace=namespace, name=name, states=("succeeded",))
        found = self._client.page(wanted, size=_HISTORY, timeout_s=_TIMEOUT_S)
        return {
            "namespace": namespace,
            "name": name,
            "jobs": [_line(job) for job in found.jobs],
            "more": bool(found.following),
        }

    def fingerprint(self) -> str:
        """Return a text that changes whenever a page about the workers, the queue, or the newest jobs would change."""
        newest = self._client.page(size=PAGE, timeout_s=_TIMEOUT_S).jobs
        jobs = {job.id: job for job in (*newest, *self._running())}
        workers = [worker.worker_id for worker in self._client.capabilities(timeout_s=_TIMEOUT_S).workers]
        return repr((workers, [(job.id, job.state, job.phase, job.last_sequence) for job in jobs.values()]))

    def _workers(self) -> dict[str, Any]:
        answer = self._client.capabilities(timeout_s=_TIMEOUT_S)
        has = {job.worker_id: _line(job) for job in self._running()}
        workers = [
            {
                "id": one_line(worker.worker_id),
                "hardware": one_line(worker.hardware),
                "torch_version": one_line(worker.torch_version),
                "fxlib_version": one_line(worker.fxlib_version),
                "labels": {one_line(key): one_line(value) for key, value in sorted(worker.labels.items())},
                "containment": one_line(worker.containment),
                "allowed_modules": [one_line(each) for each in worker.allowed_modules],
                "job": has.get(one_line(worker.worker_id)),
            }
            for worker in answer.workers
        ]
        return {
            "service": {
                "version": one_line(answer.fxlib_version),
                "recipes": [one_line(each) for each in answer.recipes],
            },
            "workers": workers,
        }

    def _queue(self, page: Page) -> dict[str, Any]:
        waiting = self._client.page(
            JobFilter(states=("queued",)), size=page.size, token=page.token, oldest_first=True, timeout_s=_TIMEOUT_S
        )
        return {
            "running": [_line(job) for job in self._running()],
            "queued": [_line(job) for job in waiting.jobs],
            "following": waiting.following,
        }

    def _jobs(self, wanted: JobFilter, page: Page) -> dict[str, Any]:
        found = self._client.page(wanted, size=page.size, token=page.token, timeout_s=_TIMEOUT_S)
        return {"jobs": [_line(job) for job in found.jobs], "following": found.following}

    def _models(self) -> dict[str, Any]:
        found = self._client.jobs(states=("succeeded",), limit=_MODELS_FROM, timeout_s=_TIMEOUT_S)
        models = dict[tuple[str, str], dict[str, Any]]()
        for job in found:  # the newest first
            known = models.setdefault((job.namespace, job.name), {"last": _line(job), "jobs": 0})
            known["jobs"] += 1
        rows = [{"namespace": key[0], "name": key[1], **models[key]} for key in sorted(models)]
        return {"models": rows, "from_jobs": len(found), "all": len(found) < _MODELS_FROM}

    def _running(self) -> list[Job]:
        return self._client.jobs(states=("running",), limit=_RUNNING, timeout_s=_TIMEOUT_S)

    def _events(self, job: Job) -> list[dict[str, Any]]:
        """Return the events that a job has so far."""
        found = list[Event]()

        def note(event: Event) -> None:
            found.append(event)
            if event.sequence >= job.last_sequence:
                raise _AllEventsReadError

        if job.last_sequence:
            with suppress(_AllEventsReadError):
                self._client.watch(job.id, note, timeout_s=_TIMEOUT_S)
        return [event_data(event) for event in found]


def event_data(event: Event) -> dict[str, Any]:
    """Return an event as plain data."""
    data: dict[str, Any] = plain(event)
    return data


class _AllEventsReadError(Exception):
    """All present events of a job have been delivered."""


def _line(job: Job) -> dict[str, Any]:
    """Return a job as a row of a table."""
    ended = job.finished_at
    return {
        "id": job.id,
        "name": job.name,
        "namespace": job.namespace,
        "labels": dict(job.labels),
        "where": dict(job.where),
        "state": job.state,
        "phase": job.phase,
        "cached": job.cached,
        "decision": None if job.report is None else job.report.decision,
        "gain": None if job.report is None or job.report.gain is None else plain(job.report.gain),
        "live": plain(job.live),
        "why": _why(job),
        "worker_id": job.worker_id,
        "created_at": plain(job.created_at),
        "took_s": (ended - job.created_at).total_seconds() if ended and job.created_at else None,
    }


def _times(job: Job) -> Mapping[str, Any]:
    """Return the fields that a job's own page has besides those of a row."""
    return {
        "attempts": job.attempts,
        "asked_by": job.asked_by,
        "measured_by": job.measured_by,
        "started_at": plain(job.started_at),
        "finished_at": plain(job.finished_at),
        "failure": plain(job.failure),
        "last_sequence": job.last_sequence,
        "done": job.done,
    }


def _why(job: Job) -> str:
    """Return the reason for a job's state or decision in one line."""
    if job.failure is not None:
        return f"{job.failure.message} ({job.failure.code})"
    if job.report is not None:
        return job.report.explanation
    waits = job.waits_for or "waits for a worker"
    return {"queued": waits, "running": job.phase, "cancelled": "was cancelled"}.get(job.state, "")


def gain_chart(jobs: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the gains of jobs, given newest first; return nothing if none was measured. All text is escaped."""
    measured = [job for job in reversed(jobs) if job["gain"]]
    if not measured:
        return Markup("")
    seen = [job["live"]["gain"] for job in measured if job["live"] and job["live"]["gain"]]
    gains = (*(job["gain"] for job in measured), *seen)
    low = min(0.0, *(gain["low"] for gain in gains))
    high = max(0.0, *(each for gain in gains for each in (gain["value"], gain["high"]) if each < math.inf))
    room = (high - low) or 1.0

    def y(gain: float) -> float:
        return _EDGE + (high - min(gain, high)) / room * (_HEIGHT - 2 * _EDGE)

    parts = []
    for gain in (low, 0.0, high):
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(gain):.1f}" y2="{y(gain):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(gain) + 4:.1f}" text-anchor="end">{gain:+.0%}</text>')
    step = (_WIDTH - _LEFT - 2 * _EDGE) / max(len(measured) - 1, 1)
    for index, job in enumerate(measured):
        x, gain = _LEFT + _EDGE + index * step, job["gain"]
        kind = "adopted" if job["decision"] == "adopt" else "kept"
        point = f'<circle cx="{x:.1f}" cy="{y(gain["value"]):.1f}" r="4"/>'
        parts.append(_mark(kind, job["created_at"] or "", gain, x=x, y=y, point=point))
        if job["live"] and (live := job["live"]["gain"]):
            beside = x + _BESIDE
            square = f'<rect x="{beside - 3:.1f}" y="{y(live["value"]) - 3:.1f}" width="6" height="6"/>'
            parts.append(_mark("live", "in training", live, x=beside, y=y, point=square))
    shown = "".join(parts)
    name = f"Gain of {len(measured)} jobs, the oldest on the left"
    return Markup(  # noqa: S704 - numbers, and escaped text
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="{name}">{shown}</svg>'
    )


def _mark(kind: str, when: str, gain: Mapping[str, float], *, x: float, y: Callable[[float], float], point: str) -> str:
    """Draw one gain: its interval, its point, and both in words."""
    words = escape(f"{when}: {gain['value']:+.1%} [{gain['low']:+.1%}, {gain['high']:+.1%}]")
    return (
        f'<g class="{kind}"><title>{words}</title>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(gain["low"]):.1f}" y2="{y(gain["high"]):.1f}"/>{point}</g>'
    )
