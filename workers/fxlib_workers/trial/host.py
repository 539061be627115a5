"""The Ray actor of a trial on one node: it gets processes forked there, and passes calls and answers on.

It lives as long as its driver, whose trials share it. No graph ever enters it, since it holds Ray's sockets and
credentials: it imports neither torch nor fxlib, and does not look into the data that it passes on.

The memory of a trial on one host is bounded as a whole: by the kernel if it allows cgroups, else by a watchdog. Each
process also has its own limit, beyond which it cannot allocate (`trial_process`), but many processes that each stay
below their limit could still use all of the host's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import ray

from fxlib_workers.process.cgroup import CgroupUnavailableError, JobCgroup, job_cgroup
from fxlib_workers.process.child import CHANNEL, inherited_variables, python, search_path
from fxlib_workers.process.containment import HOST_NETWORK, Containment, Network, Part
from fxlib_workers.process.forking import SINGLE_THREADED, ForkError, ForkServer
from fxlib_workers.process.limits import host_memory_bytes
from fxlib_workers.process.probe import Level, available
from fxlib_workers.process.system_calls import compile_filter
from fxlib_workers.trial.frames import HEADER, LONGEST_ANSWER, framed

_LIBRARIES_BYTES: Final = 256 << 20
"""Memory in bytes that the libraries use in each process, which is not counted against a graph."""

_SHARE: Final = 0.75
"""The share of a host's memory that a trial may use, unless the operator says otherwise."""

_POLL_S: Final = 0.25
_REPORT_S: Final = 5.0
"""Seconds in which the fork server reports how a process ended after its connection was closed."""


class _TrialMemory:
    """Bounds the total memory that the processes of one trial use on this host.

    It is made within the event loop in which the watchdog runs.

    Args:
        limit_bytes: the memory that they may use in addition to that of the libraries; 0 for three quarters of the
            host's memory.
        processes: their number.
        policy: the policy by which they are contained.

    Attributes:
        policy: the same policy, with the cgroup that they join, if there is one.
    """

    def __init__(self, limit_bytes: int, processes: int, policy: Containment) -> None:
        self._limit_bytes = limit_bytes or round(_SHARE * host_memory_bytes())
        self._most_bytes = self._limit_bytes + processes * _LIBRARIES_BYTES
        self._open = contextlib.ExitStack()
        self._group = self._cgroup(processes * policy.threads) if Part.MEMORY in policy.parts else None
        self.policy = replace(policy, cgroup=self._group.joins) if self._group else policy
        self._pids: list[int] = []
        self._inherited_bytes = 0  # memory that each shares with the process that forked it
        self._over = False
        self._watchdog = None if self._group else asyncio.create_task(self._watch())

    def _cgroup(self, threads: int) -> JobCgroup | None:
        with contextlib.suppress(CgroupUnavailableError):
            return self._open.enter_context(job_cgroup(self._most_bytes, threads))
        return None

    def add(self, pid: int) -> None:
        """Count a process that was just forked, and all its descendants."""
        self._pids.append(pid)
        self._inherited_bytes = max(self._inherited_bytes, _resident_bytes(pid))

    def ran_out(self) -> str:
        """Return a description of the memory that was wanted if it exceeded the limit; "" otherwise."""
        if not (self._over or (self._group is not None and self._group.ran_out())):
            return ""
        return f"its processes on one host wanted more than {self._limit_bytes} bytes together"

    async def close(self) -> None:
        """Stop watching and remove the cgroup, whose processes have ended."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        await asyncio.to_thread(self._open.close)

    async def _watch(self) -> None:
        """End all processes when they use too much memory. One that allocates fast may briefly exceed the limit."""
        while not self._over:
            await asyncio.sleep(_POLL_S)
            resident = [_resident_bytes(pid) for each in self._pids for pid in _with_descendants(each)]
            taken = sum(max(0, each - self._inherited_bytes) for each in resident)
            if taken > self._most_bytes:
                self._over = True
                for pid in self._pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _with_descendants(pid: int) -> Iterator[int]:
    """Yield the ids of a process and its descendants. Other processes are not examined, since that takes longer."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in children.read_text().split():
                yield from _with_descendants(int(child))


def _resident_bytes(pid: int) -> int:
    """Return the memory in bytes of a process that is not backed by a file; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a process, in place of an answer.

    Attributes:
        how: a description of how it ended.
    """

    how: str


@dataclass(frozen=True, slots=True)
class _Process:
    """A process of a trial.

    Attributes:
        reader: the stream of its messages.
        writer: the stream of messages to it.
        ended: its exit status, once it has ended.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    ended: asyncio.Future[int]


class Host:
    """Forks processes of trials on its node, and communicates with them.

    Args:
        keep_variables: names, or patterns of names, of environment variables that the processes see in addition to
            those that libraries need.
        modules: the modules that the operator allows, which the processes may read.
        least: the level of containment below which no process is forked here.
        network: the network of processes that have to be on the host's.
    """

    def __init__(
        self,
        keep_variables: Sequence[str],
        modules: Sequence[str],
        least: Level = Level.NONE,
        network: Network = HOST_NETWORK,
    ) -> None:
        self._keep_variables = keep_variables
        self._modules = modules
        self._least = least
        self._network = network
        self._contained: Containment | None = None
        self._server: ForkServer | None = None
        self._forking = asyncio.Lock()
        self._processes: dict[str, _Process] = {}
        self._memory_keys: dict[_TrialMemory, set[str]] = {}

    async def warm_up(self) -> None:
        """Start the fork server unless it is running.

        Raises:
            ForkError: the fork server cannot be started, or says that it cannot serve.
        """
        async with self._forking:
            await self._running()
            await self._policy()

    async def fork(self, names: Mapping[str, str], network: str, memory_bytes: int = 0) -> None:
        """Fork processes under keys that no other process has had; the names are for the kernel.

        Processes that name the same network share one of their own; "" stands for the host's. Together, they use no
        more than `memory_bytes`, as `_TrialMemory` defines it.

        Raises:
            ForkError: the fork server cannot be started, or has ended.
        """
        async with self._forking:
            policy = await self._policy()
            server = await self._running()
            memory = _TrialMemory(memory_bytes, len(names), policy)
            self._memory_keys[memory] = set(names)
            for key, name in names.items():
                ours, theirs = socket.socketpair()
                with theirs:
                    fork = server.fork(key, theirs, name=name, containment=memory.policy, network=network)
                memory.add(await asyncio.wrap_future(fork.forked))
                reader, writer = await asyncio.open_connection(sock=ours)
                self._processes[key] = _Process(reader, writer, asyncio.wrap_future(fork.ended))

    async def ask(self, key: str, call: bytes) -> bytes | Ended:
        """Pass a call on to a process and return its answer."""
        process = self._processes[key]
        try:
            process.writer.write(framed(call))
            await process.writer.drain()
            (size,) = HEADER.unpack(await process.reader.readexactly(HEADER.size))
            if size > LONGEST_ANSWER:
                return Ended(f"its answer of {size} bytes is longer than any may be")
            return await process.reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(_end_of(process), _REPORT_S)
            return Ended("it closed its connection")

    async def end_of(self, key: str) -> Ended:
        """Wait until a process has ended, and return how it ended."""
        return await _end_of(self._processes[key])

    async def end(self, keys: Sequence[str]) -> None:
        """Kill processes, with all processes that they started, and return when they are gone."""
        async with self._forking:  # processes that are being forked have to end, too
            ending = {key: self._processes.pop(key) for key in keys if key in self._processes}
            if self._server is not None:
                self._server.end(list(ending))
        for process in ending.values():
            await _end_of(process)
            process.writer.close()
        for memory, left in list(self._memory_keys.items()):
            left.difference_update(keys)
            if not left:
                del self._memory_keys[memory]
                await memory.close()

    async def ran_out(self, key: str) -> str:
        """Return why the memory of a process's trial ran out on this node; "" if it did not."""
        return next((memory.ran_out() for memory, keys in self._memory_keys.items() if key in keys), "")

    async def _policy(self) -> Containment:
        """Return the policy for processes on this node, with all containment that it allows.

        Raises:
            ForkError: the node allows too little.
        """
        if self._contained is None:
            found = await asyncio.to_thread(available)
            if (level := found.level(own_network=False)).rank < self._least.rank:
                missing = found.why(self._least)
                raise ForkError(f"this node reaches the containment {level} ({missing}), and not {self._least}")
            program = await asyncio.to_thread(compile_filter, sockets=True) if Part.FILTER in found.parts else b""
            readable = tuple(_folders_of(self._modules))
            self._contained = Containment(parts=found.parts, readable=readable, network=self._network, program=program)
        return self._contained

    async def _running(self) -> ForkServer:
        if self._server is None or self._server.closed:
            self._server = await asyncio.to_thread(_start_fork_server, self._keep_variables)
        await asyncio.wrap_future(self._server.ready)
        return self._server


def _start_fork_server(keep_variables: Sequence[str]) -> ForkServer:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [*python("fxlib_workers.process.fork_server"), "fxlib_workers.trial.answer_calls"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**environment(keep_variables), CHANNEL: str(theirs.fileno())},
            start_new_session=True,
        )
    return ForkServer(ours, process.wait)


async def _end_of(process: _Process) -> Ended:
    try:
        status = await asyncio.shield(process.ended)
    except ForkError as error:
        return Ended(str(error))
    return Ended(_in_words(status))


def environment(keep_variables: Sequence[str], given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of processes of a trial: the variables that libraries need, and none of Ray's.

    Args:
        keep_variables: names, or patterns of names, of further variables.
        given: the environment of this process, which Ray has started.
    """
    kept = inherited_variables(given, keep_variables)
    own = {name: value for name, value in kept.items() if not name.startswith("RAY_")}
    inside_ray = str(Path(ray.__file__).parent)
    path = [each for each in search_path().split(os.pathsep) if not each.startswith(inside_ray)]
    return {
        # Ray sets this for actors that ask for less than one CPU. A trainer sets its own threads, as the workload says.
        "OMP_NUM_THREADS": "1",
        **own,
        **SINGLE_THREADED,
        "PYTHONPATH": os.pathsep.join(path),
    }


def _folders_of(modules: Sequence[str]) -> Iterator[Path]:
    """Yield the folders and files of the packages that these modules belong to, without importing them."""
    for package in dict.fromkeys(module.partition(".")[0] for module in modules):
        if (found := importlib.util.find_spec(package)) is not None:
            yield from map(Path, found.submodule_search_locations or filter(None, [found.origin]))


def _in_words(status: int) -> str:
    return f"it ended with status {status}" if status >= 0 else f"{signal.strsignal(-status)} (signal {-status})"
