"""Long checks hold up neither each other's successors nor the end of the service."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from fxlib_service.admission import Admission
from fxlib_service.check_pool import CheckPool
from tests.service.support import make_service, request, submit


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the latest when the test ends."""
    event = threading.Event()
    yield event
    event.set()


async def abandoned(checks: CheckPool, function: Callable[[], object]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await checks.run(function)


async def test_a_place_is_free_when_its_thread_ends_and_not_when_its_caller_leaves(gate: threading.Event) -> None:
    checks, began = CheckPool(), list[int]()

    def long() -> None:
        began.append(1)
        gate.wait()

    for _ in range(5):
        await abandoned(checks, long)
    async with asyncio.timeout(60):
        while len(began) < 2:  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)
    gate.set()
    async with asyncio.timeout(60):
        assert await checks.run(lambda: "answer") == "answer"
    assert len(began) == 2


async def test_what_a_check_raises_reaches_its_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await CheckPool().run(lambda: 1 // 0)


async def test_checks_without_end_leave_the_rest_of_the_service_alone(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "_examine", lambda *_: gate.wait())
    async with asyncio.timeout(60):
        async with make_service(graphs=[b"another"]) as core:
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await submit(core, request())
            await asyncio.to_thread(bool)
