"""What the nodes of a real Ray cluster allow is found out there, and no trial runs on one that allows less."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import ray

import fxlib
from fxlib import wire
from fxlib.errors import OptionError
from fxlib_workers.config import TrialSettings
from fxlib_workers.process.forking import ForkError
from fxlib_workers.process.probe import Available, Level
from fxlib_workers.trial import host as host_file
from fxlib_workers.trial import node_containment
from fxlib_workers.trial.cluster_run import ClusterRun
from fxlib_workers.trial.driver import TrialDriver
from fxlib_workers.trial.failures import TrialError
from fxlib_workers.trial.host import Host
from fxlib_workers.trial.node_containment import allowed_on_nodes
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


OLD_HEAD = """
import os, sys
import ray
ray.__version__ = "2.9.3"
from ray.scripts.scripts import main
main()
"""
TOKEN = "a" * 64


@pytest.fixture(scope="module")
def other_head() -> Iterator[str]:
    """The address of a cluster that wants a token, and says that it runs an old Ray."""
    with TemporaryDirectory(prefix="fxlib-test-", dir="/tmp") as folder, ExitStack() as left:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = f"start --block --head --port {port} --num-cpus 1 --include-dashboard false --disable-usage-stats"
        here = ["--node-ip-address", "127.0.0.1", "--temp-dir", folder]
        log = left.enter_context(Path(folder, "log").open("w+"))
        head = subprocess.Popen(
            [sys.executable, "-c", OLD_HEAD, *options.split(), *here],
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=log,
        )
        left.callback(head.wait, 60)
        left.callback(head.terminate)
        limit = time.monotonic() + 100
        while "Ray runtime started" not in (said := Path(folder, "log").read_text()):
            assert head.poll() is None, said
            assert time.monotonic() < limit, said
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"


@pytest.mark.cluster
@pytest.mark.parametrize(
    "variables, why",
    [
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
            r"runs Ray 2\.9\.3, Python 3\.\S+, and this worker Ray",
        ),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}, "does not take this worker's token"),
        ({"RAY_AUTH_MODE": "token"}, "does not take this worker's token"),
        ({"RAY_AUTH_MODE": "disabled"}, "does not take this worker's token"),
    ],
    ids=["other version", "wrong token", "no token", "no authentication"],
)
def test_what_keeps_a_worker_from_a_cluster_is_told(
    other_head: str, variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray looks for a token
    for each in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(each, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=why) as raised:
        allowed_on_nodes(other_head)
    assert str(raised.value).startswith("--ray-address: ")
    assert TOKEN not in str(raised.value)


@pytest.mark.slow
def test_a_port_where_no_ray_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_containment, "_ALL_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(OptionError, match=f"no Ray has answered at {address} within 3 s"):
            allowed_on_nodes(address)


@pytest.mark.parametrize(
    "said, why",
    [
        ("RuntimeError: No node info found matching attributes: '10.0.0.2'", "no node of the cluster at head:1 is on"),
        ("warning\nRuntimeError: out of luck\n", "cannot connect to head:1: RuntimeError: out of luck"),
        ("", "it ended without a word"),
    ],
)
def test_what_ray_said_last_is_told(said: str, why: str) -> None:
    assert why in str(node_containment._explain("head:1", said))


def test_a_host_forks_nothing_where_its_node_allows_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "available", lambda: Available.without({"files": "no user namespace"}))
    with pytest.raises(ForkError, match=r"filtered \(files: no user namespace\), and not private"):
        asyncio.run(Host((), (), Level.PRIVATE)._policy())
