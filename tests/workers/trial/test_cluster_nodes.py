"""What the nodes of a real Ray cluster allow is found out there, and no trial runs on one that allows less."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import ray

import fxlib
from fxlib import wire
from fxlib_workers.config import TrialSettings
from fxlib_workers.process.forking import ForkError
from fxlib_workers.process.probe import Available, Level
from fxlib_workers.trial import cluster_nodes
from fxlib_workers.trial import host as host_file
from fxlib_workers.trial.cluster_nodes import allowed_on_nodes
from fxlib_workers.trial.cluster_run import ClusterRun
from fxlib_workers.trial.driver import TrialDriver
from fxlib_workers.trial.failures import TrialError
from fxlib_workers.trial.host import Host
from fxlib_workers.trial.nodes import Nodes
from fxlib_workers.trial.trainer import EncodedProgram
from tests.workers.cases import Lookups, fill, lookup_workload
from tests.workers.process.contained import host
from tests.workers.trial_settings import ALLOWED, MEASURED, QUICK, SETTINGS


def _cluster() -> TrialSettings:
    """The Ray of the fixture, as a cluster that somebody else has started."""
    return replace(SETTINGS, ray_address=ray.get_runtime_context().gcs_address, allowed_modules=(ALLOWED,))


@pytest.mark.cluster
@pytest.mark.usefixtures("nodes")
def test_each_node_says_what_it_allows() -> None:
    told = allowed_on_nodes(_cluster().ray_address)
    assert len(told) == 1
    assert [each.parts for each in told.values()] == [host().parts]


@pytest.mark.cluster
@pytest.mark.usefixtures("nodes")
def test_a_trial_on_a_cluster_runs_where_its_nodes_contain_it(root: Path, tmp_path: Path) -> None:
    holds = host().level(own_network=False)
    driver = TrialDriver(replace(_cluster(), node_containment=holds), root)
    try:
        folder = fill(tmp_path / "job", Lookups(), lookup_workload(), QUICK)
        assert driver.run(folder, lambda *_: None, lambda: None).reason in MEASURED
    finally:
        driver.end()


@pytest.mark.cluster
@pytest.mark.usefixtures("nodes")
def test_no_trial_runs_on_a_node_that_contains_less_than_the_worker_said() -> None:
    graph = wire.encode(fxlib.capture(Lookups())).graph.SerializeToString()
    program = EncodedProgram(original=graph, workload=b"", blobs={})
    isolated = Nodes(replace(_cluster(), node_containment=Level.ISOLATED))  # no node is, since they share a network
    with pytest.raises(TrialError) as caught:
        ClusterRun(isolated, lookup_workload(), program, lambda: False)
    assert f"this node reaches the containment {host().level(own_network=False)}" in caught.value.detail


@pytest.mark.slow
def test_a_cluster_that_is_not_reached_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_nodes, "_ALL_S", 3.0)
    assert allowed_on_nodes("127.0.0.1:9") == {}


def test_a_host_forks_nothing_where_its_node_allows_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "available", lambda: Available.without({"files": "no user namespace"}))
    with pytest.raises(ForkError, match=r"filtered \(files: no user namespace\), and not private"):
        asyncio.run(Host((), (), Level.PRIVATE)._policy())
