"""The job store in a SQL database owned by one process: SQLite in a file. `postgres` adds sharing between services."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry
from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib.spec.job import JobFilter
from fxlib_service import storage_faults
from fxlib_service.errors import ServiceError
from fxlib_service.job import Event, Job, State
from fxlib_service.lifecycle import Transition
from fxlib_service.stores import migrations, schema
from fxlib_service.stores.base import Head, JobStore, NewJob, Payloads, Stats, Waiting, Worker
from fxlib_service.stores.direct import Composer, Direct
from fxlib_service.stores.schema import (
    event_from_row,
    event_to_row,
    job_from_row,
    job_to_row,
    labels_from_text,
    worker_from_row,
    worker_to_row,
)

_PRAGMAS: Final = (
    "journal_mode = WAL",  # readers do not wait for the writer
    "synchronous = FULL",  # a commit is on the disk when it returns
    "foreign_keys = ON",
    "busy_timeout = 10000",
)

SCHEMA: Final = "schema"
"""The name of the lock under which a service prepares the tables."""

_JOBS = schema.jobs


class SqlJobStore(JobStore):
    """Runs one transaction per method. A write is synced to disk before the method returns."""

    def __init__(self, url: str) -> None:
        """Open the database, creating missing tables and migrating those of an earlier version.

        Raises:
            FxlibError: the database cannot be used, or its tables are of another version of the service.
        """
        self._write = self._engine(url)
        self._read = self._write.execution_options(read_only=True)
        self._direct = Composer(self._write)
        self._file: int | None = None
        try:
            self._prepare()
            self._file = self._found_file()
        except ServiceError as error:
            problem = storage_faults.in_full(error.__cause__)
            raise ServiceError(error.code, f"--database: the database cannot be used: {problem}") from error
        except sa.exc.SQLAlchemyError as error:
            problem = storage_faults.in_full(error)
            raise FxlibError(f"the database cannot be used: {problem}", where="--database") from error

    def _engine(self, url: str) -> sa.Engine:
        """Return an engine for a database URL; `sqlite:///FILE` gets write-ahead logging and synced commits.

        Raises:
            FxlibError: the URL is not valid or names a driver that is not installed.
        """
        try:
            engine = sa.create_engine(self._parsed(url))
        except (sa.exc.ArgumentError, ValueError) as error:
            raise FxlibError(f"the database cannot be used: {error}", where="--database") from error
        except ModuleNotFoundError as error:
            hint = 'pip install "fxlib-service[postgres]"'
            raise FxlibError(f"the database cannot be used: {error}", where="--database", hint=hint) from error
        if engine.dialect.name == "sqlite":
            sa.event.listen(engine, "connect", _configure_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _parsed(self, url: str) -> sa.URL:
        return sa.make_url(url)

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        with self._there(), self._write.begin() as db:
            yield db

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._there(), self._read.begin() as db:
            yield db

    @contextmanager
    def _there(self) -> Iterator[None]:
        """Translate the faults of the storage, one of which is that SQLite's file was deleted, moved or replaced.

        SQLite itself goes on with a file that has no name any more, and whatever is written there is lost.
        """
        with storage_faults.translated():
            if self._file is not None and self._found_file() != self._file:
                raise FileNotFoundError(errno.ENOENT, "the database was deleted, moved or replaced")
            yield

    def _found_file(self) -> int | None:
        """Return the number of the file that is in the place of SQLite's; None if there is none."""
        path = self._write.url.database
        if not path or self._write.dialect.name != "sqlite":
            return None
        try:
            return Path(path).stat().st_ino
        except FileNotFoundError:
            return None

    def _alone(self, db: sa.Connection | Direct, what: str) -> None:
        """Keep other writers of `what` out until the transaction ends; within one process, there is only one writer."""

    def _announce(self, db: sa.Connection | Direct, transition: Transition) -> None:
        """Notify other services of a job's change when the transaction ends; here there are none."""

    def _lease(self, db: sa.Connection, job_id: str, lease_s: float) -> None:
        """Store the end of a lease; here it is kept in memory."""

    def _prepare(self) -> None:
        try:
            with self._writing() as db:
                self._alone(db, SCHEMA)
                migrations.prepare(db)
        except BaseException:
            self.close()  # the caller gets no store to close
            raise

    @override
    def enter(self, new: Sequence[NewJob]) -> Sequence[Job | None]:
        ids = dict[int, str | None]()
        with self._there(), self._direct.transaction() as db:
            # Sorted by namespace, so that two services never wait for each other's locks in a circle.
            for index in sorted(range(len(new)), key=lambda index: new[index].transition.job.namespace):
                ids[index] = self._enter(db, new[index])
        return [self._entered(each, ids[index]) for index, each in enumerate(new)]

    def _enter(self, db: Direct, new: NewJob) -> str | None:
        """Store a job and return its id, or the id of the job with the same request id; None if the queue is full."""
        job = new.transition.job
        self._alone(db, f"namespace {job.namespace}")
        if known := db.execute(_KNOWN, {"namespace": job.namespace, "request_id": job.request_id}).fetchone():
            return str(known[0])
        if job.state is State.QUEUED:
            queued = db.execute(_QUEUED, {"namespace": job.namespace, "state": State.QUEUED.value}).fetchone()
            if queued[0] >= new.queue_limit:
                return None
        db.execute(_ADD_JOB, job_to_row(job))
        if job.labels:
            db.execute(_ADD_LABEL, [{"job_id": job.id, "key": key, "value": job.labels[key]} for key in job.labels])
        db.execute(_ADD_PAYLOAD, {"job_id": job.id, "kind": "request", "body": new.request})
        self._store_outcome(db, new.transition)
        return job.id

    def _entered(self, new: NewJob, job_id: str | None) -> Job | None:
        if job_id is None or job_id == new.transition.job.id:
            return None if job_id is None else new.transition.job
        return self.get(job_id) or self.enter([new])[0]  # a job that ended long ago may just have been deleted

    @override
    def update(self, job_id: str, decide: Callable[[Job], Transition]) -> Transition | None:
        with self._writing() as db:
            return self._update(db, job_id, decide)

    @override
    def claim(self, job_id: str, decide: Callable[[Job], Transition], *, lease_s: float) -> Transition | None:
        with self._writing() as db:
            self._alone(db, "claims")
            if db.execute(_CLAIMABLE, {"job_id": job_id}).first() is None:
                return None
            transition = self._update(db, job_id, decide)
            if transition is None or not transition.claimed:  # another service has ended it since
                return None
            self._lease(db, job_id, lease_s)
            return transition

    @override
    def get(self, job_id: str) -> Job | None:
        with self._reading() as db:
            return _first(db, _BY_ID, job_id=job_id)

    @override
    def find(self, namespace: str, request_id: str) -> Job | None:
        with self._reading() as db:
            return _first(db, _BY_REQUEST, namespace=namespace, request_id=request_id)

    @override
    def request_of(self, job_id: str) -> bytes:
        body = self._payload(job_id, "request")
        if body is None:
            raise KeyError(job_id)
        return body

    @override
    def result_of(self, job_id: str) -> bytes | None:
        return self._payload(job_id, "result")

    @override
    def results_of(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        return self._payloads(job_ids, "result")

    @override
    def live_of(self, job_ids: Collection[str]) -> Mapping[str, bytes]:
        return self._payloads(job_ids, "live")

    @override
    def events(self, job_id: str, *, after: int, limit: int) -> Sequence[Event]:
        table = schema.events
        wanted = sa.and_(table.c.job_id == job_id, table.c.sequence > after)
        with self._reading() as db:
            rows = db.execute(sa.select(table).where(wanted).order_by(table.c.sequence).limit(limit))
            return [event_from_row(row) for row in rows.mappings()]

    @override
    def page(
        self, wanted: JobFilter, *, beyond: int | None, limit: int, oldest_first: bool = False
    ) -> tuple[Sequence[Job], int | None]:
        number = _JOBS.c.number
        order = number.asc() if oldest_first else number.desc()
        query = sa.select(_JOBS).where(*_conditions(wanted)).order_by(order).limit(limit + 1)
        if beyond is not None:
            query = query.where(number > beyond if oldest_first else number < beyond)
        with self._reading() as db:
            rows = db.execute(query).mappings().all()
        shown = rows[:limit]
        return [job_from_row(row) for row in shown], shown[-1]["number"] if len(rows) > limit else None

    @override
    def payloads(self, *, after: int, limit: int) -> Sequence[Payloads]:
        asked, answered = schema.payloads.alias("asked"), schema.payloads.alias("answered")
        joined = _JOBS.join(asked, sa.and_(asked.c.job_id == _JOBS.c.id, asked.c.kind == "request")).outerjoin(
            answered, sa.and_(answered.c.job_id == _JOBS.c.id, answered.c.kind == "result")
        )
        query = sa.select(_JOBS.c.number, asked.c.body, answered.c.body).select_from(joined)
        with self._reading() as db:
            rows = db.execute(query.where(_JOBS.c.number > after).order_by(_JOBS.c.number).limit(limit)).all()
        return [Payloads(number=number, request=request, result=result) for number, request, result in rows]

    @override
    def forget(self, *, finished_before: float, limit: int) -> int:
        finished = [state.value for state in State if state.finished]
        old = sa.select(_JOBS.c.id).where(_JOBS.c.state.in_(finished), _JOBS.c.finished_at < finished_before)
        with self._writing() as db:
            self._alone(db, "history")
            ids = db.execute(old.limit(limit)).scalars().all()
            db.execute(_JOBS.delete().where(_JOBS.c.id.in_(ids)))  # this also deletes labels, payloads and events
        return len(ids)

    @override
    def heads(self, torch_version: str, *, now: float = math.inf) -> Sequence[Head]:
        with self._reading() as db:
            rows = db.execute(_HEADS, {"torch_version": torch_version, "now": now}).mappings()
            return [
                Head(
                    number=row["number"],
                    job_id=row["id"],
                    namespace=row["namespace"],
                    running=row["running"],
                    served_at=row["served_at"] or 0.0,
                    where=labels_from_text(row["labels_asked"]),
                )
                for row in rows
            ]

    @override
    def waiting(self) -> Sequence[Waiting]:
        kind = _JOBS.c.torch_version, _JOBS.c.labels_asked
        query = sa.select(*kind, sa.func.count()).where(_JOBS.c.state == State.QUEUED).group_by(*kind)
        with self._reading() as db:
            rows = db.execute(query).all()
        return [Waiting(torch_version=version, where=labels_from_text(text), jobs=n) for version, text, n in rows]

    @override
    def running(self) -> Sequence[Job]:
        with self._reading() as db:
            return _all(db, sa.select(_JOBS).where(_JOBS.c.state == State.RUNNING))

    @override
    def duplicates(self, cache_key: str) -> Sequence[Job]:
        equal = sa.and_(_JOBS.c.cache_key == cache_key, _JOBS.c.state == State.QUEUED, _JOBS.c.fresh.is_(False))
        with self._reading() as db:
            return _all(db, sa.select(_JOBS).where(equal).order_by(_JOBS.c.number))

    @override
    def ended_equal(self, job_id: str) -> Job | None:
        ended = self._payload(job_id, _EQUAL)
        return None if ended is None else self.get(ended.decode())

    @override
    def answer(self, cache_key: str, hardware: Collection[str]) -> Job | None:
        with self._reading() as db:
            return _first(db, _REUSABLE, cache_key=cache_key, hardware=list(hardware))

    @override
    def recent_answers(self, limit: int) -> Sequence[Job]:
        with self._reading() as db:
            return _all(db, _ANSWERED.order_by(_JOBS.c.number.desc()).limit(limit))

    @override
    def see(self, worker: Worker, *, forget_before: float, gone: Collection[str] = ()) -> None:
        table = schema.workers
        over = sa.or_(table.c.id.in_([worker.id, *gone]), table.c.seen_at < forget_before)
        with self._writing() as db:
            self._alone(db, "workers")
            db.execute(table.delete().where(over))
            db.execute(table.insert(), worker_to_row(worker))

    @override
    def workers(self) -> Sequence[Worker]:
        table = schema.workers
        with self._reading() as db:
            rows = db.execute(sa.select(table).order_by(table.c.seen_at.desc())).mappings().all()
        return [worker_from_row(row) for row in rows]

    @override
    def hold(self, namespace: str, blobs: Mapping[str, int]) -> None:
        table = schema.holdings
        with self._writing() as db:
            self._alone(db, f"namespace {namespace}")
            known = _held(db, namespace, blobs)
            rows = [
                {"namespace": namespace, "sha256": sha256, "size": size}
                for sha256, size in blobs.items()
                if sha256 not in known
            ]
            if rows:
                db.execute(table.insert(), rows)

    @override
    def held(self, namespace: str, sha256s: Collection[str]) -> set[str]:
        with self._reading() as db:
            return _held(db, namespace, sha256s)

    @override
    def held_bytes(self, namespace: str, *, besides: Collection[str] = ()) -> int:
        table = schema.holdings
        counted = sa.and_(table.c.namespace == namespace, table.c.sha256.not_in(besides))
        with self._reading() as db:
            total = db.execute(sa.select(sa.func.sum(table.c.size)).where(counted)).scalar()
        return int(total or 0)

    @override
    def release(self, sha256: str) -> None:
        with self._writing() as db:
            db.execute(schema.holdings.delete().where(schema.holdings.c.sha256 == sha256))

    @override
    def ping(self) -> None:
        with self._reading() as db:
            db.execute(sa.select(schema.about.c.swept_at)).first()

    @override
    def stats(self) -> Stats:
        by_state = sa.select(_JOBS.c.state, sa.func.count()).group_by(_JOBS.c.state)
        oldest = sa.select(sa.func.min(_JOBS.c.created_at)).where(_JOBS.c.state == State.QUEUED)
        with self._reading() as db:
            counts = {row[0]: row[1] for row in db.execute(by_state)}
            at = db.execute(oldest).scalar()
        return Stats(by_state={state: counts.get(state.value, 0) for state in State}, oldest_queued_at=at)

    @override
    def close(self) -> None:
        self._direct.close()
        self._write.dispose()

    def _update(self, db: sa.Connection, job_id: str, decide: Callable[[Job], Transition]) -> Transition | None:
        row = db.execute(_LOCKED, {"job_id": job_id}).mappings().first()
        if row is None:
            return None
        known = job_from_row(row)
        transition = decide(known)
        if transition.event is not None:
            db.execute(_JOBS.update().where(_JOBS.c.id == job_id), job_to_row(transition.job))
        if transition.ends_equal_jobs(known):
            db.execute(_NOTE_EQUAL, {"ended": job_id.encode(), "kind": _EQUAL, "cache_key": known.cache_key})
        self._store_outcome(db, transition)
        return transition

    def _store_outcome(self, db: sa.Connection | Direct, transition: Transition) -> None:
        job_id = transition.job.id
        if transition.event is not None:
            db.execute(_ADD_EVENT, event_to_row(job_id, transition.event))
            self._announce(db, transition)
        if transition.result is not None:
            db.execute(_ADD_PAYLOAD, {"job_id": job_id, "kind": "result", "body": transition.result})
        if transition.live is not None:
            db.execute(_DROP_PAYLOAD, {"job_id": job_id, "kind": "live"})
            db.execute(_ADD_PAYLOAD, {"job_id": job_id, "kind": "live", "body": transition.live})

    def _payloads(self, job_ids: Collection[str], kind: str) -> Mapping[str, bytes]:
        table = schema.payloads
        wanted = sa.and_(table.c.job_id.in_(job_ids), table.c.kind == kind)
        with self._reading() as db:
            return {row[0]: row[1] for row in db.execute(sa.select(table.c.job_id, table.c.body).where(wanted))}

    def _payload(self, job_id: str, kind: str) -> bytes | None:
        with self._reading() as db:
            return db.execute(_PAYLOAD, {"job_id": job_id, "kind": kind}).scalar()


_ANSWERED = sa.select(_JOBS).where(_JOBS.c.state == State.SUCCEEDED, _JOBS.c.cached.is_(False))

# The statements that every request needs are composed once, since composing takes longer than running.
_REUSABLE = (
    _ANSWERED.where(
        _JOBS.c.cache_key == sa.bindparam("cache_key"),
        _JOBS.c.reusable.is_(True),
        _JOBS.c.hardware.in_(sa.bindparam("hardware", expanding=True)),
    )
    .order_by(_JOBS.c.number.desc())  # and not by the time, since the clock may have been set back
    .limit(1)
)
_BY_REQUEST = sa.select(_JOBS).where(
    _JOBS.c.namespace == sa.bindparam("namespace"), _JOBS.c.request_id == sa.bindparam("request_id")
)
_BY_ID = sa.select(_JOBS).where(_JOBS.c.id == sa.bindparam("job_id"))
_PAYLOAD = sa.select(schema.payloads.c.body).where(
    schema.payloads.c.job_id == sa.bindparam("job_id"), schema.payloads.c.kind == sa.bindparam("kind")
)

_HELD = sa.select(schema.holdings.c.sha256).where(
    schema.holdings.c.namespace == sa.bindparam("namespace"),
    schema.holdings.c.sha256.in_(sa.bindparam("sha256s", expanding=True)),
)
_ADD_JOB, _ADD_PAYLOAD, _ADD_EVENT = _JOBS.insert(), schema.payloads.insert(), schema.events.insert()
_ADD_LABEL = schema.labels.insert()
_DROP_PAYLOAD = schema.payloads.delete().where(
    schema.payloads.c.job_id == sa.bindparam("job_id"), schema.payloads.c.kind == sa.bindparam("kind")
)
_KNOWN = sa.select(_JOBS.c.id).where(
    _JOBS.c.namespace == sa.bindparam("namespace"), _JOBS.c.request_id == sa.bindparam("request_id")
)
_QUEUED = (
    sa.select(sa.func.count())
    .select_from(_JOBS)
    .where(_JOBS.c.namespace == sa.bindparam("namespace"), _JOBS.c.state == sa.bindparam("state"))
)


_LOCKED = sa.select(_JOBS).where(_JOBS.c.id == sa.bindparam("job_id")).with_for_update()
_DUPLICATE, _OTHER = _JOBS.alias("duplicate"), _JOBS.alias("other")
_MAY_BE_CLAIMED = sa.and_(
    _JOBS.c.state == State.QUEUED,
    sa.or_(
        _JOBS.c.fresh.is_(True),
        ~sa.exists().where(
            _DUPLICATE.c.cache_key == _JOBS.c.cache_key,
            _DUPLICATE.c.state == State.RUNNING,
            _DUPLICATE.c.fresh.is_(False),
        ),
    ),
)
_EQUAL: Final = "ended_equal"
"""The kind of payload that holds the id of the equal job that ended last while this one was queued. It is stored as
that job ends, since times cannot tell which came first: the clock may have been set back."""
_NOTE_EQUAL = sa.text(
    "INSERT INTO payloads (job_id, kind, body) SELECT id, :kind, :ended FROM jobs"
    " WHERE cache_key = :cache_key AND state = 'queued' AND NOT fresh ORDER BY number"
    " ON CONFLICT (job_id, kind) DO UPDATE SET body = excluded.body"
).bindparams(sa.bindparam("ended", type_=sa.LargeBinary))
_CLAIMABLE = sa.select(_JOBS.c.id).where(_JOBS.c.id == sa.bindparam("job_id"), _MAY_BE_CLAIMED)


def _heads_query() -> sa.Select[int, str, str, str, int, float | None]:
    """Return the query for `heads`: oldest claimable jobs, with each namespace's running jobs and last claim."""
    oldest = (
        sa.select(sa.func.min(_JOBS.c.number))
        .where(_MAY_BE_CLAIMED, _JOBS.c.torch_version == sa.bindparam("torch_version"))
        .group_by(_JOBS.c.namespace, _JOBS.c.labels_asked)
    )
    own = _OTHER.c.namespace == _JOBS.c.namespace
    running = sa.select(sa.func.count()).where(own, _OTHER.c.state == State.RUNNING).scalar_subquery()
    until_now = _OTHER.c.started_at <= sa.bindparam("now")
    served = sa.select(sa.func.max(_OTHER.c.started_at)).where(own, ~_OTHER.c.cached, until_now).scalar_subquery()
    columns = _JOBS.c.number, _JOBS.c.id, _JOBS.c.namespace, _JOBS.c.labels_asked
    query = sa.select(*columns, running.label("running"), served.label("served_at"))
    return query.where(_JOBS.c.number.in_(oldest))


_HEADS = _heads_query()


def _held(db: sa.Connection, namespace: str, sha256s: Collection[str]) -> set[str]:
    return set(db.execute(_HELD, {"namespace": namespace, "sha256s": list(sha256s)}).scalars())


def _conditions(wanted: JobFilter) -> Iterable[sa.ColumnElement[bool]]:
    if wanted.namespace:
        yield _JOBS.c.namespace == wanted.namespace
    if wanted.name:
        yield _JOBS.c.name == wanted.name
    if wanted.states:
        yield _JOBS.c.state.in_(wanted.states)
    if wanted.id_prefix:
        yield _JOBS.c.id.startswith(wanted.id_prefix, autoescape=True)
    for key, value in wanted.labels.items():
        table = schema.labels
        yield _JOBS.c.id.in_(sa.select(table.c.job_id).where(table.c.key == key, table.c.value == value))


def _first(db: sa.Connection, query: sa.Select[*tuple[object, ...]], **parameters: object) -> Job | None:
    row = db.execute(query, parameters).mappings().first()
    return None if row is None else job_from_row(row)


def _all(db: sa.Connection, query: sa.Select[*tuple[object, ...]]) -> list[Job]:
    return [job_from_row(row) for row in db.execute(query).mappings()]


def _configure_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    # `_begin_sqlite` begins transactions, not Python's driver, which begins them only at the first write.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    read_only = connection.get_execution_options().get("read_only", False)
    # A writer takes its lock at once: one that reads first and locks later can fail because of another's write.
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
