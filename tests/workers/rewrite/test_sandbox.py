"""Rewrites in a process of their own, within limits."""

from __future__ import annotations

import os
import signal
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
from fxlib_workers.exchange.job_folder import JobFolder
from fxlib_workers.rewrite.sandbox import RewriteSandbox
from tests.capture import feature_store
from tests.workers.cases import Lookups, alive, lookup_workload, request


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def carry_on() -> None:
    pass


def rewrite(folder: JobFolder, limits: RewriteLimits, root: Path, check: Callable[[], None]) -> Report:
    with RewriteSandbox(folder, limits, root, check) as rewriting:
        return rewriting.rewrite()


def test_a_graph_is_rewritten_and_nothing_stays(root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    report = rewrite(folder, RewriteLimits(), root, carry_on)
    assert report.reason is None
    assert [call.action for call in report.calls] == ["moved"] * 4
    rewritten = wire.decode(wire.parse(folder.rewritten.read_bytes()))
    assert sum(map(is_issue, rewritten.graph.nodes)) > 0
    assert [path.name for path in root.iterdir()] == ["job"]
    assert not alive(str(folder.path))


class Features(nn.Module):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = feature_store.get("127.0.0.1:1", rows)
        return x.exp().sin() + found


@pytest.mark.parametrize("modules", [[], ["tests.capture.feature_store"]], ids=["unknown", "allowed"])
def test_calls_of_a_client_are_scheduled_whether_or_not_the_operator_allowed_its_module(
    root: Path, modules: list[str]
) -> None:
    batch = (torch.randn(3), torch.arange(3))
    folder = request(root / "job", Features(), Workload(batches=[batch]))
    with RewriteSandbox(folder, RewriteLimits(), root, carry_on, modules=modules) as rewriting:
        report = rewriting.rewrite()
    assert [call.action for call in report.calls] == ["moved"]


def test_a_graph_without_calls_is_told_so(root: Path) -> None:
    workload = Workload(batches=[torch.randn(2, 3)])
    folder = request(root / "job", nn.Linear(3, 1), workload)
    report = rewrite(folder, RewriteLimits(), root, carry_on)
    assert (report.decision, report.reason) == ("keep_original", Reason.NO_CALLS)
    assert not folder.rewritten.exists()


def test_an_unknown_recipe_is_a_reason(root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload(), recipe="alchemy")
    report = rewrite(folder, RewriteLimits(), root, carry_on)
    assert report.reason is Reason.REWRITE_FAILED
    assert "alchemy" in report.explanation


def test_a_damaged_graph_is_a_reason(root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    folder.original.write_bytes(folder.original.read_bytes()[:-20])
    assert rewrite(folder, RewriteLimits(), root, carry_on).reason is Reason.REWRITE_FAILED


def test_memory_is_limited(root: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.table = nn.Linear(1 << 14, 1 << 14)  # 1 GiB of weights, drawn when the graph is decoded

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    folder = request(root / "job", Large(), Workload(batches=[torch.randn(1, 4)]))
    report = rewrite(folder, RewriteLimits(memory_bytes=256 << 20), root, carry_on)
    assert report.reason is Reason.REWRITE_LIMIT, report.explanation


def test_the_size_of_files_is_limited(root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    report = rewrite(folder, RewriteLimits(file_bytes=1000), root, carry_on)
    assert report.reason is Reason.REWRITE_LIMIT
    assert "more than 1000 bytes" in report.explanation


def test_time_is_limited(root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    report = rewrite(folder, RewriteLimits(wall_s=0.3), root, carry_on)
    assert report.reason is Reason.REWRITE_LIMIT
    assert not alive(str(folder.path))


def test_a_process_that_is_killed_is_a_reason(root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())

    def kill() -> None:
        for pid in alive(str(folder.path)):
            if (
                "fxlib_workers.rewrite" in psutil.Process(pid).cmdline()
                and "fxlib_workers.process.reaper" not in psutil.Process(pid).cmdline()
            ):
                os.kill(pid, signal.SIGSEGV)

    report = rewrite(folder, RewriteLimits(), root, kill)
    assert report.reason is Reason.REWRITE_FAILED
    assert "SIGSEGV" in report.explanation


def test_a_job_that_is_not_wanted_any_more_ends_its_process(root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewrite(folder, RewriteLimits(), root, stop)
    assert not alive(str(folder.path))


def test_a_graph_whose_weights_lie_on_an_accelerator_is_left_alone_at_once(root: Path) -> None:
    folder = request(root / "job", Lookups(), lookup_workload())
    graph = wire.parse(folder.original.read_bytes())
    for storage in graph.storages:
        storage.device = "cuda:0"
    folder.original.write_bytes(wire.serialize(graph))
    report = rewrite(folder, RewriteLimits(), root, carry_on)
    assert report.reason is Reason.NO_DEVICE
    assert "cuda:0" in report.explanation
    assert not folder.rewritten.exists()
