"""Long checks hold up neither other tenants' nor the end of the service, and nothing is checked twice."""

import asyncio
import os
import pickle
import posixpath
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fxlib.protocol import trial_to_proto
from fxlib.spec.job import TrialOptions
from fxlib_service import check_pool
from fxlib_service.check_pool import CheckPool
from fxlib_service.errors import Code, ServiceError
from tests.service.checks import allocate, die, fail, note, refuse, wait_for
from tests.service.support import make_service, request, submit


@asynccontextmanager
async def pool() -> AsyncIterator[CheckPool]:
    checks = CheckPool()
    try:
        async with asyncio.timeout(100):
            yield checks
    finally:
        checks.close()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def begun(path: Path, number: int = 1) -> None:
    while len(lines(path)) < number:  # noqa: ASYNC110  # another process writes it
        await asyncio.sleep(0.01)


async def test_a_check_runs_in_another_process_and_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "noted"
    async with pool() as checks:
        first = await checks.run(note, path, tenant="ads", key="a graph")
        assert first != os.getpid()
        assert await checks.run(note, path, tenant="web", key="a graph") == first
        await checks.run(note, path, tenant="ads", key="another graph")
        await checks.run(note, path, tenant="ads")
        await checks.run(note, path, tenant="ads")
    assert len(lines(path)) == 4


async def test_a_check_that_takes_too_much_memory_is_refused_and_its_process_goes_on() -> None:
    async with pool() as checks:
        with pytest.raises(ServiceError, match="more than 4 GiB of memory") as caught:
            await checks.run(allocate, check_pool._MEMORY_BYTES, tenant="ads")
        assert caught.value.code is Code.INVALID_GRAPH
        assert await checks.run(allocate, 1 << 20, tenant="ads") == 1 << 20


_WITH_LESS_MEMORY = """
import asyncio, resource
from fxlib_service.check_pool import CheckPool
resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
checks = CheckPool()
print(asyncio.run(checks.run(len, "abc", tenant="ads")))
checks.close()
"""


def test_checks_run_where_a_process_may_have_less_memory_than_a_check() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _WITH_LESS_MEMORY], check=False, capture_output=True, text=True, timeout=100
    )
    assert found.stdout == "3\n", found.stderr


async def test_a_refusal_is_remembered_too(tmp_path: Path) -> None:
    async with pool() as checks:
        for _ in range(3):
            with pytest.raises(ServiceError) as caught:
                await checks.run(refuse, tmp_path / "noted", tenant="ads", key="no graph")
            assert caught.value.code is Code.INVALID_REQUEST
            assert [each.field for each in caught.value.violations] == ["graph"]
    assert len(lines(tmp_path / "noted")) == 1


async def test_what_is_remembered_is_bounded_in_bytes_whatever_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_pool, "_REMEMBERED_BYTES", 20_000)
    async with pool() as checks:
        for number in range(12):
            await checks.run(posixpath.normpath, f"{number}" + "x" * 5_000, tenant="ads", key=number)
        assert 5_000 < checks._bytes <= 20_000
        assert len(checks._known) == 3


async def test_what_a_request_holds_besides_its_fields_is_not_kept() -> None:
    besides = b"\xc2\x3e\x80\x80\x40" + bytes(1 << 20)  # a field of number 1000, as a later version may have one
    async with make_service() as core:
        admission = core.workers._admission
        for message in ("recipe", "trial"):
            asked = request()
            asked.trial.CopyFrom(trial_to_proto(TrialOptions()))
            getattr(asked, message).MergeFromString(besides)
            await submit(core, asked)
        assert len(pickle.dumps(list(admission.checks._known))) < 10_000
        kept = [len(each.trial) for each in admission._valid.values()]
        assert len(kept) == 1
        assert max(kept) < 1_000


async def test_what_several_tenants_ask_at_once_is_checked_once(tmp_path: Path) -> None:
    gate, noted = tmp_path / "gate", tmp_path / "noted"
    async with pool() as checks:
        asked = [
            asyncio.create_task(checks.run(wait_for, gate, noted, tenant=tenant, key="a graph"))
            for tenant in ("ads", "web", "ads", "search", "ads")
        ]
        await begun(noted)
        gate.touch()
        await asyncio.gather(*asked)
    assert len(lines(noted)) == 1


async def test_tenants_take_turns_however_much_one_of_them_asks(tmp_path: Path) -> None:
    gate, end, noted = tmp_path / "gate", tmp_path / "end", tmp_path / "noted"
    async with pool() as checks:  # of its two places, one stays taken: what begins in the other is noted in its order
        long = asyncio.create_task(checks.run(wait_for, end, noted, "long", tenant="another"))
        loud = [asyncio.create_task(checks.run(wait_for, gate, noted, f"loud {i}", tenant="loud")) for i in range(6)]
        await begun(noted, 2)
        quiet = asyncio.create_task(checks.run(wait_for, gate, noted, "quiet", tenant="quiet"))
        await asyncio.sleep(0)
        gate.touch()
        await asyncio.gather(quiet, *loud)
        end.touch()
        await long
    order = [line for line in lines(noted) if line != "long"]
    assert order[0] == "loud 0", "it had begun"
    assert order.index("quiet") <= 2, "at most the next one of the loud tenant comes before"


async def test_a_place_is_free_when_its_check_ends_and_not_when_its_caller_leaves(tmp_path: Path) -> None:
    gate, noted = tmp_path / "gate", tmp_path / "noted"
    async with pool() as checks:
        leaving = asyncio.create_task(checks.run(wait_for, gate, noted, tenant="ads"))
        await begun(noted)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert checks.turns.held == 1
        gate.touch()
        await checks.run(note, noted, "next", tenant="ads")
    assert lines(noted) == ["checked", "next"]


async def test_who_leaves_before_the_turn_is_forgotten(tmp_path: Path) -> None:
    gate, noted = tmp_path / "gate", tmp_path / "noted"
    async with pool() as checks:
        first = asyncio.create_task(checks.run(wait_for, gate, noted, tenant="ads"))
        await begun(noted)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await checks.run(note, noted, "left", tenant="ads")
        gate.touch()
        await first
        await checks.run(note, noted, "stayed", tenant="ads")
    assert lines(noted) == ["checked", "stayed"]


async def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    async with pool() as checks:
        with pytest.raises(RuntimeError, match="has died"):
            await checks.run(die, tenant="ads")
        await checks.run(note, tmp_path / "noted", tenant="ads")
    assert lines(tmp_path / "noted") == ["checked"]


async def test_a_check_is_done_by_another_process_if_the_one_that_waited_has_died(tmp_path: Path) -> None:
    async with pool() as checks:
        dead = await checks.run(note, tmp_path / "noted", tenant="ads")
        os.kill(dead, signal.SIGKILL)
        assert await checks.run(note, tmp_path / "noted", tenant="ads") != dead


async def test_the_failure_of_a_check_reaches_its_caller() -> None:
    async with pool() as checks:
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await checks.run(fail, tenant="ads")


async def test_what_is_known_is_still_loaded(tmp_path: Path) -> None:
    known = list[bool]()

    def load(is_known: bool) -> bytes:
        known.append(is_known)
        if len(known) == 3:
            raise ServiceError(Code.BLOB_CORRUPT)
        return b"/dev/null"

    async with pool() as checks:
        assert await checks.run(posixpath.basename, tenant="ads", key=1, load=load) == b"null"
        assert await checks.run(posixpath.basename, tenant="ads", key=1, load=load) == b"null"
        with pytest.raises(ServiceError):
            await checks.run(posixpath.basename, tenant="ads", key=1, load=load)
    assert known == [False, True, True]


async def test_what_another_tenant_has_checked_during_a_load_is_counted_once() -> None:
    go_on = threading.Event()

    def load(_: bool) -> bytes:
        assert go_on.wait(60)
        return b"/dev/null"

    async with pool() as checks:
        slow = asyncio.create_task(checks.run(posixpath.basename, tenant="ads", key=1, load=load))
        assert await checks.run(posixpath.basename, tenant="web", key=1, load=lambda _: b"/dev/null") == b"null"
        counted = checks._bytes
        go_on.set()
        assert await slow == b"null"
        assert checks._bytes == counted


async def test_what_is_evicted_during_a_load_is_still_the_answer() -> None:
    async with pool() as checks:

        def load(is_known: bool) -> bytes:
            if is_known:
                checks._known.clear()
            return b"/dev/null"

        for _ in range(2):
            assert await checks.run(posixpath.basename, tenant="ads", key=1, load=load) == b"null"


async def test_checks_without_end_delay_the_end_of_the_service_by_nothing(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    async with asyncio.timeout(100):
        async with make_service() as core:
            await submit(core)
            never = asyncio.create_task(core.checks.run(wait_for, tmp_path / "never", noted, tenant="ads"))
            await begun(noted)
        with pytest.raises(RuntimeError, match="has died"):
            await never
