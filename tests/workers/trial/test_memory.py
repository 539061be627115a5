"""The processes of a trial on one host share a limit of memory: each may stay below its own, and all be too large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio

from fxlib.reasons import Reason
from fxlib.spec.workload import Optimizer, Server, Table
from fxlib_workers.process.containment import Containment, Part
from fxlib_workers.trial.frames import MAKE
from fxlib_workers.trial.host import Ended, Host
from tests.workers import remote_code
from tests.workers.process.contained import host as allowed
from tests.workers.trial.test_host import CONFIG, KEYS, asked, fork_servers, in_its_loop
from tests.workers.trial_settings import HOST_MEMORY_BYTES, Calls, Try, calls_workload

MIB = 1 << 20
TABLE = Table(name="t", rows=600 * MIB // 256, dim=64)
kernel = pytest.mark.skipif(Part.MEMORY not in allowed().parts, reason=f"no cgroup here: {dict(allowed().missing)}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Host]:
    """A host for all tests: what it forks processes from takes seconds to start."""
    made = Host((), ())
    yield made
    if made._server is not None:
        made._server.close()
        await asyncio.to_thread(psutil.wait_procs, fork_servers())


@pytest_asyncio.fixture(loop_scope="module", params=[pytest.param("kernel", marks=kernel), "watchdog"])
async def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shared: Host) -> AsyncIterator[Host]:
    policy = Host._policy

    async def without_cgroups(self: Host) -> Containment:
        found = await policy(self)
        return replace(found, parts=found.parts - {Part.MEMORY})

    if request.param == "watchdog":
        monkeypatch.setattr(Host, "_policy", without_cgroups)
    yield shared
    await shared.end(list(shared._processes))
    assert shared._memory_keys == {}


async def holding(host: Host, key: str) -> bool:
    """Have a server make a table of 600 MiB; return whether it lived."""
    assert await asked(host, key, MAKE, "server", CONFIG) is None
    told = await asked(host, key, "serve", Server(name="ps0", tables=(TABLE,)), Optimizer(name="sgd", lr=0.1), 0)
    return not isinstance(told, Ended)


@pytest.mark.slow
@in_its_loop
async def test_processes_that_are_too_large_together_end(host: Host) -> None:
    one, other = next(KEYS), next(KEYS)
    await host.fork({one: "ps0", other: "ps1"}, "", 600 * MIB)
    assert await holding(host, one)
    assert await host.ran_out(one) == ""
    await holding(host, other)
    async with asyncio.timeout(60):
        while not (told := await host.ran_out(one)):  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.05)  # the watchdog looks a moment later
    assert told == f"its processes on one host wanted more than {600 * MIB} bytes together"


@pytest.mark.slow
@in_its_loop
async def test_trials_are_counted_one_by_one(host: Host) -> None:
    one, other = next(KEYS), next(KEYS)
    await host.fork({one: "ps0"}, "", 600 * MIB)
    await host.fork({other: "ps0"}, "", 600 * MIB)
    assert await holding(host, one)
    assert await holding(host, other)
    assert await host.ran_out(one) == await host.ran_out(other) == ""


@pytest.mark.cluster
def test_a_trial_whose_servers_hoard_ends_for_want_of_memory(attempt: Try) -> None:
    report = attempt(Calls(remote_code.hoard), calls_workload())
    assert report.reason is Reason.OUT_OF_MEMORY
    assert f"wanted more than {HOST_MEMORY_BYTES} bytes together" in report.explanation
