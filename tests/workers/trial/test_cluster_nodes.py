"""What the nodes of a real Ray cluster allow is found out there, and no trial runs on one that allows less."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from fxlib_workers.process.forking import ForkError
from fxlib_workers.process.probe import Available, Level
from fxlib_workers.trial import host as host_file
from fxlib_workers.trial.cluster_nodes import allowed_on_nodes
from fxlib_workers.trial.driver import TrialDriver
from fxlib_workers.trial.host import Host
from fxlib_workers.trial.nodes import Nodes
from tests.workers.cases import Lookups, fill, lookup_workload
from tests.workers.process.contained import host
from tests.workers.trial_settings import ALLOWED, MEASURED, QUICK, SETTINGS


def _address() -> str:
    address: str = ray.get_runtime_context().gcs_address
    return address


@pytest.mark.cluster
@pytest.mark.usefixtures("nodes")
def test_each_node_says_what_it_allows() -> None:
    told = allowed_on_nodes(_address())
    assert len(told) == 1
    assert [each.parts for each in told.values()] == [host().parts]


@pytest.mark.cluster
@pytest.mark.usefixtures("nodes")
def test_a_trial_on_a_cluster_runs_where_its_nodes_contain_it_and_nowhere_else(root: Path, tmp_path: Path) -> None:
    holds = host().level(own_network=False)
    cluster = replace(SETTINGS, ray_address=_address(), allowed_modules=(ALLOWED,))
    reports = []
    for least in (holds, Level.ISOLATED):  # which no node of a cluster is, since they share a network
        driver = TrialDriver(replace(cluster, node_containment=least), root)
        try:
            folder = fill(tmp_path / least, Lookups(), lookup_workload(), QUICK)
            reports.append(driver.run(folder, lambda *_: None, lambda: None))
        finally:
            driver.end()
    assert reports[0].reason in MEASURED
    assert reports[1].decision == "keep_original"
    assert f"this node reaches the containment {holds}" in reports[1].explanation


def test_a_cluster_that_is_not_reached_allows_nothing() -> None:
    assert allowed_on_nodes("no-such-host.invalid:6379") == {}


def test_a_host_forks_nothing_where_its_node_allows_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "available", lambda: Available.without({"files": "no user namespace"}))
    with pytest.raises(ForkError, match=r"filtered \(files: no user namespace\), and not private"):
        asyncio.run(Host((), (), Level.PRIVATE)._policy())


@pytest.mark.cluster
def test_hosts_are_told_the_least_level(nodes: Nodes) -> None:
    assert nodes.settings.node_containment is Level.NONE
