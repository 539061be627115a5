"""The job store in a PostgreSQL database, which several services may share.

The state that a single process would keep in memory is in the database: the ends of leases, by the database's own
clock, and the changes of jobs, which are sent to all services on commit (`NOTIFY`). Decisions that only one service may
make at a time are made under an advisory lock, which ends with the transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry
from typing_extensions import override

from fxlib_service.errors import Code, ServiceError
from fxlib_service.job import State
from fxlib_service.leases import Lease
from fxlib_service.lifecycle import Transition
from fxlib_service.stores import schema
from fxlib_service.stores.direct import Direct
from fxlib_service.stores.sql import SCHEMA, SqlJobStore

_CHANNEL: Final = "fxlib_jobs"
_CHECK_S: Final = 5.0
_RETRY_S: Final = 2.0
_GAP_S: Final = 5.0
"""Seconds without a look at leases after which they are taken to be live, since no service was there to extend them."""
_SILENT_S: Final = 20.0
"""Seconds without a report of calls after which a service counts as gone."""
_SOON_S: Final = 0.001
_CONNECT: Final = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "application_name": "fxlib",
}
"""Settings of libpq, which the URL may change. With them, an unresponsive database is given up within seconds."""

_LIMITS: Final = ("idle_in_transaction_session_timeout = '10s'", "lock_timeout = '10s'")
"""Settings of each connection. A service that is frozen, or cut off, in a transaction would keep its locks from all
others for as long as the database holds on to its connection."""

_JOBS = schema.jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A job that a service has changed: the number of the event, and the job's state after it."""

    origin: str
    job_id: str
    sequence: int
    state: State


class PostgresJobStore(SqlJobStore):
    """A store that several services may open at once."""

    def __init__(self, url: str) -> None:
        """Open the database, as `SqlJobStore` does.

        Raises:
            FxlibError: the database cannot be used, or its tables are of another version of the service.
        """
        self._origin = uuid.uuid4().hex
        super().__init__(url)

    @override
    def _parsed(self, url: str) -> sa.URL:
        parsed = sa.make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):  # libpq takes both names
            parsed = parsed.set(drivername="postgresql+psycopg")
        return parsed.update_query_dict({key: value for key, value in _CONNECT.items() if key not in parsed.query})

    @override
    def _engine(self, url: str) -> sa.Engine:
        engine = super()._engine(url)
        sa.event.listen(engine, "connect", _limit_waits)
        return engine

    async def changes(self) -> AsyncGenerator[Change | None]:
        """Yield the changes of other services from now on; first yield None, since earlier ones may have been missed.

        Raises:
            ServiceError: STORAGE_UNAVAILABLE when the connection is lost.
        """
        import psycopg

        arguments: Mapping[str, Any] = self._write.dialect.create_connect_args(self._write.url)[1]
        try:
            async with await psycopg.AsyncConnection.connect(**arguments, autocommit=True) as connection:
                await connection.execute(f"LISTEN {_CHANNEL}".encode())
                yield None
                while True:
                    async for notice in connection.notifies(timeout=_CHECK_S):
                        change = _read_notice(notice.payload)
                        if change is None or change.origin != self._origin:
                            yield change
                    await connection.execute("SELECT 1")  # raises if the connection was lost silently
        except psycopg.Error as error:
            raise ServiceError(Code.STORAGE_UNAVAILABLE, "the database is away", retry_after_s=_RETRY_S) from error

    def now(self) -> float:
        """Return the database's time, in seconds since the epoch."""
        with self._reading() as db:
            return float(db.execute(sa.select(_NOW)).scalar_one())

    def extend(self, job_id: str, token: str, duration_s: float) -> Lease | None:
        """Set a job's lease to end so many seconds from now; None if the job is not leased under this token."""
        mine = sa.and_(_JOBS.c.id == job_id, _JOBS.c.token == token, _JOBS.c.state == State.RUNNING)
        with self._writing() as db:
            leases = _renewed(db, mine, duration_s)
        return leases[0] if leases else None

    def holds(self, token: str) -> bool:
        """Return whether a job is leased under a token."""
        with self._reading() as db:
            found = sa.select(_JOBS.c.id).where(_JOBS.c.state == State.RUNNING, _JOBS.c.token == token)
            return bool(token) and db.execute(found).first() is not None

    def take_expired(self, duration_s: float) -> Sequence[Lease]:
        """Return the leases that have ended, for this service to expire; no other service gets them for `duration_s`.

        If no service has looked for more than a few seconds, because none was running or the database was unreachable,
        no worker could extend its lease, so all leases begin anew.
        """
        running, look = _JOBS.c.state == State.RUNNING, sa.select(schema.about.c.swept_at, _NOW)
        with self._writing() as db:
            looked = db.execute(look.with_for_update(skip_locked=True)).first()
            if looked is None:  # another service is looking right now
                return []
            swept_at, now = looked
            db.execute(schema.about.update().values(swept_at=now))
            if not 0 <= now - swept_at <= _GAP_S:
                _renewed(db, running, duration_s)
                return []
            ended = sa.select(_JOBS.c.id).where(running, _JOBS.c.leased_until < now)
            return _renewed(db, _JOBS.c.id.in_(ended.with_for_update(skip_locked=True)), duration_s)

    def count_calls(self, namespace: str, own: int, allowed: int) -> bool:
        """Record that this service has `own` open calls of a namespace, unless all services would have too many."""
        table = schema.calls_in_flight
        others = sa.select(sa.func.sum(table.c.calls)).where(
            table.c.namespace == namespace, table.c.service != self._origin, table.c.told_at > _NOW - _SILENT_S
        )
        with self._counting() as db:
            self._alone(db, f"calls of {namespace}")
            if own + (db.execute(others).scalar() or 0) > allowed:
                return False
            self._tell_calls(db, {namespace: own})
        return True

    def tell_calls(self, calls: Mapping[str, int]) -> None:
        """Record the number of open calls of namespaces that this service has."""
        with self._counting() as db:
            self._tell_calls(db, calls)

    def forget_counts(self) -> None:
        """Delete counts that have run out, and those of services that are gone."""
        calls, reports = schema.calls_in_flight, schema.live_reports
        with self._counting() as db:
            db.execute(calls.delete().where(sa.or_(calls.c.calls == 0, calls.c.told_at < _NOW - _SILENT_S)))
            db.execute(reports.delete().where(reports.c.due_at < _NOW))

    def count_live_report(self, tenant: str, interval_s: float, ahead_s: float) -> float:
        """Count a live report, or return the seconds until one fits.

        Args:
            tenant: the tenant that sends the report.
            interval_s: seconds from one report to the next, evenly spread.
            ahead_s: seconds by which reports may be ahead of that.
        """
        table = schema.live_reports
        due = sa.func.greatest(table.c.due_at, _NOW) + interval_s
        new = insert(table).values(tenant=tenant, due_at=_NOW + interval_s)
        counted = new.on_conflict_do_update(
            index_elements=[table.c.tenant], set_={"due_at": due}, where=due <= _NOW + ahead_s
        )
        with self._counting() as db:
            if db.execute(counted.returning(table.c.due_at)).first() is not None:
                return 0.0
            wait_s = sa.select(table.c.due_at + interval_s - ahead_s - _NOW).where(table.c.tenant == tenant)
            return max(float(db.execute(wait_s).scalar() or 0.0), _SOON_S)

    @contextmanager
    def _counting(self) -> Iterator[sa.Connection]:
        """Begin a transaction that does not wait for the disk: counts are useless after the database's host fails."""
        with self._writing() as db:
            db.execute(sa.text("SET LOCAL synchronous_commit TO off"))
            yield db

    def _tell_calls(self, db: sa.Connection, calls: Mapping[str, int]) -> None:
        table = schema.calls_in_flight
        for namespace, own in sorted(calls.items()):
            new = insert(table).values(namespace=namespace, service=self._origin, calls=own, told_at=_NOW)
            keys = [table.c.namespace, table.c.service]
            db.execute(new.on_conflict_do_update(index_elements=keys, set_={"calls": own, "told_at": _NOW}))

    @override
    def _alone(self, db: sa.Connection | Direct, what: str) -> None:
        if what == SCHEMA:  # another service may be migrating the tables
            db.execute(_WAIT_LONG, {})
        db.execute(_LOCK, {"what": f"fxlib {what}"})

    @override
    def _announce(self, db: sa.Connection | Direct, transition: Transition) -> None:
        job, event = transition.job, transition.event
        if event is not None and not transition.at_once:
            notice = f"{self._origin} {job.id} {event.sequence} {job.state.value}"
            db.execute(_NOTIFY, {"channel": _CHANNEL, "notice": notice})

    @override
    def _lease(self, db: sa.Connection, job_id: str, lease_s: float) -> None:
        _renewed(db, _JOBS.c.id == job_id, lease_s)


def _read_notice(payload: str) -> Change | None:
    """Return the change that a notice tells of; None if it is in another form, as another version may send."""
    try:
        origin, job_id, sequence, state = payload.split()
        return Change(origin=origin, job_id=job_id, sequence=int(sequence), state=State(state))
    except ValueError:
        return None


def _limit_waits(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    for each in _LIMITS:
        cursor.execute(f"SET {each}")
    cursor.close()
    connection.commit()


_NOW: Final = sa.func.date_part("epoch", sa.func.clock_timestamp())
_LOCK: Final = sa.text("SELECT pg_advisory_xact_lock(hashtextextended(:what, 0))")
_WAIT_LONG: Final = sa.text("SET LOCAL lock_timeout = 0")
_NOTIFY: Final = sa.text("SELECT pg_notify(:channel, :notice)")


def _renewed(db: sa.Connection, which: sa.ColumnElement[bool], duration_s: float) -> list[Lease]:
    """Set the leases of some running jobs to end so many seconds from now, and return them."""
    columns = _JOBS.c.id, _JOBS.c.token, _JOBS.c.worker_id, _JOBS.c.measured_by
    renew = _JOBS.update().where(which).values(leased_until=_NOW + duration_s).returning(*columns)
    return [
        Lease(job_id=job_id, token=token, worker_id=worker_id, principal=principal)
        for job_id, token, worker_id, principal in db.execute(renew)
    ]
