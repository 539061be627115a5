"""A worker whose Ray cluster has two hosts: trials are spread over them, and feel the line between them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import fxlib
from tests.loop.processes import ALLOWED, Service
from tests.shared.hosts import INTERFACE, Host, two_hosts, unavailable
from tests.workers.cases import Lookups, lookup_workload

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.own_cluster,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there can be hosts"),
]
DELAY_S = 0.01
BYTES_PER_S = 12.5e6
PATIENCE_S = 100.0
WHERE = {"hosts": "two"}


@contextmanager
def running(host: Host, *command: str, environment: Mapping[str, str], log: Path, until: str) -> Iterator[None]:
    """Run a command on a host once its log has the words, and end it, with all that it started, in order."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*host.within, sys.executable, "-m", *command],
            env={**os.environ, **environment},
            stdout=out,
            stderr=out,
        )
    try:
        limit = time.monotonic() + PATIENCE_S
        while until not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    with two_hosts(delay_s=DELAY_S, bytes_per_s=BYTES_PER_S) as found:
        yield found


@pytest.fixture(scope="module")
def worker(hosts: Sequence[Host], service: Service, folder: Path) -> Iterator[None]:
    """A worker on the first host, and a Ray on both."""
    head, other = hosts
    cluster = f"{head.address}:6379"
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"PYTHONUNBUFFERED": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": ""}
    ray = ("ray.scripts.scripts", "start", "--block", "--num-cpus", "8")
    options = ["--service", service.address, "--name", "on-two-hosts", "--label", "hosts=two"]
    options += ["--ray-address", cluster, "--interface", INTERFACE, "--allow-module", ALLOWED]
    options += ["--trial-memory-gib", "2", "--host-lock", str(folder / "two-hosts.lock")]
    with ExitStack() as processes:
        ray_folder = processes.enter_context(TemporaryDirectory(prefix="fxlib-test-", dir="/tmp"))

        def run(host: Host, name: str, *command: str, until: str) -> None:
            log = folder / f"{name}.log"
            processes.enter_context(running(host, *command, environment=environment, log=log, until=until))

        here = ("--head", "--port", "6379", "--temp-dir", ray_folder, "--include-dashboard", "false")
        run(head, "head", *ray, "--node-ip-address", head.address, *here, until="Ray runtime started")
        there = ("--node-ip-address", other.address, "--address", cluster)
        run(other, "other", *ray, *there, until="Ray runtime started")
        run(head, "on-two-hosts", "fxlib_workers", *options, until="")
        yield


@pytest.mark.usefixtures("worker")
def test_a_trial_is_spread_over_hosts_and_feels_the_line_between_them(service: Service) -> None:
    workload = lookup_workload(service_time_s=0.0)
    with fxlib.connect(service.address) as client:
        result = client.optimize(Lookups(), workload, where=WHERE, budget_s=60, deadline_s=250)
    assert result.decision == "adopt", result.explanation
    assert result.qps_original is not None
    # Two of the three processes are on one host, so at least two of the four lookups go over the line, in turn.
    round_trips_s = 2 * 2 * DELAY_S
    assert result.qps_original.value < workload.samples_per_step / round_trips_s
