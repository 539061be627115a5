"""A job's history as a stream: what is stored, then what happens, each line once and in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

from fxlib_service.errors import Code, ServiceError
from fxlib_service.events import Hub, Subscription
from fxlib_service.job import Event
from fxlib_service.ledger import Ledger

_PAGE: Final = 500


async def watch(ledger: Ledger, hub: Hub, job_id: str, *, after: int) -> AsyncIterator[Event]:
    """Yield the events whose sequence is greater than `after`, and end with the one that finishes the job.

    Raises:
        ServiceError: JOB_NOT_FOUND; SEQUENCE_AHEAD; SHUTTING_DOWN, after which watching can be resumed.
    """
    job = await ledger.get(job_id)
    if after > job.last_sequence:
        raise ServiceError(Code.SEQUENCE_AHEAD, f"job {job_id} has {job.last_sequence} events, not {after}")
    if job.state.finished and after == job.last_sequence:
        return
    with hub.subscribe(job_id) as subscription:
        while True:
            if hub.closed:
                raise ServiceError(Code.SHUTTING_DOWN, "the service ends; watch again", retry_after_s=1.0)
            async with aclosing(_stored_then_live(ledger, subscription, job_id, after)) as events:
                async for event in events:
                    after = event.sequence
                    yield event
                    if event.state.finished:
                        return


async def _stored_then_live(
    ledger: Ledger, subscription: Subscription, job_id: str, after: int
) -> AsyncGenerator[Event]:
    """Yield until something was missed."""
    full = True
    while full:
        page = await ledger.read(ledger.store.events, job_id, after=after, limit=_PAGE)
        full = len(page) == _PAGE
        for event in page:
            after = event.sequence
            yield event
    while (live := await subscription.next()) is not None and live.sequence <= after + 1:
        if live.sequence == after + 1:
            after = live.sequence
            yield live
