"""Jobs for tests of what stores them, and what happens to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from fxlib_service.job import Job
from fxlib_service.lifecycle import Claimed, Completed, Input, decide, submit
from fxlib_service.stores.base import JobStore

NUMBERS = count(1)
DONE = Completed(token="t", result=b"answer", message="done")


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
