"""A budget that tenants share: in turn, never more than there is, and with an answer for those who wait in vain."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxlib_service.errors import Code, ServiceError
from fxlib_service.fair_budget import FairBudget


def budget(total: int = 10, share: int = 10, waiting: int = 100) -> FairBudget:
    return FairBudget("bytes", total=total, share=share, waiting=waiting)


@asynccontextmanager
async def taken(budget: FairBudget, tenant: str, amount: int) -> AsyncIterator[asyncio.Event]:
    """Hold an amount until the block ends, or the event is set."""
    go, holds = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with budget.hold(tenant, amount):
            holds.set()
            await go.wait()

    task = asyncio.create_task(hold())
    await holds.wait()
    try:
        yield go
    finally:
        go.set()
        await task


def queue(budget: FairBudget, order: list[str], tenant: str, amount: int = 1) -> asyncio.Task[None]:
    async def hold() -> None:
        async with budget.hold(tenant, amount):
            order.append(tenant)
            await asyncio.sleep(0)

    return asyncio.create_task(hold())


async def test_tenants_are_served_in_turn_however_many_callers_one_has() -> None:
    shared, order = budget(total=1), list[str]()
    async with taken(shared, "loud", 1):
        waiting = [queue(shared, order, "loud") for _ in range(5)]
        waiting += [queue(shared, order, "ads"), queue(shared, order, "web"), queue(shared, order, "ads")]
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert order == ["loud", "ads", "web", "loud", "ads", "loud", "loud", "loud"]


async def test_a_tenant_with_its_whole_share_delays_nobody_else() -> None:
    shared, order = budget(total=10, share=5), list[str]()
    async with taken(shared, "loud", 5):
        waiting = queue(shared, order, "loud", 5)
        await asyncio.sleep(0)
        await queue(shared, order, "quiet", 5)
        assert order == ["quiet"]
    await waiting


async def test_small_amounts_do_not_keep_a_large_one_waiting() -> None:
    shared, order = budget(total=10), list[str]()
    async with taken(shared, "a", 6):
        large = queue(shared, order, "large", 10)
        await asyncio.sleep(0)
        small = queue(shared, order, "small", 1)
        await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(large, small)
    assert order == ["large", "small"]


async def test_what_is_given_back_early_admits_the_next_one() -> None:
    shared = budget(total=10)
    async with shared.hold("a", 10) as held:
        waiting = queue(shared, [], "b", 9)
        await asyncio.sleep(0)
        held.shrink(1)
        await waiting
        assert shared.held == 1


async def test_who_waits_in_vain_is_told_when_to_come_back() -> None:
    shared = budget(total=1)
    async with taken(shared, "a", 1):
        with pytest.raises(ServiceError, match=r"no room for more bytes now: no turn came within 0\.01 s") as caught:
            async with shared.hold("b", 1, wait_s=0.01):
                raise AssertionError("there is no room")
    assert (caught.value.code, caught.value.retry_after_s) == (Code.SERVICE_BUSY, 2.0)
    assert (shared.held, shared.waiting) == (0, 0)


async def test_where_nobody_may_wait_there_is_an_answer_at_once() -> None:
    shared = budget(total=2, share=1, waiting=0)
    async with taken(shared, "a", 1):
        with pytest.raises(ServiceError, match="1 of 1 are taken by 'a'"):
            async with shared.hold("a", 1):
                raise AssertionError("there is no room")
        async with shared.hold("b", 1):
            assert shared.held == 2


async def test_more_than_a_share_counts_as_the_share() -> None:
    shared = budget(total=10, share=5)
    async with shared.hold("a", 50) as held:
        assert (held.amount, shared.held) == (5, 5)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.integers(0, 3), st.booleans()), max_size=40))
def test_whatever_comes_and_goes_no_more_is_held_than_there_is(calls: list[tuple[str, int, int, bool]]) -> None:
    shared = budget(total=10, share=6)

    async def call(tenant: str, amount: int, turns: int) -> None:
        async with shared.hold(tenant, amount) as held:
            for _ in range(turns):
                assert 0 <= shared.held <= 10
                await asyncio.sleep(0)
                held.shrink(max(0, held.amount - 1))

    async def all_calls() -> None:
        tasks = []
        for tenant, amount, turns, leaves in calls:
            tasks.append(asyncio.create_task(call(tenant, amount, turns)))
            await asyncio.sleep(0)
            if leaves:
                tasks[-1].cancel()
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends), ends

    asyncio.run(all_calls())
    assert (shared.held, shared.waiting) == (0, 0)
