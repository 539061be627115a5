"""The nodes of a Ray: who can reach that of a worker's own, and what is left on those of a cluster."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import MagicMock

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from fxlib_workers.process.child import FOLDER, Channel, ChildEndedError
from fxlib_workers.process.containment import Part
from fxlib_workers.trial import drive_trials
from fxlib_workers.trial.driver import TrialDriver
from fxlib_workers.trial.nodes import Nodes, connected
from tests.workers.cases import Lookups, descendants, fill, lookup_workload
from tests.workers.process.contained import host
from tests.workers.trial_settings import MEASURED, QUICK, SETTINGS


def listeners(process: psutil.Process) -> set[str]:
    """Return the addresses at which any process of a process's network listens, as the kernel writes them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":  # TCP_LISTEN
                found.add(local.partition(":")[0])
    return found


def interfaces(process: psutil.Process) -> set[str]:
    lines = Path(f"/proc/{process.pid}/net/dev").read_text().splitlines()[2:]
    return {line.partition(":")[0].strip() for line in lines}


def test_a_folder_with_too_long_a_path_for_sockets_is_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "long-name-of-a-folder-for-temporary-files"
    with pytest.raises(RuntimeError, match="have the worker's TMPDIR name a folder whose path is"):
        connected(SETTINGS, folder).__enter__()


class _Quiet(Channel):
    """A channel over which nothing comes for a while, and which is closed then."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def send(self, **_: object) -> None:
        pass

    def receive(self, timeout_s: float | None = None) -> None:
        self.waits.append(timeout_s)
        if timeout_s is None or len(self.waits) > 1:
            raise ChildEndedError


@pytest.mark.parametrize("address, waits, left", [("head:6379", 60.0, 1), ("", None, 0)])
def test_nodes_of_a_cluster_are_left_when_no_trial_comes(
    address: str, waits: float | None, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, quiet = MagicMock(), _Quiet()
    monkeypatch.setattr(drive_trials, "connected", lambda *_: nullcontext(nodes))
    monkeypatch.setenv(FOLDER, "/nowhere")
    assert drive_trials.drive(replace(SETTINGS, ray_address=address), quiet) == 0
    assert quiet.waits[0] == waits
    assert nodes.leave.call_count == left


@pytest.mark.cluster
@pytest.mark.usefixtures("nodes")
def test_nodes_that_were_left_have_no_actor_and_get_one_again(nodes: Nodes) -> None:
    (node,) = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    before = nodes.host(node)
    nodes.leave()
    with pytest.raises(RayActorError):
        ray.get(before.warm_up.remote())
    assert nodes.host(node) != before


@pytest.fixture(scope="module")
def processes(trials: TrialDriver, tmp_path_factory: pytest.TempPathFactory) -> Sequence[psutil.Process]:
    """What runs once a trial has ended: the process that drives trials, and all that it started."""
    folder = fill(tmp_path_factory.mktemp("nodes") / "job", Lookups(), lookup_workload(), QUICK)
    assert trials.run(folder, lambda *_: None, lambda: None).reason in MEASURED
    assert trials._driver is not None
    return descendants(trials._driver.pid)


@pytest.mark.cluster
@pytest.mark.skipif(Part.NETWORK not in host().parts, reason="this host gives no process a network of its own")
def test_no_socket_of_ray_s_can_be_reached_over_an_interface_of_the_host(processes: Sequence[psutil.Process]) -> None:
    assert any("raylet" in process.name() for process in processes)
    ours = Path("/proc/self/ns/net").readlink()
    for process in processes:
        assert Path(f"/proc/{process.pid}/ns/net").readlink() != ours, process.cmdline()
        assert interfaces(process) == {"lo"}
    assert listeners(processes[0])  # Ray does listen, on all interfaces that there are


def other_interface() -> tuple[str, str]:
    """Return an interface of this host besides loopback, and its address; "" if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses if name != "lo" else ():
            if each.family == socket.AF_INET:
                return name, each.address
    return "", ""


@pytest.mark.cluster
@pytest.mark.skipif(Part.NETWORK not in host().parts, reason="this host gives no process a network of its own")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's processes can join the host's network again")
@pytest.mark.skipif(not other_interface()[0], reason="this host has no interface but loopback")
def test_on_an_interface_of_the_host_s_the_processes_of_a_trial_listen_there_and_ray_does_not(tmp_path: Path) -> None:
    interface, address = other_interface()
    ours, heard, rays = Path("/proc/self/ns/net").readlink(), set[str](), set[str]()

    def look(*_: object) -> None:
        for process in descendants(driver._driver.pid if driver._driver else 0):
            with contextlib.suppress(psutil.Error, OSError):
                if Path(f"/proc/{process.pid}/ns/net").readlink() != ours:
                    rays.add(process.name())
                else:
                    open_ = process.net_connections("tcp")
                    heard.update(each.laddr.ip for each in open_ if each.status == psutil.CONN_LISTEN)

    with TemporaryDirectory(prefix="fxlib-test-", dir="/tmp") as root:
        driver = TrialDriver(replace(SETTINGS, interface=interface), Path(root))
        folder = fill(tmp_path / "job", Lookups(), lookup_workload(), QUICK)
        try:
            assert driver.run(folder, look, lambda: None).reason in MEASURED
        finally:
            driver.end()
    assert {"raylet", "gcs_server"} <= rays
    assert heard == {address}


@pytest.mark.cluster
def test_of_ray_s_own_processes_only_those_run_that_trials_need(processes: Sequence[psutil.Process]) -> None:
    commands = [" ".join(process.cmdline()) for process in processes]
    assert any("gcs_server" in command for command in commands)
    assert not [each for each in commands if any(name in each for name in ("monitor.py", "dashboard.py"))]


@pytest.mark.cluster
def test_a_trial_leaves_nothing_in_the_folder_for_temporary_files(
    processes: Sequence[psutil.Process], temporary: Path
) -> None:
    assert processes[0].environ()["TMPDIR"] == str(temporary)
    assert [path.name for path in temporary.iterdir()] == []
