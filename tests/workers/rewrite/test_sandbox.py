"""Rewrites in a process of their own, within limits."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from fxlib import wire
from fxlib.reasons import Reason
from fxlib.runtime import is_issue
from fxlib.spec.report import Report
from fxlib.spec.workload import Workload
from fxlib_workers.config import RewriteLimits
from fxlib_workers.exchange import JobFolder
from fxlib_workers.process.containment import Containment, Part
from fxlib_workers.process.forking import Forker
from fxlib_workers.rewrite.sandbox import RewriteSandbox
from tests.capture import feature_store
from tests.workers.cases import Lookups, lookup_workload, request
from tests.workers.process.contained import everything, host

pytestmark = pytest.mark.slow

_APPEARS_S = 30.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def carry_on() -> None:
    pass


def rewriting() -> list[psutil.Process]:
    """The processes of rewrites below this one."""
    return [each for each in psutil.Process().children(recursive=True) if each.name() == "rewrite"]


def rewrite(folder: JobFolder, limits: RewriteLimits, forker: Forker, check: Callable[[], None]) -> Report:
    with RewriteSandbox(folder, limits, forker, check, everything()) as sandbox:
        return sandbox.rewrite()


def test_a_graph_is_rewritten_and_nothing_stays(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    report = rewrite(folder, RewriteLimits(), forker, carry_on)
    assert report.reason is None
    assert [call.action for call in report.calls] == ["moved"] * 4
    rewritten = wire.decode(wire.parse(folder.rewritten.read_bytes()))
    assert sum(map(is_issue, rewritten.graph.nodes)) > 0
    assert [path.name for path in root.iterdir()] == ["job"]
    assert not rewriting()


class Features(nn.Module):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = feature_store.get("127.0.0.1:1", rows)
        return x.exp().sin() + found


@pytest.mark.parametrize("modules", [[], ["tests.capture.feature_store"]], ids=["unknown", "allowed"])
def test_calls_of_a_client_are_scheduled_whether_or_not_the_operator_allowed_its_module(
    forker: Forker, root: Path, modules: list[str]
) -> None:
    batch = (torch.randn(3), torch.arange(3))
    folder = request(root / "job", Features(), Workload(batches=[batch]))
    with RewriteSandbox(folder, RewriteLimits(), forker, carry_on, everything(), modules=modules) as sandbox:
        report = sandbox.rewrite()
    assert [call.action for call in report.calls] == ["moved"]


@pytest.mark.parametrize(
    "parts", [set(), {Part.FILTER}, {Part.FILES, Part.FILTER}], ids=["none", "filtered", "private"]
)
def test_a_graph_is_rewritten_where_the_host_contains_less(forker: Forker, root: Path, parts: set[Part]) -> None:
    if not parts <= host().parts:
        pytest.skip(f"this host has not all of it: {dict(host().missing)}")
    folder = request(root / "job", Lookups(), lookup_workload())
    policy = Containment(parts=frozenset(parts))
    with RewriteSandbox(folder, RewriteLimits(), forker, carry_on, policy) as sandbox:
        assert sandbox.rewrite().reason is None


def test_a_graph_without_calls_is_told_so(forker: Forker, root: Path) -> None:
    workload = Workload(batches=[torch.randn(2, 3)])
    folder = request(root / "job", nn.Linear(3, 1), workload)
    report = rewrite(folder, RewriteLimits(), forker, carry_on)
    assert (report.decision, report.reason) == ("keep_original", Reason.NO_CALLS)
    assert report.explanation.endswith("the recipe auto tries what there is for local work")
    assert not folder.rewritten.exists()


def test_an_unknown_recipe_is_a_reason(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload(), recipe="alchemy")
    report = rewrite(folder, RewriteLimits(), forker, carry_on)
    assert report.reason is Reason.REWRITE_FAILED
    assert "alchemy" in report.explanation


def test_a_damaged_graph_is_a_reason(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    folder.original.write_bytes(folder.original.read_bytes()[:-20])
    assert rewrite(folder, RewriteLimits(), forker, carry_on).reason is Reason.REWRITE_FAILED


def test_memory_is_limited(forker: Forker, root: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.table = nn.Linear(1 << 14, 1 << 14)  # 1 GiB of weights, drawn when the graph is decoded

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    folder = request(root / "job", Large(), Workload(batches=[torch.randn(1, 4)]))
    report = rewrite(folder, RewriteLimits(memory_bytes=256 << 20), forker, carry_on)
    assert report.reason is Reason.REWRITE_LIMIT, report.explanation


def test_the_size_of_files_is_limited(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    report = rewrite(folder, RewriteLimits(file_bytes=1000), forker, carry_on)
    assert report.reason is Reason.REWRITE_LIMIT
    assert "more than 1000 bytes" in report.explanation


def test_time_is_limited(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    report = rewrite(folder, RewriteLimits(wall_s=0.01), forker, carry_on)
    assert report.reason is Reason.REWRITE_LIMIT
    assert not rewriting()


class Killer:
    """Sends a signal to each process that rewrites, up to a number of them: to the outer one, if it is contained."""

    def __init__(self, number: int, most: int) -> None:
        self._number, self._most = number, most
        self.killed = set[int]()

    def __call__(self) -> None:
        deadline = time.monotonic() + _APPEARS_S
        while len(self.killed) < self._most and time.monotonic() < deadline:
            for each in rewriting():
                with contextlib.suppress(OSError, psutil.Error):  # it has ended by now
                    if _is_outer(each.pid) and each.pid not in self.killed:
                        each.send_signal(self._number)
                        self.killed.add(each.pid)
                        return
            time.sleep(0.005)


def _is_outer(pid: int) -> bool:
    """Return whether a process is in this one's namespace of processes, and not in that of a contained one."""
    return Path(f"/proc/{pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()


@pytest.mark.parametrize(
    "number, told, started",
    [
        (signal.SIGSEGV, (Reason.REWRITE_FAILED, "SIGSEGV"), 1),
        (signal.SIGXCPU, (Reason.REWRITE_LIMIT, "processor time"), 1),
        (signal.SIGKILL, (Reason.REWRITE_FAILED, "SIGKILL"), 3),  # from outside, which another start may escape
    ],
)
def test_a_process_that_a_signal_ends_each_time_is_a_reason(
    forker: Forker, root: Path, number: signal.Signals, told: tuple[Reason, str], started: int
) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    killer = Killer(number, 9)
    report = rewrite(folder, RewriteLimits(), forker, killer)
    assert report.reason is told[0]
    assert told[1] in report.explanation
    assert len(killer.killed) == started


def test_a_process_that_was_killed_from_outside_is_started_again(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    killer = Killer(signal.SIGKILL, 1)
    assert rewrite(folder, RewriteLimits(), forker, killer).reason is None
    assert len(killer.killed) == 1
    assert not rewriting()


def test_a_process_that_put_a_link_in_place_of_its_folder_is_not_started_again(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    killer = Killer(signal.SIGKILL, 9)

    def replace_and_kill() -> None:
        if not killer.killed:
            folder.path.rename(root / "moved")
            folder.path.symlink_to(root / "moved")
        killer()

    assert rewrite(folder, RewriteLimits(), forker, replace_and_kill).reason is Reason.REWRITE_FAILED
    assert len(killer.killed) == 1


def test_a_fork_server_that_was_killed_is_started_again_with_the_rewrite(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    killed: list[int] = []

    def kill() -> None:
        for each in psutil.Process().children(recursive=True):
            command = each.cmdline()
            forks = "fxlib_workers.process.fork_server" in command and "fxlib_workers.process.reaper" not in command
            if forks and each.name() != "rewrite" and not killed:
                each.kill()
                killed.append(each.pid)

    assert rewrite(folder, RewriteLimits(), forker, kill).reason is None
    assert len(killed) == 1
    assert not rewriting()


def test_a_job_that_is_not_wanted_any_more_ends_its_process(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewrite(folder, RewriteLimits(), forker, stop)
    assert not rewriting()


def test_a_graph_whose_weights_lie_on_an_accelerator_is_left_alone_at_once(forker: Forker, root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    graph = wire.parse(folder.original.read_bytes())
    for storage in graph.storages:
        storage.device = "cuda:0"
    folder.original.write_bytes(wire.serialize(graph))
    report = rewrite(folder, RewriteLimits(), forker, carry_on)
    assert report.reason is Reason.NO_DEVICE
    assert "cuda:0" in report.explanation
    assert not folder.rewritten.exists()
