"""The tables of the SQL store, and the conversions between rows and jobs, events and workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Final

import sqlalchemy as sa

from fxlib.spec.job import JobFailure
from fxlib_service.job import Event, Job, State
from fxlib_service.stores.base import Worker

metadata: Final = sa.MetaData()

version = sa.Table(
    # The last applied step of `migrations`, as Alembic writes and reads it, but under a name of its own:
    # `alembic_version` may belong to another program in this database.
    "fxlib_version",
    metadata,
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="fxlib_version_pkc"),
)

about = sa.Table(
    "fxlib_about",
    metadata,
    # Read by services older than `fxlib_version`. A step of a later release will drop it.
    sa.Column("schema_version", sa.Integer, nullable=False, server_default="5"),
    # The time at which any of the services that share the database last looked for expired leases, by the database's
    # clock.
    sa.Column("swept_at", sa.Double, nullable=False, server_default="0"),
)

_CACHED: Final = sa.column("cached", sa.Boolean)

jobs = sa.Table(
    "jobs",
    metadata,
    # The order of acceptance. SQLite automatically numbers only a column of exactly this type.
    sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    sa.Column("request_id", sa.String(128), nullable=False),
    sa.Column("request_digest", sa.String(64), nullable=False),
    sa.Column("namespace", sa.String(64), nullable=False),
    sa.Column("name", sa.String(256), nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("torch_version", sa.String(64), nullable=False),
    sa.Column("cache_key", sa.String(64), nullable=False),
    sa.Column("fresh", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("phase", sa.String(64), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.String(256), nullable=False),
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("hardware", sa.Text, nullable=False),
    sa.Column("started_at", sa.Double),
    sa.Column("finished_at", sa.Double),
    sa.Column("failure_code", sa.String(64)),
    sa.Column("failure_message", sa.Text),
    sa.Column("cached", sa.Boolean, nullable=False),
    sa.Column("reusable", sa.Boolean, nullable=False),
    sa.Column("last_sequence", sa.BigInteger, nullable=False),
    sa.Column("asked_by", sa.String(64), nullable=False, server_default=""),
    sa.Column("asked_from", sa.String(256), nullable=False, server_default=""),
    sa.Column("measured_by", sa.String(64), nullable=False, server_default=""),
    sa.Column("labels_asked", sa.Text, nullable=False, server_default=""),  # of the worker, by `labels_to_text`
    # The time at which a running job's lease ends, by the database's clock, if several services share the database.
    sa.Column("leased_until", sa.Double, nullable=False, server_default="0"),
    sa.UniqueConstraint("namespace", "request_id"),
    sa.Index("jobs_by_state", "state", "torch_version", "namespace", "number"),
    sa.Index("jobs_by_answer", "cache_key", "state", "finished_at"),
    sa.Index("jobs_by_finish", "state", "finished_at"),
    sa.Index("jobs_by_namespace", "namespace", "number"),
    sa.Index("jobs_by_turn", "namespace", "started_at", sqlite_where=~_CACHED, postgresql_where=~_CACHED),
    sqlite_autoincrement=True,
)

labels = sa.Table(
    "labels",
    metadata,
    sa.Column("key", sa.String(256), primary_key=True),
    sa.Column("value", sa.String(256), primary_key=True),
    sa.Column("job_id", sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Index("labels_by_job", "job_id"),  # to delete a job
)

payloads = sa.Table(
    "payloads",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("job_id", sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("phase", sa.String(64), nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("progress", sa.Double, nullable=False),
)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("id", sa.String(256), primary_key=True),
    sa.Column("torch_version", sa.String(64), nullable=False),
    sa.Column("hardware", sa.Text, nullable=False),
    sa.Column("fxlib_version", sa.String(64), nullable=False),
    sa.Column("allowed_modules", sa.JSON, nullable=False),
    sa.Column("containment", sa.String(64), nullable=False, server_default=""),
    sa.Column("labels", sa.Text, nullable=False, server_default=""),
    sa.Column("seen_at", sa.Double, nullable=False),
)

holdings = sa.Table(
    "holdings",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Index("holdings_by_blob", "sha256"),
)

# The next two tables are used if several services share the database, whose clock gives their times.

calls_in_flight = sa.Table(
    "calls_in_flight",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("service", sa.String(64), primary_key=True),
    sa.Column("calls", sa.Integer, nullable=False),
    sa.Column("told_at", sa.Double, nullable=False),  # when the service last reported
)

live_reports = sa.Table(
    "live_reports",
    metadata,
    sa.Column("tenant", sa.String(256), primary_key=True),
    sa.Column("due_at", sa.Double, nullable=False),  # when the reports so far would end if evenly spread
)

_OWN_FORM: Final = {"state", "labels", "where", "failure"}
_SAME_NAME: Final = [each.name for each in fields(Job) if each.name not in _OWN_FORM]

Row = sa.RowMapping


def labels_to_text(labels: Mapping[str, str]) -> str:
    """Return the text that represents labels; equal labels have equal text, and no labels have empty text."""
    return json.dumps(dict(sorted(labels.items()))) if labels else ""


def labels_from_text(text: str) -> dict[str, str]:
    """Return the labels in a text from `labels_to_text`."""
    return json.loads(text) if text else {}


def worker_to_row(worker: Worker) -> dict[str, object]:
    """Return a worker as a row of `workers`."""
    row = asdict(worker)
    return row | {"allowed_modules": list(worker.allowed_modules), "labels": labels_to_text(worker.labels)}


def worker_from_row(row: Row) -> Worker:
    """Return the worker in a row from `worker_to_row`."""
    own_form = {"allowed_modules": tuple(row["allowed_modules"]), "labels": labels_from_text(row["labels"])}
    return Worker(**{**row, **own_form})


def job_to_row(job: Job) -> dict[str, object]:
    """Return a job as a row of `jobs`, without its number."""
    row = {name: getattr(job, name) for name in _SAME_NAME}
    failure = job.failure
    return row | {
        "state": job.state.value,
        "labels": dict(job.labels),
        "labels_asked": labels_to_text(job.where),
        "failure_code": failure.code if failure else None,
        "failure_message": failure.message if failure else None,
    }


def job_from_row(row: Row) -> Job:
    """Return the job in a row from `job_to_row`."""
    code = row["failure_code"]
    return Job(
        **{name: row[name] for name in _SAME_NAME},
        state=State(row["state"]),
        labels=row["labels"],
        where=labels_from_text(row["labels_asked"]),
        failure=JobFailure(code=code, message=row["failure_message"]) if code is not None else None,
    )


def event_to_row(job_id: str, event: Event) -> dict[str, object]:
    """Return an event as a row of `events`."""
    return {
        "job_id": job_id,
        "sequence": event.sequence,
        "at": event.at,
        "state": event.state.value,
        "phase": event.phase,
        "message": event.message,
        "progress": event.progress,
    }


def event_from_row(row: Row) -> Event:
    """Return the event that `event_to_row` made a row of."""
    return Event(
        sequence=row["sequence"],
        at=row["at"],
        state=State(row["state"]),
        phase=row["phase"],
        message=row["message"],
        progress=row["progress"],
    )
