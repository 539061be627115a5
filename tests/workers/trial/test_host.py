"""The host of a trial on one node, without Ray: it forks, asks, tells of deaths, and starts anew what was killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from fxlib_workers.process.containment import Part
from fxlib_workers.trial.answers import read_answer
from fxlib_workers.trial.frames import MAKE
from fxlib_workers.trial.host import Ended, Host, environment
from fxlib_workers.trial.trial_process import ProcessConfig
from tests.workers.process.contained import host as allowed

pytestmark = pytest.mark.slow

CONFIG = ProcessConfig(
    name="ps0",
    rank=0,
    world_size=1,
    interface="lo",
    allowed_modules=(),
    memory_bytes=1 << 30,
    file_bytes=1 << 20,
    threads=1,
)

KEYS = map(str, itertools.count())
"""Of processes: a host takes none twice."""

in_its_loop = pytest.mark.asyncio(loop_scope="module")
"""Of tests that speak to the host that all share."""

isolated = pytest.mark.skipif(
    not allowed().parts >= {Part.USER, Part.NETWORK}, reason=f"this host contains no process: {dict(allowed().missing)}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Host]:
    """A host for all tests: what it forks processes from takes seconds to start."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RAY_AUTH_TOKEN", "secret")
        environ.setenv("FXLIB_TOKEN_FILE", "secret")
        made = Host((), ())
        await made.warm_up()
    yield made
    if (server := made._server) is not None:
        server.close()
        await asyncio.to_thread(psutil.wait_procs, fork_servers())


@pytest_asyncio.fixture(loop_scope="module")
async def host(shared: Host) -> AsyncIterator[Host]:
    yield shared
    await shared.end(list(shared._processes))


def fork_servers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if any("fork_server" in word for word in each.cmdline())]


def network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115 - it is no path


async def asked(host: Host, key: str, method: str, *args: object) -> object:
    answer = await host.ask(key, pickle.dumps((method, args)))
    return answer if isinstance(answer, Ended) else read_answer(method, answer)


@in_its_loop
async def test_processes_answer_calls_under_their_names_and_see_nothing_of_ray(host: Host) -> None:
    ours, other = next(KEYS), next(KEYS)
    await host.fork({ours: "ps0", other: "trainer0"}, "")
    assert await asked(host, ours, MAKE, "server", CONFIG) is None
    assert await asked(host, ours, "not_served", ["fxlib.ps:lookup", "shop:call"]) == ["shop:call"]
    (server,) = fork_servers()
    assert server.num_threads() == 1
    below = server.children(recursive=True)
    assert {each.name() for each in below} == {"ps0", "trainer0"}
    for each in below:
        assert not {"RAY_AUTH_TOKEN", "FXLIB_TOKEN_FILE"} & each.environ().keys()
        assert not any("_raylet" in mapped.path for mapped in each.memory_maps())
    await host.end([ours, other])
    assert server.children() == []


@isolated
@in_its_loop
async def test_the_processes_of_one_trial_share_a_network_and_no_user_of_the_host(host: Host) -> None:
    one, two, stranger = next(KEYS), next(KEYS), next(KEYS)
    await host.fork({one: "ps0", two: "trainer0"}, "a trial")
    await host.fork({stranger: "other"}, "another trial")
    for key in (one, two, stranger):  # an answer comes from a contained process
        assert await asked(host, key, MAKE, "server", CONFIG) is None
    below = fork_servers()[0].children(recursive=True)
    innermost = {each.name(): each for each in below if not each.children()}
    networks = {name: network_of(each.pid) for name, each in innermost.items()}
    assert networks["ps0"] == networks["trainer0"]
    assert len({networks["ps0"], networks["other"], network_of(os.getpid())}) == 3
    assert os.getuid() not in {each.uids().real for each in innermost.values()}


@in_its_loop
async def test_a_death_is_told_to_who_asks_and_to_who_waits(host: Host) -> None:
    key = next(KEYS)
    await host.fork({key: "ps0"}, "")
    (child,) = fork_servers()[0].children()  # the keeper of the contained process, with which that ends
    child.send_signal(signal.SIGKILL)
    assert await host.end_of(key) == Ended("Killed (signal 9)")
    assert await asked(host, key, "not_served", []) == Ended("Killed (signal 9)")


@in_its_loop
async def test_a_fork_server_that_was_killed_is_started_again(host: Host) -> None:
    key, next_key = next(KEYS), next(KEYS)
    await host.fork({key: "ps0"}, "")
    os.kill(fork_servers()[0].pid, signal.SIGKILL)
    assert await host.end_of(key) == Ended("the process that forks others ended")
    await host.end([key])
    await host.fork({next_key: "ps0"}, "")
    assert await asked(host, next_key, MAKE, "server", CONFIG) is None


def test_of_the_environment_processes_see_what_libraries_need_and_what_is_kept_but_nothing_of_ray() -> None:
    given = {"PATH": "/bin", "RAY_ADDRESS": "1", "AWS_KEY": "2", "SHARD": "3", "OMP_NUM_THREADS": "4"}
    found = environment(["SHARD", "RAY_*"], given)
    assert {"PATH": "/bin", "SHARD": "3", "OMP_NUM_THREADS": "4"}.items() <= found.items()
    assert not {"RAY_ADDRESS", "AWS_KEY"} & found.keys()
    assert not any("ray/" in path for path in found["PYTHONPATH"].split(os.pathsep))
    assert environment([], {})["OMP_NUM_THREADS"] == "1"
