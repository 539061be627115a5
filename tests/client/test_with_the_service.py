"""The client against the real service."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import fxlib
from fxlib import Client
from fxlib.errors import FxlibWarning, RejectedError
from fxlib.spec.job import Event
from tests.client.models import Clicks, workload
from tests.shared.real_service import adopt, free_port, real_service, scripted_worker
from tests.shared.undisturbed import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_service(tmp_path_factory.mktemp("service")) as address, scripted_worker(address, adopt):
        yield address


@pytest.fixture
def client(service: str) -> Iterator[Client]:
    with fxlib.connect(service, patience_s=60) as opened:
        yield opened


def test_a_launcher_gets_its_own_model_back_with_the_figures(client: Client) -> None:
    graph = fxlib.capture(Clicks())
    result = client.optimize(graph, workload(), name="clicks", progress=False)
    assert result.decision == "adopt"
    assert result.gain is not None
    assert result.gain.low == 0.48
    assert dict(result.module.named_parameters())["top.weight"] is dict(graph.named_parameters())["top.weight"]
    assert "+50.0%" in str(result)
    assert "issue_call('ps0', 'fxlib.ps:lookup'" in str(result.module.code)


def test_a_relaunch_gets_the_answer_that_is_there(client: Client) -> None:
    asked = workload()
    first = client.optimize(fxlib.capture(Clicks()), asked, namespace="again", progress=False)
    second = client.optimize(fxlib.capture(Clicks()), asked, namespace="again", progress=False)
    assert second.cached
    assert second.gain == first.gain


def test_an_answer_shows_what_each_pass_did_where_that_was_asked_for(client: Client) -> None:
    asked, graph = workload(), fxlib.capture(Clicks())
    first = client.optimize(graph, asked, namespace="diffs", progress=False)
    assert {each.diff for each in first.passes} == {""}
    second = client.optimize(graph, asked, namespace="diffs", diffs=True, progress=False)
    assert not second.cached
    shown = {each.name: each.diff for each in second.passes if each.changes}
    assert shown["split_calls"].startswith("--- before split_calls\n+++ after split_calls\n")
    assert shown["split_calls"] in str(second)


def test_a_job_can_be_found_and_its_history_read(client: Client) -> None:
    labels = {"team": "found"}
    result = client.optimize(
        fxlib.capture(Clicks()), workload(), name="find-me", labels=labels, fresh=True, progress=False
    )
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


def test_a_service_that_is_killed_and_comes_back_answers_after_all(tmp_path: Path) -> None:
    graph, address = fxlib.capture(Clicks()), f"127.0.0.1:{free_port()}"
    with ExitStack() as before, fxlib.connect(address, patience_s=60) as client:
        before.enter_context(real_service(tmp_path, "--listen", address, end=signal.SIGKILL))
        handle = client.submit(graph, workload())
        until(lambda: bool(client.jobs()))
        before.close()
        assert not handle.ready()
        with real_service(tmp_path, "--listen", address), scripted_worker(address, adopt):
            assert handle.result(60).decision == "adopt"


def test_a_job_nobody_claims_can_be_cancelled(tmp_path: Path) -> None:
    with real_service(tmp_path) as address, fxlib.connect(address, patience_s=60) as client:
        graph = fxlib.capture(Clicks())
        handle = client.submit(graph, workload(), name="lonely")
        until(lambda: bool(client.jobs()))
        assert client.cancel(client.jobs()[0].id).state == "cancelled"
        with pytest.warns(FxlibWarning, match="cancelled"):
            assert handle.result(60).module is graph
