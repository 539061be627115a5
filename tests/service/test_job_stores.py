"""The contract of a job store, run against each implementation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fxlib.spec.job import JobFailure, JobFilter
from fxlib_service.errors import ServiceError
from fxlib_service.job import Job, State
from fxlib_service.lifecycle import (
    Answered,
    Cancelled,
    Failed,
    Input,
    Released,
    Reported,
    Transition,
    decide,
    observe,
    submit,
)
from fxlib_service.stores.base import JobStore, NewJob, QueueFullError, Stats, Worker
from fxlib_service.stores.postgres import PostgresJobStore
from fxlib_service.stores.sql import SqlJobStore
from tests.service.jobs import DONE, add, claimed, happen, job
from tests.service.memory_job_store import MemoryJobStore


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobStore]:
    made: JobStore
    match request.param:
        case "memory":
            made = MemoryJobStore()
        case "sqlite":
            made = SqlJobStore(f"sqlite:///{tmp_path / 'jobs.sqlite'}")
        case _:
            made = PostgresJobStore(request.getfixturevalue("postgres").url())
    yield made
    made.close()


def heads(store: JobStore) -> list[str]:
    return sorted(head.job_id for head in store.heads("2.13.0"))


def test_a_job_comes_back_as_it_was_stored(store: JobStore) -> None:
    stored = add(store, labels={"team": "ads", "é": ""}, name="modèle", fresh=True)
    assert store.get(stored.id) == stored
    assert store.find("default", stored.request_id) == stored
    assert store.request_of(stored.id) == b"request"
    assert store.result_of(stored.id) is None
    failed = happen(store, stored.id, claimed(), Failed(token="t", failure=JobFailure(code="X", message="why")))
    assert store.get(stored.id) == failed
    assert failed.failure == JobFailure(code="X", message="why")


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


def test_jobs_that_enter_together_fare_as_they_would_alone(store: JobStore) -> None:
    known = add(store, namespace="b", request_id="r")
    entering = [
        NewJob(transition=submit(each), request=b"request", queue_limit=2)
        for each in (
            job(namespace="b", labels={"team": "ads"}),
            job(namespace="b"),
            job(namespace="a"),
            job(namespace="b", request_id="r"),
            job(namespace="a", request_id="twice"),
            job(namespace="a", request_id="twice"),
        )
    ]
    first, full, other, again, new, twice = store.enter(entering)
    assert full is None, "its queue has two jobs"
    assert again == known
    assert twice == new == entering[4].transition.job
    assert (first, other) == (entering[0].transition.job, entering[2].transition.job)
    stored, _ = store.page(JobFilter(), beyond=None, limit=9)
    assert {each.id for each in stored} == {each.id for each in (known, entering[0].transition.job, other, new) if each}
    assert [each.labels for each in stored if each.id == entering[0].transition.job.id] == [{"team": "ads"}]


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
    first, following = store.page(JobFilter(), beyond=None, limit=2)
    second, rest = store.page(JobFilter(), beyond=following, limit=2)
    last, end = store.page(JobFilter(), beyond=rest, limit=2)
    assert [each.id for each in (*first, *second, *last)] == ids[::-1]
    assert end is None


def test_jobs_are_listed_oldest_first_where_that_is_asked_for(store: JobStore) -> None:
    ids = [add(store).id for _ in range(3)]
    first, following = store.page(JobFilter(), beyond=None, limit=2, oldest_first=True)
    last, end = store.page(JobFilter(), beyond=following, limit=2, oldest_first=True)
    assert [each.id for each in (*first, *last)] == ids
    assert end is None


def test_jobs_are_listed_by_what_is_wanted_of_them(store: JobStore) -> None:
    a = add(store, labels={"team": "ads", "run": "1"})
    b = add(store, labels={"team": "ads"}, name="other")
    c = add(store, namespace="elsewhere")
    happen(store, b.id, Cancelled())

    def listed(wanted: JobFilter) -> list[str]:
        return [each.id for each in store.page(wanted, beyond=None, limit=10)[0]]

    assert listed(JobFilter(namespace="elsewhere")) == [c.id]
    assert listed(JobFilter(labels={"team": "ads"})) == [b.id, a.id]
    assert listed(JobFilter(labels={"team": "ads", "run": "1"})) == [a.id]
    assert listed(JobFilter(name="other")) == [b.id]
    assert listed(JobFilter(states=("cancelled", "failed"))) == [b.id]
    assert listed(JobFilter(name="other", states=("queued",))) == []
    assert listed(JobFilter(id_prefix=a.id)) == [a.id]
    assert listed(JobFilter(id_prefix="j")) == [c.id, b.id, a.id]
    assert listed(JobFilter(id_prefix="%")) == []


def test_the_answers_of_several_jobs_are_read_at_once(store: JobStore) -> None:
    done, queued = add(store), add(store)
    happen(store, done.id, claimed(), DONE)
    assert store.results_of([done.id, queued.id, "nobody"]) == {done.id: b"answer"}


def test_the_last_live_figures_of_a_job_are_kept_and_go_with_it(store: JobStore) -> None:
    done, other = add(store), add(store)
    happen(store, done.id, claimed(), DONE)
    assert store.live_of([done.id]) == {}
    for told in (b"first", b"second"):
        store.update(done.id, lambda known, told=told: observe(known, told, 200.0))  # type: ignore[misc]
    assert store.live_of([done.id, other.id, "nobody"]) == {done.id: b"second"}
    assert store.result_of(done.id) == b"answer"
    store.forget(finished_before=1e6, limit=10)
    assert store.live_of([done.id]) == {}


def test_the_head_of_each_namespace_is_its_oldest_job_for_that_torch(store: JobStore) -> None:
    add(store, torch_version="2.12.0", cache_key="k0")
    a1, a2 = add(store, cache_key="k1"), add(store, cache_key="k2")
    b1 = add(store, namespace="b", cache_key="k3")
    assert heads(store) == sorted([a1.id, b1.id])
    happen(store, a1.id, claimed())
    assert heads(store) == sorted([a2.id, b1.id])
    assert {head.namespace: head.running for head in store.heads("2.13.0")} == {"default": 1, "b": 0}


def test_a_job_waits_while_an_equal_one_runs_unless_it_must_be_fresh(store: JobStore) -> None:
    first, duplicate, fresh = add(store), add(store), add(store, namespace="b", fresh=True)
    happen(store, first.id, claimed())
    assert heads(store) == [fresh.id]
    assert [each.id for each in store.duplicates("k")] == [duplicate.id]
    happen(store, first.id, Cancelled())
    assert heads(store) == sorted([duplicate.id, fresh.id])


def test_the_equal_job_that_ended_last_while_a_job_was_queued_is_found(store: JobStore) -> None:
    first, second, third = add(store), add(store), add(store)
    fresh, other = add(store, fresh=True), add(store, cache_key="other")
    assert store.ended_equal(third.id) is None
    failed = Failed(token="t", failure=JobFailure(code="WORKER_FAILED", message="it did"))
    ways: list[tuple[Job, Input]] = [(first, DONE), (second, failed)]
    for number, (ended, how) in enumerate(ways):
        happen(store, ended.id, claimed(), how, now=1e6 - number)  # the clock may be set back
        found = store.ended_equal(third.id)
        assert found is not None
        assert found.id == ended.id
    assert (store.ended_equal(fresh.id), store.ended_equal(other.id)) == (None, None)
    for created_at in (0.0, 2e6):
        later = add(store, created_at=created_at)
        store.update(first.id, lambda known: observe(known, b"live", 3e6, went_back="a reason"))
        assert store.ended_equal(later.id) is None
    store.forget(finished_before=2e6, limit=10)
    assert store.ended_equal(third.id) is None


def test_a_claim_of_a_job_that_has_just_ended_is_none(store: JobStore) -> None:
    claimable = add(store)

    def decided(known: Job) -> Transition:
        return decide(replace(known, state=State.CANCELLED), claimed(), 50.0)  # as another service has left it

    assert store.claim(claimable.id, decided, lease_s=30.0) is None


def test_a_job_is_claimed_once_and_not_beside_an_equal_one(store: JobStore) -> None:
    first, equal, fresh = add(store), add(store, namespace="b"), add(store, fresh=True)

    def claim(job_id: str, now: float) -> str | None:
        transition = store.claim(job_id, lambda known: decide(known, claimed(), now), lease_s=30.0)
        return None if transition is None else transition.job.id

    assert claim("none", 50.0) is None
    assert claim(first.id, 50.0) == first.id
    assert (claim(first.id, 50.0), claim(equal.id, 50.0)) == (None, None)
    assert {head.namespace: head.served_at for head in store.heads("2.13.0")} == {"default": 50.0}
    assert claim(fresh.id, 60.0) == fresh.id
    happen(store, first.id, Cancelled())
    assert claim(equal.id, 70.0) == equal.id
    add(store, cache_key="other")
    assert {head.namespace: head.served_at for head in store.heads("2.13.0")} == {"default": 60.0}


def test_a_claim_of_a_later_time_is_one_before_the_clock_was_set_back(store: JobStore) -> None:
    for number, now in enumerate((50.0, 1e6)):
        happen(store, add(store, cache_key=f"k{number}").id, claimed(), Cancelled(), now=now)
    add(store)
    assert [head.served_at for head in store.heads("2.13.0")] == [1e6]
    assert [head.served_at for head in store.heads("2.13.0", now=60.0)] == [50.0]
    assert [head.served_at for head in store.heads("2.13.0", now=40.0)] == [0.0]


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


def test_the_last_accepted_answer_is_found_though_the_clock_was_set_back(store: JobStore) -> None:
    happen(store, add(store).id, claimed(), DONE, now=1e6)
    newer = happen(store, add(store, fresh=True).id, claimed(), DONE, now=100.0)
    assert store.answer("k", {"cpu"}) == newer
    assert store.recent_answers(1) == [newer]


def test_only_a_worker_s_reusable_answer_is_found(store: JobStore) -> None:
    happen(store, add(store).id, claimed(), replace(DONE, reusable=False))
    happen(store, add(store).id, Answered(job_id="j0", result=b"answer"))
    assert store.answer("k", {"cpu"}) is None
    assert len(store.recent_answers(9)) == 1


def test_workers_are_remembered_for_a_time(store: JobStore) -> None:
    old = Worker(id="w1", torch_version="2.13.0", hardware="cpu", seen_at=1.0)
    new = Worker(
        id="w2", torch_version="2.13.0", hardware="cpu", allowed_modules=("my.ps",), containment="private", seen_at=50.0
    )
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


def test_what_finished_long_ago_is_forgotten_with_all_that_belongs_to_it(store: JobStore) -> None:
    old, recent, running = (add(store, labels={"team": "ads"}) for _ in range(3))
    happen(store, old.id, claimed(), DONE, now=10.0)
    happen(store, recent.id, claimed(), DONE, now=20.0)
    happen(store, running.id, claimed(), now=5.0)
    queued = add(store, created_at=1.0)
    assert store.forget(finished_before=20.0, limit=10) == 1
    assert store.get(old.id) is None
    assert store.result_of(old.id) is None
    assert store.events(old.id, after=0, limit=10) == []
    with pytest.raises(KeyError):
        store.request_of(old.id)
    assert [each.id for each in store.page(JobFilter(), beyond=None, limit=9)[0]] == [queued.id, running.id, recent.id]
    assert store.page(JobFilter(labels={"team": "ads"}), beyond=None, limit=9)[0] == [
        store.get(running.id),
        store.get(recent.id),
    ]
    assert add(store, request_id=old.request_id).id != old.id


def test_no_more_is_forgotten_at_once_than_asked_for(store: JobStore) -> None:
    for _ in range(5):
        happen(store, add(store).id, claimed(), DONE, now=10.0)
    assert [store.forget(finished_before=11.0, limit=2) for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.slow
def test_payloads_are_read_in_pages_whatever_was_forgotten(store: JobStore) -> None:
    first, second, third = (add(store, request=f"request {number}".encode()) for number in range(3))
    happen(store, first.id, claimed(), DONE, now=10.0)
    happen(store, second.id, claimed(), DONE, now=20.0)
    store.forget(finished_before=15.0, limit=10)
    fourth = add(store, request=b"request 3")
    page = store.payloads(after=0, limit=2)
    assert [(each.request, each.result) for each in page] == [(b"request 1", b"answer"), (b"request 2", None)]
    (rest,) = store.payloads(after=page[-1].number, limit=2)
    assert rest.request == b"request 3"
    assert store.payloads(after=rest.number, limit=2) == []
    assert {third.id, fourth.id} == {
        head.id for head in store.page(JobFilter(states=("queued",)), beyond=None, limit=9)[0]
    }


def test_a_namespace_has_the_blobs_that_it_was_noted_to_have(store: JobStore) -> None:
    store.hold("ads", {"a": 5, "b": 7})
    store.hold("ads", {"b": 7, "c": 1})
    store.hold("web", {"b": 7})
    assert store.held("ads", ["a", "b", "x"]) == {"a", "b"}
    assert store.held("web", ["a", "b"]) == {"b"}
    assert store.held("other", ["a"]) == set()
    assert (store.held_bytes("ads"), store.held_bytes("other")) == (13, 0)
    assert (store.held_bytes("ads", besides=["b"]), store.held_bytes("ads", besides=["x"])) == (6, 13)
    store.release("b")
    assert store.held("ads", ["a", "b"]) == {"a"}
    assert store.held("web", ["b"]) == set()


def test_each_place_where_jobs_may_run_has_a_head(store: JobStore) -> None:
    gpu = [add(store, cache_key=f"g{n}", where={"rack": "3", "hardware": "h200"}) for n in range(2)]
    any_place = add(store, cache_key="a")
    assert heads(store) == sorted([gpu[0].id, any_place.id])
    assert {head.job_id: head.where for head in store.heads("2.13.0")} == {gpu[0].id: gpu[0].where, any_place.id: {}}
    waiting = sorted(store.waiting(), key=lambda each: each.jobs)
    assert [(each.torch_version, each.where, each.jobs) for each in waiting] == [
        ("2.13.0", {}, 1),
        ("2.13.0", {"hardware": "h200", "rack": "3"}, 2),
    ]
    assert store.get(gpu[0].id) == gpu[0]
    store.see(Worker(id="w", torch_version="2.13.0", hardware="cpu", labels={"rack": "3"}), forget_before=0.0)
    assert [worker.labels for worker in store.workers()] == [{"rack": "3"}]
