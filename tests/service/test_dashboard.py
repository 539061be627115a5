"""Every query of the dashboard, run by a real Prometheus that scrapes the real service."""

import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from fxlib.v1 import jobs_pb2, workers_pb2
from tests.service.client import Client
from tests.service.support import Process, answer, eventually, fetch, graph_bytes, local, request
from tests.shared.real_service import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "fxlib.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
WINDOW = "5m"

pytestmark = pytest.mark.slow

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs `prometheus` (`make system` installs it)"
)


@dataclass
class Prometheus:
    address: str
    scraped: str
    """The address of the metrics that it scrapes."""

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        return json.loads(fetch(url))["data"]

    def samples(self, query: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=query)["result"]
        return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the scrape file of `deploy/`, but for address and haste, and a service that has worked."""
    folder = tmp_path_factory.mktemp("prometheus")
    service = Process(folder / "data", "--lease-seconds", "3")
    config = (DEPLOY / "prometheus.yml").read_text()
    assert "127.0.0.1:8471" in config
    config = config.replace("127.0.0.1:8471", service.metrics).replace("15s", "500ms")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(DEPLOY / "alerts.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            made = Prometheus(address, service.metrics)
            _wait_for_a_scrape(made)
            _work_a_day(service)
            _wait_for(made, "fxlib_leases_expired_total >= 1")
            _work_a_day(service)
            _wait_for(made, f"increase(fxlib_leases_expired_total[{WINDOW}]) > 0")
            yield made
        finally:
            process.terminate()
            process.wait(200)
            service.kill()


def _wait_for_a_scrape(made: Prometheus) -> None:
    for _ in eventually():
        try:
            if made.samples("fxlib_queue_depth"):
                return
        except OSError:
            continue
    pytest.fail("no scrape")


def _wait_for(made: Prometheus, query: str) -> None:
    for _ in eventually():
        if made.samples(query):
            return
    pytest.fail(f"nothing for {query}")


def _work_a_day(service: Process) -> None:
    """Answers, a cached one, a refusal, a lost worker, and jobs that wait."""
    with grpc.insecure_channel(local(service.listen)) as channel:
        client = Client(channel)
        client.put(graph_bytes())
        for name, result in (("dlrm", answer()), ("bert", answer(gain=0.01, reason="NOT_FASTER"))):
            client.submit(name=name)
            lease = client.claim()
            assert lease is not None
            client.complete(lease, result)
        assert client.jobs.Optimize(request(name="dlrm")).job.cached
        with pytest.raises(grpc.RpcError):
            client.get("none")
        job = client.submit()
        assert client.claim("lost") is not None
        beat = workers_pb2.HeartbeatRequest(job_id=job.id, token="other")
        for _ in eventually():
            if client.get(job.id).state == jobs_pb2.JOB_STATE_QUEUED:
                break
        with pytest.raises(grpc.RpcError):
            client.workers.Heartbeat(beat)
        lease = client.claim()
        assert lease is not None
        client.complete(lease, answer())
        client.submit(torch_version="0.0.0")


@needs_prometheus
def test_every_query_finds_samples(prometheus: Prometheus) -> None:
    asked = [
        query.replace("$__rate_interval", WINDOW).replace("$model", ".*").replace("$namespace", ".*")
        for query in QUERIES
    ]
    assert not [query for query in asked if "$" in query]
    found = {query: prometheus.samples(query) for query in asked}
    assert not [query for query, samples in found.items() if all(each["value"][1] == "NaN" for each in samples)]


@needs_prometheus
def test_the_model_variable_lists_the_models(prometheus: Prometheus) -> None:
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "model"]
    query = variable["query"]["query"].replace("$namespace", ".*")
    metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
    assert {each["metric"][label] for each in prometheus.samples(metric)} == {"dlrm", "bert"}


@needs_prometheus
def test_a_gain_is_shown_as_the_trial_measured_it(prometheus: Prometheus) -> None:
    (sample,) = prometheus.samples('fxlib_model_gain_ratio{fxlib_namespace="default", model="dlrm", bound="value"}')
    assert float(sample["value"][1]) == 0.5
    (sample,) = prometheus.samples('fxlib_model_qps{model="dlrm", arm="optimized"}')
    assert float(sample["value"][1]) == 150


@needs_prometheus
def test_metrics_are_named_as_prometheus_wants_them(prometheus: Prometheus) -> None:
    scrape = fetch(f"http://{prometheus.scraped}/metrics")
    assert "fxlib_queue_depth" in scrape
    ran = subprocess.run(["promtool", "check", "metrics"], input=scrape, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs `promtool` (`make system` installs it)")
def test_the_scrape_file_is_valid() -> None:
    command = ["promtool", "check", "config", str(DEPLOY / "prometheus.yml")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs `promtool` (`make system` installs it)")
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_the_alerts_are_valid_and_fire_when_they_should(command: tuple[str, ...]) -> None:
    ran = subprocess.run(["promtool", *command], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_alert_has_a_runbook_and_metrics_that_there_are() -> None:
    alerts = (DEPLOY / "alerts.yml").read_text()
    page = (DEPLOY.parent / "docs" / "how-to" / "runbooks.md").read_text()
    named = re.findall(r"alert: (\w+)", alerts)
    assert re.findall(r"^## (\w+)", page, re.MULTILINE) == named
    assert re.findall(r"runbook_url: docs/how-to/runbooks.md#(\w+)", alerts) == [each.lower() for each in named]
    known = (DEPLOY.parent / "docs" / "reference" / "metrics.md").read_text()
    used = {re.sub(r"_(count|sum|bucket)$", "", each) for each in re.findall(r"\bfxlib_\w+(?=[\[{ )])", alerts)}
    assert {each for each in used if each != "fxlib_namespace" and f"`{each}`" not in known} == set()


def test_panels_have_their_own_names_and_places() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS}
    assert len(places) == len(PANELS)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)
