"""New jobs are stored together with those that come meanwhile, and each fares as it would alone."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from typing_extensions import override

from fxlib_service.background import Background
from fxlib_service.errors import Code, ServiceError
from fxlib_service.events import EventBroker
from fxlib_service.job import Job
from fxlib_service.ledger import Ledger
from fxlib_service.lifecycle import submit
from fxlib_service.stores.base import NewJob
from tests.service.jobs import job
from tests.service.memory_job_store import MemoryJobStore

FAULTS = {
    "away": ServiceError(Code.STORAGE_UNAVAILABLE, "the database is away", retry_after_s=1.0),
    "wrong": ServiceError(Code.INVALID_REQUEST, "the database cannot hold this"),
}


class Slow(MemoryJobStore):
    """Stores nothing before it may, and raises the fault that a job is named for; notes each transaction's jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.tried = list[list[str]]()

    @override
    def enter(self, new: Sequence[NewJob]) -> Sequence[Job | None]:
        self.may.wait(60)
        self.tried.append([each.transition.job.name for each in new])
        for fault in [FAULTS[name] for name in self.tried[-1] if name in FAULTS]:
            raise fault
        return super().enter(new)


async def entered(*names: str) -> tuple[list[list[str]], list[str], list[str]]:
    """Submit a job, and others while it is stored; return the transactions, what became of each, and who was told."""
    store, told = Slow(), list[str]()
    ledger = Ledger(store, EventBroker(), Background())
    ledger.listeners.append(lambda transition: told.append(transition.job.name))
    first = asyncio.ensure_future(ledger.submit(submit(job(name="first")), b"", queue_limit=3))
    await asyncio.sleep(0.05)
    others = [asyncio.ensure_future(ledger.submit(submit(job(name=name)), b"", queue_limit=3)) for name in names]
    await asyncio.sleep(0)
    store.may.set()
    ends = await asyncio.gather(first, *others, return_exceptions=True)
    await ledger.close()
    return store.tried, [_became(end) for end in ends[1:]], told


def _became(end: Job | BaseException) -> str:
    if isinstance(end, Job):
        return end.name
    return end.code.name if isinstance(end, ServiceError) else type(end).__name__


async def test_those_that_come_meanwhile_are_stored_in_one_transaction() -> None:
    tried, became, told = await entered("a", "b", "c")
    assert tried == [["first"], ["a", "b", "c"]]
    assert became == ["a", "b", "QueueFullError"]
    assert told == ["first", "a", "b"]


async def test_a_job_s_own_fault_is_no_other_s() -> None:
    tried, became, told = await entered("a", "wrong", "b")
    assert tried == [["first"], ["a", "wrong", "b"], ["a"], ["wrong"], ["b"]]
    assert became == ["a", "INVALID_REQUEST", "b"]
    assert told == ["first", "a", "b"]


async def test_a_fault_of_the_storage_is_not_tried_again_for_each() -> None:
    tried, became, told = await entered("a", "away", "b")
    assert tried == [["first"], ["a", "away", "b"]]
    assert became == ["STORAGE_UNAVAILABLE"] * 3
    assert told == ["first"]


async def test_a_job_whose_caller_left_is_stored_and_told_of_all_the_same() -> None:
    store, told = Slow(), list[str]()
    ledger = Ledger(store, EventBroker(), Background())
    ledger.listeners.append(lambda transition: told.append(transition.job.name))
    call = asyncio.ensure_future(ledger.submit(submit(job(name="left")), b"", queue_limit=3))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    store.may.set()
    await ledger.close()
    assert told == ["left"]
