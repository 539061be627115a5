"""Whatever happens between the launcher and the answer, the launcher has a module to train with."""

import copy
import re
import socket
import warnings
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import fxlib
from fxlib import Client, Profile, Server, Workload, protocol, wire
from fxlib.errors import FxlibWarning, WorkloadError
from fxlib.runtime import is_call
from fxlib.spec.profile import NodeProfile
from fxlib.v1 import graph_pb2
from tests.client.models import Clicks, workload
from tests.client.scripted import FAILED, RUNNING, Scripted, event


@pytest.fixture
def graph() -> GraphModule:
    return fxlib.capture(Clicks())


def as_bytes(graph: GraphModule) -> bytes:
    return wire.encode(graph).graph.SerializeToString(deterministic=True)


def ask(client: Client, graph: nn.Module, **asked: Any) -> fxlib.Result:
    return client.optimize(graph, workload(), progress=False, **asked)


def test_an_adopted_graph_comes_back_on_the_caller_s_own_parameters(
    service: Scripted, client: Client, graph: GraphModule
) -> None:
    service.adopt(as_bytes(graph))
    result = ask(client, graph)
    assert result.decision == "adopt"
    assert result.module is not graph
    ours, theirs = dict(graph.named_parameters()), dict(result.module.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(theirs[name] is value for name, value in ours.items())
    assert result.module.state_dict().keys() == graph.state_dict().keys()


def test_the_launcher_is_told_of_its_job_and_of_the_decision(
    client: Client, graph: GraphModule, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fxlib.client")
    result = ask(client, graph)
    taken, decided = [each.getMessage() for each in caplog.records if each.name == "fxlib.client.session"]
    assert taken.startswith("the service at ")
    assert "took job job-1" in taken
    assert decided == f"job job-1: keep_original; {result.explanation}"


def test_a_kept_original_is_the_caller_s_own_object(client: Client, graph: GraphModule) -> None:
    result = ask(client, graph)
    assert (result.decision, result.reason, result.job_id) == ("keep_original", fxlib.Reason.NOT_FASTER, "job-1")
    assert result.module is graph


def test_a_kept_original_runs_itself_without_the_checks_of_a_graph(client: Client) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    batch = torch.randn(4, 8)
    result = client.optimize(model, Workload(batches=[(batch,)]), progress=False)
    assert torch.equal(result.module(batch), model(batch))
    assert result.usage.original == {"nothing was adopted": 1}


def test_a_module_that_is_not_captured_is_captured(service: Scripted, client: Client) -> None:
    model = Clicks()
    result = ask(client, model)
    assert isinstance(result.module, GraphModule)
    assert dict(result.module.named_parameters())["top.weight"] is model.top.weight
    assert service.requests[0].name == "Clicks"


def test_the_request_says_what_was_asked_and_sends_no_value(
    service: Scripted, client: Client, graph: GraphModule
) -> None:
    ask(client, graph, name="clicks", namespace="ads", labels={"team": "a"}, min_gain=0.1, budget_s=7, fresh=True)
    [request] = service.requests
    assert (request.name, request.namespace, dict(request.labels), request.fresh) == (
        "clicks",
        "ads",
        {"team": "a"},
        True,
    )
    assert (request.trial.min_gain, request.trial.budget_s) == (0.1, 7)
    assert request.torch_version == torch.__version__
    assert service.blobs.keys() == {request.graph.sha256}  # the graph: no batch, no weight


def test_the_request_carries_the_profile_that_was_given(service: Scripted, client: Client, graph: GraphModule) -> None:
    profile = Profile(nodes=(NodeProfile(node="bottom", seconds=1e-5, output_bytes=128),), steps=3)
    ask(client, graph, profile=profile)
    ask(client, graph)
    given, none = service.requests
    assert protocol.profile_from_proto(given.profile) == profile
    assert not none.HasField("profile")


@pytest.mark.slow
def test_a_profile_of_very_many_nodes_fits_into_the_request(
    service: Scripted, client: Client, graph: GraphModule
) -> None:
    nodes = tuple(NodeProfile(node=f"layer_{i}", seconds=i * 1e-6, output_bytes=128) for i in range(300_000))
    ask(client, graph, profile=Profile(nodes=nodes))
    [request] = service.requests
    assert request.ByteSize() < 4 << 20
    assert request.profile.nodes[-1].node == "layer_299999"
    assert request.profile.notes == ["the shortest 250,000 nodes were left out of the request"]


def test_a_repeated_request_is_the_same_request(service: Scripted, client: Client, graph: GraphModule) -> None:
    service.fail("Optimize", grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE)
    ask(client, graph)
    assert len({request.request_id for request in service.requests}) == 1
    assert len(service.requests) == 3


def garbage(_: GraphModule) -> bytes:
    return b"\xff" * 100


def truncated(graph: GraphModule) -> bytes:
    return as_bytes(graph)[:-20]


def hostile(graph: GraphModule) -> bytes:
    message = graph_pb2.Graph.FromString(as_bytes(graph))
    for target in message.targets:
        if target.HasField("function"):
            target.function = "os.system"
    return message.SerializeToString()


def of_another_model(_: GraphModule) -> bytes:
    return as_bytes(fxlib.capture(nn.Sequential(nn.Linear(3, 3))))


def redirected(graph: GraphModule) -> bytes:
    stolen = copy.deepcopy(graph)
    [call] = [node for node in stolen.graph.nodes if is_call(node)]
    call.args = ("elsewhere", *call.args[1:])
    return as_bytes(stolen)


def with_another_argument(graph: GraphModule) -> bytes:
    other = copy.deepcopy(graph)
    next(iter(other.graph.nodes)).target = "y"
    return as_bytes(other)


@pytest.mark.parametrize("answer", [garbage, truncated, hostile, of_another_model, redirected, with_another_argument])
def test_an_answer_that_is_not_a_valid_graph_of_this_model_is_not_used(
    service: Scripted, client: Client, graph: GraphModule, answer: Callable[[GraphModule], bytes]
) -> None:
    service.adopt(answer(graph))
    with pytest.warns(FxlibWarning, match="training goes on with the original module"):
        result = ask(client, graph)
    assert result.module is graph
    assert result.decision == "keep_original"


@pytest.mark.parametrize("low, high", [(0.01, 0.6), (-0.6, 0.6), (float("nan"), 0.6), (0.4, float("inf"))])
def test_a_graph_without_the_gain_asked_for_is_not_used(
    service: Scripted, client: Client, graph: GraphModule, low: float, high: float
) -> None:
    service.adopt(as_bytes(graph))
    service.job.result.gain.low, service.job.result.gain.high = low, high
    with pytest.warns(FxlibWarning, match=r"JobResult\.gain"):
        assert ask(client, graph).module is graph


@pytest.mark.slow
def test_a_service_that_is_away_costs_a_warning_and_the_patience(graph: GraphModule) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with (
            fxlib.connect(f"127.0.0.1:{unused.getsockname()[1]}", patience_s=0.3) as client,
            pytest.warns(FxlibWarning, match="not reached within 0.3 s"),
        ):
            result = ask(client, graph)
    assert result.module is graph
    assert result.reason is None


@pytest.mark.parametrize("address", ["", "nowhere", "localhost:notaport", "no-such-host.invalid:1"])
def test_an_address_that_leads_nowhere_costs_a_warning(
    graph: GraphModule, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXLIB_SERVICE", "127.0.0.1:9")  # which an empty one stands for
    with fxlib.connect(address, patience_s=0.2) as client, pytest.warns(FxlibWarning):
        assert ask(client, graph).module is graph


@pytest.mark.parametrize("method", ["FindMissing", "Write", "Optimize", "WatchJob", "GetJob"])
@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INTERNAL])
def test_a_refusal_at_any_point_costs_a_warning(
    service: Scripted, client: Client, graph: GraphModule, method: str, code: grpc.StatusCode
) -> None:
    service.fail(method, code)
    with pytest.warns(FxlibWarning, match=f"{method} fails as told"):
        assert ask(client, graph).module is graph


@pytest.mark.slow
def test_a_service_that_is_too_slow_costs_the_deadline(service: Scripted, client: Client, graph: GraphModule) -> None:
    service.events, service.job.state = [event(1, RUNNING, "qps")], RUNNING
    with pytest.warns(FxlibWarning, match="job job-1 is not done within"):
        result = ask(client, graph, deadline_s=5.0)
    assert result.module is graph
    assert result.job_id == "job-1"


def test_a_failed_job_costs_a_warning_with_its_reason(service: Scripted, client: Client, graph: GraphModule) -> None:
    service.job.ClearField("result")
    service.job.state = FAILED
    service.job.failure.code, service.job.failure.message = "WORKER_LOST", "three workers died"
    with pytest.warns(FxlibWarning, match=r"job job-1 failed: three workers died \(WORKER_LOST\)"):
        assert ask(client, graph).module is graph


def test_a_model_that_cannot_be_captured_trains_as_it_is(client: Client) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    model = Branching()
    with pytest.warns(FxlibWarning):
        assert ask(client, model).module is model


@pytest.mark.parametrize("installed", ["2.12.1+cpu", "2.14.0", "3.0.0a0+git"])
def test_with_a_torch_that_this_release_is_not_for_a_launcher_trains_with_its_original(
    service: Scripted, client: Client, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    model = Clicks()
    monkeypatch.setattr(torch, "__version__", installed)
    with pytest.warns(FxlibWarning, match=rf"not for torch {re.escape(installed)}.*Install torch>=2\.13,<2\.14"):
        result = ask(client, model)
    assert (result.decision, result.module) == ("keep_original", model)
    assert service.requests == []


def test_a_wrong_argument_is_the_caller_s_to_mend(client: Client, graph: GraphModule) -> None:
    with pytest.raises(TypeError, match="a Workload is wanted, not str"):
        client.optimize(graph, "mean")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a module or an exported program is wanted, not function"):
        client.optimize(lambda x: x, workload())  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="min_gain"):
        ask(client, graph, min_gain=-1)
    with pytest.raises(WorkloadError, match="deadline_s"):
        ask(client, graph, deadline_s=0)
    with pytest.raises(TypeError, match="speed"):
        ask(client, graph, speed=11)


def test_disabled_the_library_touches_no_network_and_says_nothing(
    service: Scripted, client: Client, graph: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXLIB_DISABLE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = ask(client, graph)
        assert client.submit(graph, workload()).result(60).module is graph
    assert result.module is graph
    assert result.explanation == "FXLIB_DISABLE is set"
    assert not service.calls


def test_the_launcher_hears_how_far_the_job_is(
    client: Client, graph: GraphModule, capsys: pytest.CaptureFixture[str]
) -> None:
    client.optimize(graph, workload())
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["fxlib: sending the graph", "fxlib: rewrite: event 1", "fxlib: done: event 2"]


def test_jobs_are_listed_page_by_page(service: Scripted, client: Client) -> None:
    assert [job.id for job in client.jobs(limit=401)] == [f"job-{index}" for index in range(401)]
    assert service.calls["ListJobs"] == 3
    assert len(client.jobs(limit=1000)) == 450


def test_real_batches_travel_as_blobs(service: Scripted, client: Client, graph: GraphModule) -> None:
    batches = [(torch.randn(4, 8), torch.randint(100, (4,))) for _ in range(3)]
    client.optimize(graph, Workload(batches=batches, servers=[Server(name="ps0")]), progress=False)
    refs = service.requests[0].workload.batches.batches
    assert [ref.sha256 in service.blobs for ref in refs] == [True] * 3
