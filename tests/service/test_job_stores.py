"""The contract of a job store, run against each implementation."""

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxlib.errors import FxlibError
from service.errors import ServiceError
from service.job import Failure, Job, State
from service.machine import (
    Answered,
    Cancelled,
    Claimed,
    Completed,
    Failed,
    Input,
    LeaseExpired,
    Released,
    Reported,
    decide,
    submit,
)
from service.stores.base import Filter, JobStore, QueueFullError, Stats, Worker
from service.stores.memory import MemoryJobStore
from service.stores.sql import SqlJobStore

NUMBERS = count(1)
DONE = Completed(token="t", result=b"answer", message="done")


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    made = MemoryJobStore() if request.param == "memory" else SqlJobStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
    yield made
    made.close()


def job(**changes: object) -> Job:
    number = next(NUMBERS)
    base = Job(
        id=f"j{number}",
        request_id=f"r{number}",
        request_digest="d",
        namespace="default",
        name="dlrm",
        torch_version="2.13.0",
        cache_key="k",
        created_at=float(number),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def add(store: JobStore, *, request: bytes = b"request", queue_limit: int = 100, **changes: object) -> Job:
    return store.submit(submit(job(**changes)), request, queue_limit=queue_limit)


def happen(store: JobStore, job_id: str, *inputs: Input, now: float = 100.0) -> Job:
    for each in inputs:
        transition = store.update(job_id, lambda known, each=each: decide(known, each, now))  # type: ignore[misc]
        assert transition is not None
    found = store.get(job_id)
    assert found is not None
    return found


def claimed(hardware: str = "cpu") -> Claimed:
    return Claimed(worker_id="w", token="t", hardware=hardware)


def heads(store: JobStore) -> list[str]:
    return sorted(head.job_id for head in store.heads("2.13.0"))


def test_a_job_comes_back_as_it_was_stored(store: JobStore) -> None:
    stored = add(store, labels={"team": "ads", "é": ""}, name="modèle", fresh=True)
    assert store.get(stored.id) == stored
    assert store.find("default", stored.request_id) == stored
    assert store.request_of(stored.id) == b"request"
    assert store.result_of(stored.id) is None
    failed = happen(store, stored.id, claimed(), Failed(token="t", failure=Failure(code="X", message="why")))
    assert store.get(stored.id) == failed
    assert failed.failure == Failure(code="X", message="why")


def test_there_is_nothing_of_an_unknown_job(store: JobStore) -> None:
    assert store.get("none") is None
    assert store.find("default", "none") is None
    assert store.result_of("none") is None
    assert store.events("none", after=0, limit=10) == []
    assert store.update("none", lambda known: decide(known, Cancelled(), 0.0)) is None
    with pytest.raises(KeyError):
        store.request_of("none")


def test_a_request_id_has_one_job_in_its_namespace(store: JobStore) -> None:
    first = add(store, request_id="r")
    assert add(store, request_id="r").id == first.id
    assert add(store, request_id="r", namespace="other").id != first.id


def test_a_namespace_s_queue_is_bounded(store: JobStore) -> None:
    first = add(store, queue_limit=1)
    with pytest.raises(QueueFullError):
        add(store, queue_limit=1)
    assert add(store, queue_limit=1, namespace="other").state is State.QUEUED
    assert add(store, queue_limit=1, request_id=first.request_id).id == first.id
    happen(store, first.id, claimed())
    assert add(store, queue_limit=1).state is State.QUEUED


def test_a_job_that_is_answered_at_once_needs_no_place_in_the_queue(store: JobStore) -> None:
    add(store, queue_limit=1)
    entry = decide(job(), Answered(job_id="j0", result=b"answer"), 5.0)
    done = store.submit(entry, b"request", queue_limit=1)
    assert store.result_of(done.id) == b"answer"
    assert [event.state for event in store.events(done.id, after=0, limit=5)] == [State.SUCCEEDED]


def test_a_history_is_read_from_a_sequence_on(store: JobStore) -> None:
    stored = add(store)
    happen(store, stored.id, claimed(), Reported(token="t", phase="qps", message="m", progress=0.25), DONE)
    history = store.events(stored.id, after=0, limit=100)
    assert [event.sequence for event in history] == [1, 2, 3, 4]
    assert (history[2].phase, history[2].message, history[2].progress) == ("qps", "m", 0.25)
    assert store.events(stored.id, after=2, limit=1) == [history[2]]
    assert store.result_of(stored.id) == b"answer"


def test_a_decision_that_raises_changes_nothing(store: JobStore) -> None:
    stored = add(store)
    with pytest.raises(ServiceError):
        happen(store, stored.id, Released(token="t"))
    assert store.get(stored.id) == stored
    assert len(store.events(stored.id, after=0, limit=10)) == 1


def test_jobs_are_listed_newest_first_in_pages(store: JobStore) -> None:
    ids = [add(store).id for _ in range(5)]
    first, following = store.page(Filter(), before=None, limit=2)
    second, rest = store.page(Filter(), before=following, limit=2)
    last, end = store.page(Filter(), before=rest, limit=2)
    assert [each.id for each in (*first, *second, *last)] == ids[::-1]
    assert end is None


def test_jobs_are_listed_by_what_is_wanted_of_them(store: JobStore) -> None:
    a = add(store, labels={"team": "ads", "run": "1"})
    b = add(store, labels={"team": "ads"}, name="other")
    c = add(store, namespace="elsewhere")
    happen(store, b.id, Cancelled())

    def listed(wanted: Filter) -> list[str]:
        return [each.id for each in store.page(wanted, before=None, limit=10)[0]]

    assert listed(Filter(namespace="elsewhere")) == [c.id]
    assert listed(Filter(labels={"team": "ads"})) == [b.id, a.id]
    assert listed(Filter(labels={"team": "ads", "run": "1"})) == [a.id]
    assert listed(Filter(name="other")) == [b.id]
    assert listed(Filter(states=(State.CANCELLED, State.FAILED))) == [b.id]
    assert listed(Filter(name="other", states=(State.QUEUED,))) == []


def test_the_head_of_each_namespace_is_its_oldest_job_for_that_torch(store: JobStore) -> None:
    add(store, torch_version="2.12.0", cache_key="k0")
    a1, a2 = add(store, cache_key="k1"), add(store, cache_key="k2")
    b1 = add(store, namespace="b", cache_key="k3")
    assert heads(store) == sorted([a1.id, b1.id])
    happen(store, a1.id, claimed())
    assert heads(store) == sorted([a2.id, b1.id])
    assert {head.namespace: head.running for head in store.heads("2.13.0")} == {"default": 1, "b": 0}


def test_a_job_waits_while_an_equal_one_runs_unless_it_must_be_fresh(store: JobStore) -> None:
    first, twin, fresh = add(store), add(store), add(store, namespace="b", fresh=True)
    happen(store, first.id, claimed())
    assert heads(store) == [fresh.id]
    assert [each.id for each in store.twins("k")] == [twin.id]
    happen(store, first.id, Cancelled())
    assert heads(store) == sorted([twin.id, fresh.id])


def test_running_jobs_are_known(store: JobStore) -> None:
    running = happen(store, add(store).id, claimed())
    add(store)
    assert store.running() == [running]


def test_an_answer_is_found_by_key_and_hardware(store: JobStore) -> None:
    old = happen(store, add(store).id, claimed(), DONE, now=200.0)
    newer = happen(store, add(store).id, claimed(), DONE, now=300.0)
    assert store.answer("k", {"cpu", "gpu"}) == newer
    assert store.answer("k", {"gpu"}) is None
    assert store.answer("k", set()) is None
    assert store.answer("other", {"cpu"}) is None
    assert store.recent_answers(1) == [newer]
    assert store.recent_answers(9) == [newer, old]


def test_only_a_worker_s_reusable_answer_is_found(store: JobStore) -> None:
    happen(store, add(store).id, claimed(), replace(DONE, reusable=False))
    happen(store, add(store).id, Answered(job_id="j0", result=b"answer"))
    assert store.answer("k", {"cpu"}) is None
    assert len(store.recent_answers(9)) == 1


def test_workers_are_remembered_for_a_time(store: JobStore) -> None:
    old = Worker(id="w1", torch_version="2.13.0", hardware="cpu", seen_at=1.0)
    new = Worker(id="w2", torch_version="2.13.0", hardware="cpu", allowed_modules=("my.ps",), seen_at=50.0)
    store.see(old, forget_before=0.0)
    store.see(new, forget_before=0.0)
    assert store.workers() == [new, old]
    store.see(replace(new, seen_at=60.0), forget_before=2.0)
    assert store.workers() == [replace(new, seen_at=60.0)]


def test_it_counts_jobs_by_state(store: JobStore) -> None:
    assert store.stats() == Stats(by_state=dict.fromkeys(State, 0), oldest_queued_at=None)
    first = add(store)
    add(store)
    happen(store, add(store).id, claimed())
    assert store.stats().by_state == {**dict.fromkeys(State, 0), State.QUEUED: 2, State.RUNNING: 1}
    assert store.stats().oldest_queued_at == first.created_at


def test_a_database_keeps_what_was_stored_and_goes_on_counting(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    store = SqlJobStore(url)
    first = happen(store, add(store).id, claimed())
    store.close()
    again = SqlJobStore(url)
    second = add(again)
    assert again.get(first.id) == first
    assert [each.id for each in again.page(Filter(), before=None, limit=9)[0]] == [second.id, first.id]
    again.close()


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    SqlJobStore(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as db:
        db.execute("update fxlib_about set schema_version = 99")
    db.close()
    with pytest.raises(FxlibError, match="schema version 99"):
        SqlJobStore(f"sqlite:///{path}")


@pytest.mark.parametrize("url", ["nonsense", "postgresql+nodriver://host/db", "sqlite:////no/such/folder/jobs.sqlite"])
def test_a_database_that_cannot_be_used_is_named(url: str) -> None:
    with pytest.raises(FxlibError, match="--database: the database cannot be used"):
        SqlJobStore(url)


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
        store.page(Filter(), before=None, limit=99),
        sorted(store.heads("2.13.0"), key=lambda head: head.number),
        [list(store.twins(key)) for key in ("k1", "k2")],
        [store.answer(key, {"cpu"}) for key in ("k1", "k2")],
        sorted(each.id for each in store.running()),
        store.stats(),
    ]
