"""The client against the real service."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxlib
from fxlib import Client
from fxlib.errors import FxlibWarning, RejectedError
from fxlib.jobs import Event
from tests.client.models import Clicks, workload
from tests.client.real import adopt, real_service, scripted_worker


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_service(tmp_path_factory.mktemp("service")) as address, scripted_worker(address, adopt):
        yield address


@pytest.fixture
def client(service: str) -> Iterator[Client]:
    with fxlib.connect(service) as opened:
        yield opened


def test_a_launcher_gets_its_own_model_back_with_the_figures(client: Client) -> None:
    graph = fxlib.capture(Clicks())
    result = client.optimize(graph, workload(), name="clicks", progress=False)
    assert result.decision == "adopt"
    assert result.gain is not None
    assert result.gain.low == 0.48
    assert dict(result.module.named_parameters())["top.weight"] is dict(graph.named_parameters())["top.weight"]
    assert "+50.0%" in str(result)


def test_a_relaunch_gets_the_answer_that_is_there(client: Client) -> None:
    asked = workload()
    first = client.optimize(fxlib.capture(Clicks()), asked, namespace="again", progress=False)
    second = client.optimize(fxlib.capture(Clicks()), asked, namespace="again", progress=False)
    assert second.cached
    assert second.gain == first.gain


def test_a_job_can_be_found_and_its_history_read(client: Client) -> None:
    labels = {"team": "found"}
    result = client.optimize(fxlib.capture(Clicks()), workload(), name="find-me", labels=labels, fresh=True, progress=False)
    [found] = client.jobs(labels=labels)
    assert (found.id, found.name, found.state) == (result.job_id, "find-me", "succeeded")
    heard: list[Event] = []
    job = client.watch(found.id, heard.append)
    assert job.report is not None
    assert [each.sequence for each in heard] == sorted(each.sequence for each in heard)
    assert {"scripted"} <= {each.message for each in heard}


def test_an_unknown_job_is_refused(client: Client) -> None:
    with pytest.raises(RejectedError) as caught:
        client.job("no-such-job")
    assert caught.value.code == "JOB_NOT_FOUND"


def test_an_unknown_recipe_costs_a_warning(client: Client) -> None:
    graph = fxlib.capture(Clicks())
    with pytest.warns(FxlibWarning, match="recipe"):
        assert client.optimize(graph, workload(), recipe="no-such-recipe", progress=False).module is graph


def test_a_job_nobody_claims_can_be_cancelled(tmp_path: Path) -> None:
    with real_service(tmp_path) as address, fxlib.connect(address) as client:
        graph = fxlib.capture(Clicks())
        handle = client.submit(graph, workload(), name="lonely")
        waiting = threading.Event()
        while not (jobs := client.jobs()):
            waiting.wait(0.05)
        assert client.cancel(jobs[0].id).state == "cancelled"
        with pytest.warns(FxlibWarning, match="cancelled"):
            assert handle.result(10).module is graph
