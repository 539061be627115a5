"""A launcher may train with the original while its job runs, and swap between two steps."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from typing_extensions import override

import fxlib
from fxlib import Client, Handle, wire
from fxlib.errors import FxlibWarning
from tests.client.models import Clicks, workload
from tests.client.scripted import Scripted


class Held(Scripted):
    """Answers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    @override
    def WatchJob(self, request: Any, context: Any) -> Iterator[Any]:
        self.go.wait(60)
        yield from super().WatchJob(request, context)


@pytest.fixture
def service() -> Held:
    return Held()


@pytest.fixture
def graph() -> GraphModule:
    return fxlib.capture(Clicks())


@pytest.fixture
def client(address: str, service: Held) -> Iterator[Client]:
    with fxlib.connect(address, patience_s=60) as opened:
        yield opened
    service.go.set()


def until_ready(handle: Handle) -> None:
    end = time.monotonic() + 200
    while not handle.ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_module_is_swapped_once_it_is_there(service: Held, client: Client, graph: GraphModule) -> None:
    service.adopt(wire.encode(graph).graph.SerializeToString())
    handle = client.submit(graph, workload())
    assert not handle.ready()
    assert handle.swap(graph) is graph
    with pytest.raises(TimeoutError):
        handle.result(0.01)

    service.go.set()
    until_ready(handle)

    swapped = handle.swap(graph)
    assert swapped is handle.result().module
    assert swapped is not graph
    assert handle.swap(swapped) is swapped
    assert dict(swapped.named_parameters())["top.weight"] is dict(graph.named_parameters())["top.weight"]


def test_a_plain_module_is_swapped_for_the_rewritten_one(service: Held, client: Client) -> None:
    model = Clicks()
    service.adopt(wire.encode(fxlib.capture(model)).graph.SerializeToString())
    service.go.set()
    handle = client.submit(model, workload())
    assert handle.result(60).decision == "adopt"
    assert handle.swap(model) is handle.result().module


def test_a_kept_original_stays(service: Held, client: Client, graph: GraphModule) -> None:
    service.go.set()
    handle = client.submit(graph, workload())
    until_ready(handle)
    assert handle.swap(graph) is graph


def test_another_module_keeps_its_place(service: Held, client: Client, graph: GraphModule) -> None:
    service.adopt(wire.encode(graph).graph.SerializeToString())
    service.go.set()
    handle = client.submit(graph, workload())
    until_ready(handle)
    wrapped = nn.Sequential(graph)
    with pytest.warns(FxlibWarning, match="another module"):
        assert handle.swap(wrapped) is wrapped
    assert handle.swap(wrapped) is wrapped  # said once


@pytest.mark.slow
def test_what_went_wrong_is_said_once_and_in_the_launcher_s_thread(client: Client, graph: GraphModule) -> None:
    handle = client.submit(graph, workload(), deadline_s=0.3)
    until_ready(handle)
    with pytest.warns(FxlibWarning, match="training goes on with the original module"):
        assert handle.swap(graph) is graph
    assert handle.swap(graph) is graph


def test_closing_the_client_ends_what_it_waits_for(client: Client, graph: GraphModule) -> None:
    handle = client.submit(graph, workload())
    client.close()
    with pytest.warns(FxlibWarning):
        assert handle.result(60).module is graph


def test_batches_may_change_after_submitting(service: Held, client: Client, graph: GraphModule) -> None:
    batch = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    handle = client.submit(graph, fxlib.Workload(batches=[batch], servers=[fxlib.Server(name="ps0")]))
    batch[0].zero_()
    service.go.set()
    handle.result(60)
    [ref] = service.requests[0].workload.batches.batches
    assert fxlib.protocol.batch_from_bytes(service.blobs[ref.sha256]).inputs[0].all()
