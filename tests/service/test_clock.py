"""What is how old, by a clock that jumps: a year ahead, a year back, and while the service or the host is down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fxlib_service.blobs.base import CheckedBlob
from fxlib_service.blobs.folder import FolderBlobStore
from fxlib_service.clock import Clock
from fxlib_service.retention import Retention
from fxlib_service.workers import Workers
from tests.service.leasing import leased
from tests.service.memory_job_store import MemoryJobStore
from tests.service.support import complete, get, make_service, ref, request, states, submit, work

DAY_S = 24 * 3600.0
YEAR_S = 365 * DAY_S


class Host:
    """A host whose wall clock may be set, and which may be restarted."""

    def __init__(self) -> None:
        self.wall, self.steady, self.boot = 1e9, 100.0, "first"

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def is_off(self, seconds: float) -> None:
        self.wall += seconds
        self.steady, self.boot = 5.0, f"{self.boot} again"

    def clock(self, folder: Path | None = None) -> Clock:
        return Clock(folder, wall=lambda: self.wall, steady=lambda: self.steady, boot=lambda: self.boot)


def test_without_a_jump_an_age_is_the_difference_of_times() -> None:
    host = Host()
    clock = host.clock()
    host.passes(100.0)
    assert clock.before(30.0) == host.wall - 30.0
    assert clock.before(1000.0) == host.wall - 1000.0


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
def test_a_jump_makes_nothing_old(jump_s: float) -> None:
    host = Host()
    clock = host.clock()
    stamps = [host.wall]
    host.passes(100.0)
    host.wall += jump_s
    stamps.append(host.wall)
    assert all(stamp >= clock.before(1000.0) for stamp in stamps)
    host.passes(950.0)
    older, later = (stamp < clock.before(1000.0) for stamp in stamps)
    assert not later
    if jump_s > 0:
        assert older  # after all it is 1,050 s old


def test_nothing_is_old_for_a_stamp_that_it_had_before_anybody_looked_at_the_clock() -> None:
    host = Host()
    clock = host.clock()
    host.passes(100.0)
    host.wall -= YEAR_S
    stamp = clock.now()
    host.passes(100.0)  # the service looks at the clock every ten minutes
    assert stamp > clock.before(1000.0)
    host.wall += YEAR_S
    assert stamp > clock.before(1000.0)


def test_after_the_time_to_keep_a_jump_is_forgotten() -> None:
    host = Host()
    clock = host.clock()
    host.wall += YEAR_S
    clock.observe()
    host.passes(DAY_S)
    assert clock.before(3600.0) == host.wall - 3600.0


def test_small_corrections_are_no_jumps(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    clock = host.clock()
    host.wall += 20.0
    clock.observe()
    assert "jumped" not in caplog.text
    host.wall += 20.0
    clock.observe()
    assert "jumped by +40 s" in caplog.text


def test_a_jump_while_the_service_was_down_makes_nothing_old(tmp_path: Path) -> None:
    host = Host()
    host.clock(tmp_path)
    stamp = host.wall
    host.passes(60.0)
    host.wall += YEAR_S
    assert stamp >= host.clock(tmp_path).before(3600.0)
    host.passes(3600.0)
    assert stamp < host.clock(tmp_path).before(3600.0)


@pytest.mark.slow
def test_a_clock_that_jumps_at_each_of_many_restarts_makes_nothing_old(tmp_path: Path) -> None:
    host = Host()
    host.clock(tmp_path)
    stamp = host.wall
    for _ in range(200):
        host.passes(1.0)
        host.wall += YEAR_S
        clock = host.clock(tmp_path)
    assert stamp >= clock.before(DAY_S)


def test_a_host_that_was_off_is_believed_for_a_day(tmp_path: Path) -> None:
    host = Host()
    host.clock(tmp_path)
    stamp = host.wall
    host.is_off(YEAR_S)
    clock = host.clock(tmp_path)
    assert stamp >= clock.before(30 * DAY_S)
    assert stamp < clock.before(0.9 * DAY_S)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"jumps": 3}', '{"jumps": [], "own": 0, "steady": 0, "wall": 0, "boot": ""}']
)
def test_a_record_that_cannot_be_read_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "clock.json").write_text(text)
    host = Host()
    assert host.clock(tmp_path).before(10.0) == host.wall - 10.0
    assert host.clock(tmp_path).before(10.0) == host.wall - 10.0


def test_a_record_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    host = Host()
    clock = host.clock(tmp_path / "gone")
    host.wall += YEAR_S
    assert clock.before(10.0) < host.wall - YEAR_S + 1.0


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
async def test_no_job_and_no_blob_is_deleted_for_a_jump(tmp_path: Path, jump_s: float) -> None:
    host = Host()
    clock = host.clock()
    blobs = FolderBlobStore(tmp_path, clock)
    async with make_service(MemoryJobStore(), blobs, clock=clock) as core:
        await submit(core)
        job_id = await work(core)
        blobs.append(ref(b"other").sha256, b"oth")
        retention = Retention(
            core.ledger, blobs, keep_s=30 * DAY_S, spare_s=DAY_S, count=core.metrics.forgotten, clock=clock
        )
        host.wall += jump_s
        assert not (await retention.sweep()).some
        assert blobs.abandon(older_than_s=DAY_S) == 0
        assert states([await get(core, job_id)]) == ["succeeded"]
        host.passes(31 * DAY_S + (YEAR_S if jump_s < 0 else 0.0))
        assert (await retention.sweep()).jobs == 1


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
async def test_a_worker_is_as_live_after_a_jump_as_before(jump_s: float) -> None:
    host = Host()
    clock = host.clock()
    async with make_service(clock=clock) as core:
        workers = Workers(core.ledger, live_s=60.0, clock=clock, steady=lambda: host.steady)
        await submit(core)
        await work(core)
        await workers.recall()
        host.wall += jump_s
        assert [each.id for each in workers.live()] == ["w1"]
        host.passes(61.0)
        assert workers.live() == []


async def test_a_namespace_that_was_served_before_the_clock_was_set_back_has_its_turn() -> None:
    host, served = Host(), list[str]()
    async with make_service(clock=host.clock()) as core:
        for namespace in ("ads", "web") * 4:
            await submit(core, request(namespace=namespace, fresh=True))
        for jump_s in (YEAR_S, -YEAR_S, 0.0, 0.0, 0.0, 0.0):
            host.passes(1.0)
            host.wall += jump_s
            lease = await leased(core)
            served.append(lease.request.namespace)
            await complete(core, lease)
    assert served[1:] in (["ads", "web"] * 2 + ["ads"], ["web", "ads"] * 2 + ["web"])


async def test_no_lease_expires_for_a_jump() -> None:
    host = Host()
    async with make_service(clock=host.clock(), lease_s=5.0) as core:
        await submit(core)
        lease = await leased(core)
        host.wall += YEAR_S
        await asyncio.sleep(0.01)
        assert await core.dispatcher.leases.take_expired() == []
        assert await core.dispatcher.leases.holds(lease.token)


def test_a_file_is_stamped_with_the_service_s_own_clock(tmp_path: Path) -> None:
    host = Host()
    blobs = FolderBlobStore(tmp_path, host.clock())
    blob = CheckedBlob(sha256=ref(b"x").sha256, size=1)
    blobs.append(blob.sha256, b"x")
    blobs.commit(blob)
    assert (tmp_path / "blobs" / blob.sha256[:2] / blob.sha256).stat().st_mtime == host.wall
