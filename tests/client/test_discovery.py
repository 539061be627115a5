"""Calls that no graph fits run the original, and are asked about in the background, once of each kind."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import fxlib
from fxlib import Client, Workload, wire
from fxlib.capture.capture_variant import capture_variant, mode_of
from fxlib.errors import WorkloadError
from fxlib.runtime import CapturedModule
from fxlib.spec.workload import Variant
from tests.client.scripted import Scripted

X, MASK = torch.randn(4, 8), torch.ones(4, 8)
pytestmark = pytest.mark.filterwarnings("ignore:the original forward of:fxlib.errors.FxlibWarning")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.dropout(self.linear(x))
        return x if mask is None else x * mask


def workload() -> Workload:
    return Workload.describe([(X, MASK)])


def evaluate(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    module.eval()
    with torch.no_grad():
        output: torch.Tensor = module(*args)
    module.train()
    return output


def wait_for(handle: fxlib.Handle, module: nn.Module, count: int) -> nn.Module:
    limit = time.monotonic() + 60
    while len(handle.discovered) < count:
        assert time.monotonic() < limit
        module = handle.swap(module)
        time.sleep(0.01)
    return module


def asked_graph(service: Scripted, index: int) -> CapturedModule:
    return wire.decode(wire.parse(service.blobs[service.requests[index].graph.sha256]))


def test_a_mode_first_met_in_training_is_asked_about_and_its_graph_is_added(service: Scripted, client: Client) -> None:
    module = fxlib.capture(Model())
    handle = client.submit(module, workload(), discover=True)
    handle.result(60)
    variant = Variant(name="e", training=False, grad=False)
    evaluation = capture_variant(module, variant, workload())
    with mode_of(module, variant):
        service.adopt(wire.encode(evaluation).graph.SerializeToString(deterministic=True))
    evaluate(module, X, MASK)
    used = wait_for(handle, module, 1)
    assert handle.discovered["met 1"].decision == "adopt"
    assert not asked_graph(service, 1).training
    assert service.requests[1].workload.description.inputs[0].shape == [4, 8]
    original = module._fxlib.original
    assert original is not None
    assert torch.equal(evaluate(used, X, MASK), evaluate(original, X, MASK))
    assert fxlib.usage(used).graphs == {"main": 0, "met 1": 1}
    assert all(each.training for each in original.modules())


def test_each_kind_of_call_is_asked_about_once(service: Scripted, client: Client) -> None:
    module = fxlib.capture(Model())
    handle = client.submit(module, workload(), discover=True)
    for _ in range(3):
        evaluate(module, X, MASK)
        module(X)  # no mask
        handle.swap(module)
    wait_for(handle, module, 2)
    for _ in range(3):
        evaluate(module, X, MASK)
        handle.swap(module)
    asked = [each.name for each in service.requests]  # the job itself is submitted in the background
    assert sorted(asked) == ["Model", "Model, met 1", "Model, met 2"]
    assert asked_graph(service, 2).training
    assert [each.decision for each in handle.discovered.values()] == ["keep_original", "keep_original"]


def test_what_cannot_be_described_is_not_asked_about(service: Scripted, client: Client) -> None:
    class Scaled(Model):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, mask) * scale

    module = fxlib.capture(Scaled(), concrete_args={"scale": 1.0})
    handle = client.submit(module, workload(), discover=True)
    handle.result(60)
    module(X, MASK, 2.0)
    assert handle.swap(module) is module
    assert len(service.requests) == 1
    assert not handle.discovered


def test_nothing_is_asked_unless_the_launcher_agreed(service: Scripted, client: Client) -> None:
    module = fxlib.capture(Model())
    handle = client.submit(module, workload())
    handle.result(60)
    evaluate(module, X, MASK)
    assert handle.swap(module) is module
    assert len(service.requests) == 1
    assert fxlib.usage(module).original


def test_ranks_that_ask_together_discover_nothing(client: Client) -> None:
    with pytest.raises(WorkloadError, match="discover"):
        client.submit(fxlib.capture(Model()), workload(), discover=True, group="world")


def test_a_service_that_is_gone_leaves_the_original(service: Scripted, client: Client) -> None:
    module = fxlib.capture(Model())
    handle = client.submit(module, workload(), discover=True, deadline_s=30)
    handle.result(60)
    client.close()
    evaluate(module, X, MASK)
    assert wait_for(handle, module, 1) is module
    assert handle.discovered["met 1"].reason is None
