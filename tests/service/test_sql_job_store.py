"""What the store in a database has of its own, and that it answers as the one in memory does, whatever happens."""

import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given, settings
from hypothesis import strategies as st

from fxlib.errors import FxlibError
from fxlib.spec.job import JobFilter
from fxlib.v1 import jobs_pb2
from fxlib_service.config import Config
from fxlib_service.errors import ServiceError
from fxlib_service.job import Job, State
from fxlib_service.lifecycle import Answered, Cancelled, Input, LeaseExpired, Released, Reported, decide, submit
from fxlib_service.open_stores import job_store
from fxlib_service.stores import migrations, schema, sql
from fxlib_service.stores.base import JobStore, QueueFullError, Worker
from fxlib_service.stores.postgres import PostgresJobStore
from fxlib_service.stores.sql import SqlJobStore
from tests.service.jobs import DONE, add, claimed, happen, job
from tests.service.memory_job_store import MemoryJobStore
from tests.service.postgres import Postgres

pytestmark = pytest.mark.slow


def test_a_database_keeps_what_was_stored_and_goes_on_counting(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    store = SqlJobStore(url)
    first = happen(store, add(store).id, claimed())
    store.close()
    again = SqlJobStore(url)
    second = add(again)
    assert again.get(first.id) == first
    assert [each.id for each in again.page(JobFilter(), beyond=None, limit=9)[0]] == [second.id, first.id]
    again.close()


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    SqlJobStore(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as db:
        db.execute("update fxlib_version set version_num = '0099'")
    db.close()
    with pytest.raises(FxlibError, match="schema version 0099"):
        SqlJobStore(f"sqlite:///{path}")


def assert_tables_are_todays(engine: sa.Engine) -> None:
    with engine.connect() as db:
        assert compare_metadata(MigrationContext.configure(db), schema.metadata) == []
        assert db.execute(sa.select(schema.version.c.version_num)).scalars().all() == [migrations.HEAD]


@pytest.mark.parametrize("kind", [SqlJobStore, PostgresJobStore])
def test_all_steps_from_the_first_on_make_todays_tables(
    kind: type[SqlJobStore], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    shared = kind is PostgresJobStore
    url = request.getfixturevalue("postgres").url() if shared else f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    store = kind(url)
    assert_tables_are_todays(store._write)
    with store._write.begin() as db:
        schema.metadata.drop_all(db)
        migrations._upgrade(db, "0000")
    assert_tables_are_todays(store._write)
    store.close()


FROZEN = sorted((Path(__file__).parent / "tables_of_before").glob("*.sql"))


def contents(store: SqlJobStore, like: Mapping[str, Sequence[Mapping[str, object]]] | None = None) -> dict[str, Any]:
    """Return the rows of all tables, in an order of theirs; only the tables and columns of `like`, if that is given."""
    found, known = {}, sa.MetaData()
    known.reflect(store._write)
    with store._write.connect() as db:
        for name, table in known.tables.items():
            if name.startswith("fxlib_") or not (like is None or name in like):
                continue
            columns = [each for each in table.columns if like is None or not like[name] or each.name in like[name][0]]
            rows = [dict(row) for row in db.execute(sa.select(*columns)).mappings()]
            found[name] = sorted(rows, key=repr)
    return found


@pytest.mark.parametrize("file", FROZEN, ids=lambda file: file.stem)
def test_a_database_of_before_is_brought_up_to_date_with_all_that_it_holds(
    file: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    kind, url = SqlJobStore, f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    if file.stem.endswith("postgres"):
        kind, url = PostgresJobStore, request.getfixturevalue("postgres").url()
        with psycopg.connect(url) as db:
            db.execute(file.read_bytes())
            db.execute("create table alembic_version (version_num text)")  # of another program
    else:
        with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as lite:
            lite.executescript(file.read_text())
    with mock.patch.object(kind, "_prepare"):
        untouched = kind(url)
    before = contents(untouched)
    untouched.close()
    store = kind(url)
    if file.stem.endswith("postgres"):
        with store._write.begin() as db_:
            db_.exec_driver_sql("drop table alembic_version")
        before.pop("alembic_version")
    assert_tables_are_todays(store._write)
    assert contents(store, before) == before
    check_jobs(store)
    with store._write.begin() as db_:
        assert db_.exec_driver_sql("select schema_version from fxlib_about").scalar() == 5  # for services of before
    store.close()
    kind(url).close()  # the next start finds it up to date


def check_jobs(store: SqlJobStore) -> None:
    """Check that a store which was frozen with its jobs answers of each, and goes on."""
    jobs = list(_pages(store))
    assert len(jobs) == 50
    for number, job_ in enumerate(jobs):
        assert (job_.id, store.find(job_.namespace, f"request-{number}")) == (f"job-{number:02}", job_)
        assert len(store.events(job_.id, after=0, limit=9)) == job_.last_sequence
        assert jobs_pb2.OptimizeRequest.FromString(store.request_of(job_.id)).name == job_.name
        assert (store.result_of(job_.id) is not None) == (job_.state is State.SUCCEEDED)
    assert {each.name for each in jobs if each.labels == {"commit": "c1", "straße": "☃ 'quoted'; --"}}
    assert len(store.running()) == 8
    answered = next(each for each in reversed(jobs) if each.reusable)
    assert store.answer(answered.cache_key, {"cpu-1"}) is not None
    happen(store, next(each.id for each in jobs if each.state is State.QUEUED), claimed(), DONE)
    assert add(store, asked_by="ads-launcher", namespace="new").asked_by == "ads-launcher"
    assert [each.namespace for each in _pages(store)][50:] == ["new"]
    store.hold("team-0", {"a" * 64: 5})
    assert store.held("team-0", ["a" * 64, f"{3:064x}"]) >= {"a" * 64}
    store.see(Worker(id="w", torch_version="2.13.0", hardware="cpu", containment="isolated"), forget_before=0.0)
    assert [each.id for each in store.workers()] == ["worker-2", "worker-1", "worker-0", "w"]
    assert store.forget(finished_before=math.inf, limit=99) == sum(each.state.finished for each in jobs) + 1


def _pages(store: SqlJobStore) -> Iterator[Job]:
    """Yield all jobs, the oldest first."""
    beyond = None
    while True:
        page, beyond = store.page(JobFilter(), beyond=beyond, limit=20, oldest_first=True)
        yield from page
        if beyond is None:
            return


def test_the_tables_of_every_version_before_this_one_are_frozen() -> None:
    versions = [f"{number:04}" for number in range(1, int(migrations.HEAD))]
    assert [each.name for each in FROZEN] == [
        f"{each}.{kind}.sql" for each in versions for kind in ("postgres", "sqlite")
    ]


@pytest.mark.parametrize("kind", [SqlJobStore, PostgresJobStore])
@pytest.mark.parametrize("wrong", ["delete from fxlib_about", "insert into fxlib_about default values"])
@pytest.mark.parametrize("version_is_told", [True, False])
def test_a_database_whose_table_about_has_not_its_one_row_is_refused_in_plain_words(
    kind: type[SqlJobStore], wrong: str, version_is_told: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    shared = kind is PostgresJobStore
    url = request.getfixturevalue("postgres").url() if shared else f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    store = kind(url)
    with store._write.begin() as db:
        db.exec_driver_sql(wrong)
        if not version_is_told:
            db.exec_driver_sql("delete from fxlib_version")
    name = store._write.url.database
    store.close()
    with pytest.raises(FxlibError) as refused:
        kind(url)
    rows = 0 if wrong.startswith("delete") else 2
    assert f"--database: the table fxlib_about of the database {name} has {rows} rows and not its one" in str(
        refused.value
    )
    assert "Restore the database from a backup, or use a new one." in str(refused.value)


def test_an_answer_is_looked_up_by_its_key_and_not_among_all_that_ended(tmp_path: Path) -> None:
    store = SqlJobStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    asked = sql._REUSABLE.params(cache_key="k", hardware=["cpu"])
    text = asked.compile(store._write, compile_kwargs={"literal_binds": True, "render_postcompile": True}).string
    with store._write.connect() as db:
        plan = [str(row[3]) for row in db.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]
    found = "SEARCH jobs USING INDEX jobs_by_answer (cache_key=? AND state=?)"
    assert plan == [found, "USE TEMP B-TREE FOR ORDER BY"]  # of those found, which are few
    store.close()


@pytest.mark.parametrize("url", ["nonsense", "postgresql+nodriver://host/db", "sqlite:////no/such/folder/jobs.sqlite"])
def test_a_database_that_cannot_be_used_is_named(url: str) -> None:
    with pytest.raises(FxlibError, match="--database: the database cannot be used"):
        SqlJobStore(url)


def test_a_url_of_postgres_names_a_postgresql_database_as_it_does_for_libpq(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.url().replace("postgresql://", "postgres://")
    store = job_store(Config(data=tmp_path, database_url=url))
    assert isinstance(store, PostgresJobStore)
    store.close()


def test_a_commit_is_synced_to_disk(tmp_path: Path) -> None:
    store = SqlJobStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    with store._write.connect() as db:
        assert db.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert db.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    store.close()


INPUTS: st.SearchStrategy[Input] = st.sampled_from(
    [
        claimed(),
        claimed("gpu"),
        Reported(token="t", phase="qps"),
        DONE,
        replace(DONE, reusable=False),
        Released(token="t"),
        LeaseExpired(token="t"),
        Answered(job_id="j0", result=b"answer"),
        Cancelled(),
    ]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("ab"), st.sampled_from(["k1", "k2"]), st.booleans()),
        st.tuples(st.just("happen"), st.integers(0, 9), INPUTS),
        st.tuples(st.just("forget"), st.integers(0, 40)),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(STEPS)
def test_both_stores_answer_alike_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "jobs.sqlite"
    stores: list[JobStore] = [MemoryJobStore(), SqlJobStore(f"sqlite:///{path}")]
    ids: list[str] = []
    for now, (kind, *rest) in enumerate(steps):
        if kind == "add":
            namespace, key, fresh = rest
            entry = submit(job(namespace=namespace, cache_key=key, fresh=fresh))
            outcomes = [_attempt(lambda s=s, e=entry: s.submit(e, b"r", queue_limit=5)) for s in stores]  # type: ignore[misc]
            ids.append(entry.job.id)
        elif kind == "forget":
            outcomes = [s.forget(finished_before=float(rest[0]), limit=2) for s in stores]
        elif ids:
            job_id, what = ids[rest[0] % len(ids)], rest[1]
            outcomes = [
                _attempt(lambda s=s: s.update(job_id, lambda known: decide(known, what, float(now))))  # type: ignore[misc]  # noqa: B023
                for s in stores
            ]
        else:
            continue
        assert outcomes[0] == outcomes[1]
    views = [_view(store, ids) for store in stores]
    assert views[0] == views[1]
    for store in stores:
        store.close()


def _attempt(act: Callable[[], object]) -> object:
    try:
        return act()
    except (ServiceError, QueueFullError) as error:
        return type(error), str(error)


def _view(store: JobStore, ids: list[str]) -> list[object]:
    return [
        [(store.get(each), list(store.events(each, after=0, limit=99)), store.result_of(each)) for each in ids],
        store.page(JobFilter(), beyond=None, limit=99),
        sorted(store.heads("2.13.0"), key=lambda head: head.number),
        [list(store.duplicates(key)) for key in ("k1", "k2")],
        [store.answer(key, {"cpu"}) for key in ("k1", "k2")],
        sorted(each.id for each in store.running()),
        store.stats(),
        [(each.request, each.result) for each in store.payloads(after=0, limit=99)],
    ]
