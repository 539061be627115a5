"""Graphs that give names to what could be called, or cost more than they weigh: each is refused, and nothing runs.

So are guards without bounds.
"""

from __future__ import annotations

import math
import time
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import fxlib
from fxlib import wire
from fxlib.errors import CaptureError, LimitError, WireError
from fxlib.runtime import functions
from fxlib.runtime.ops import remote_call
from fxlib.v1 import graph_pb2 as pb
from tests.wire.spoiled import refusal
from tests.wire.support import call_of, graph_of, round_trip


def message(build: Callable[[Graph, Any], Any], root: nn.Module | None = None) -> pb.Graph:
    return wire.encode(graph_of(build, root)).graph


def holding(**attributes: Any) -> Any:
    root: Any = nn.Module()
    for name, value in attributes.items():
        setattr(root, name, value)
    return root


def test_a_function_is_no_attribute_of_a_graph() -> None:
    graph = message(lambda graph, x: graph.call_function(torch.add, (x, graph.get_attr("get"))), holding(get=1))
    graph.modules[0].attributes[0].value.function = "builtins.getattr"
    assert "function 'builtins.getattr' may not stand here" in str(refusal(graph))


@pytest.mark.parametrize("name", ["builtins.getattr", "torch.save", "torch.nn.functional.linear"])
def test_a_module_of_torch_s_calls_activations_alone(name: str) -> None:
    layer = nn.TransformerEncoderLayer(4, 1, 4)
    graph = message(lambda graph, x: graph.call_module("layer", (x,)), holding(layer=layer))
    layer_message = next(module for module in graph.modules if module.leaf == "TransformerEncoderLayer")
    next(each for each in layer_message.attributes if each.name == "activation").value.function = name
    assert "may not stand here" in str(refusal(graph))


@pytest.mark.parametrize("name", ["distance_function", "get", "_compiled_call_impl"])
def test_no_other_attribute_of_a_module_of_torch_s_is_a_function(name: str) -> None:
    graph = message(lambda graph, x: graph.call_module("part", (x,)), holding(part=nn.ReLU()))
    graph.modules[0].attributes.add(name=name).value.function = "builtins.getattr"
    assert isinstance(refusal(graph), WireError)


@pytest.mark.parametrize("part", [nn.Identity(), graph_of(lambda graph, x: x)], ids=["leaf", "graph"])
def test_a_module_is_no_value(part: nn.Module) -> None:
    graph = message(lambda graph, x: graph.call_method("get", (graph.get_attr("part"), x)), holding(part=part))
    assert "a module or function, which may not be used here" in str(refusal(graph))


@pytest.mark.parametrize("place", ["tuple", "output", "to"])
def test_a_function_that_is_looked_up_may_only_be_sent(place: str) -> None:
    def build(graph: Graph, x: Any) -> Any:
        found = graph.call_function(functions.resolve, ("builtins:len",))
        if place == "output":
            return found
        return graph.call_function(remote_call, (found if place == "to" else "ps", "a:b", (found,), {}, None))

    graph = message(build)
    if place == "tuple":
        wire.validate(graph)
        graph.targets[2].function = "fxlib.runtime.issue_call"
        wire.validate(graph)
        graph.targets[2].function = "builtins.max"
    assert "a module or function, which may not be used here" in str(refusal(graph))


@pytest.mark.parametrize("name", ["to_folder", "resize_", "tolist", "register_backward_hook"])
def test_a_method_is_no_attribute(name: str) -> None:
    decoded = wire.decode(message(lambda graph, x: graph.call_function(getattr, (x, name))))
    with pytest.raises((WireError, AttributeError), match=r"can be called|has no attribute"):
        decoded(torch.ones(1))


def test_a_field_holds_nothing_that_can_be_called() -> None:
    label = wire.encode_value(None)
    label.named_tuple.name, label.named_tuple.fields[:] = "a.T", ["get"]
    label.named_tuple.items.add().operator = "aten::relu"
    with pytest.raises(WireError, match="'get' is a OpOverloadPacket, which can be called"):
        wire.decode_value(label)


@pytest.mark.parametrize("field", ["owner", "is_owner", "to_here", "wait"])
def test_a_field_is_no_method_that_the_runtime_calls(field: str) -> None:
    value = pb.Value()
    value.named_tuple.name, value.named_tuple.fields[:] = "a.T", [field]
    value.named_tuple.items.add().integer = 1
    with pytest.raises(WireError, match="method of RRefs"):
        wire.decode_value(value)


@pytest.mark.parametrize("method", [".numpy", ".storage", ".untyped_storage", "._typed_storage", ".register_hook"])
def test_through_an_rref_no_method_of_a_tensor_reaches_files_or_memory(method: str) -> None:
    graph = message(lambda graph, x: graph.call_function(remote_call, (x, method, (), {}, None)))
    assert "may not be called through an RRef" in str(refusal(graph))


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.session = {"get": print}
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def delete_everything(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("name", ["delete_everything", "session"])
def test_of_the_client_s_model_a_graph_gets_only_what_the_original_reads(name: str) -> None:
    captured = fxlib.capture(Trainer())
    graph = message(lambda graph, x: graph.get_attr("scale"), holding(scale=1))
    graph.modules[0].attributes[0].name = name
    next(target for target in graph.targets if target.path == "scale").path = name
    with pytest.raises(WireError, match="reads it nowhere"):
        wire.decode(graph, root=captured)


def test_data_attributes_and_fields_of_results_come_back_and_are_read() -> None:
    def build(graph: Graph, x: Any) -> Any:
        found = graph.call_function(torch.max, (x, 0))
        return [graph.call_function(getattr, (x, each)) for each in ("shape", "dtype", "device", "T")] + [
            graph.call_function(getattr, (found, "values")),
            graph.call_function(getattr, (found, "indices")),
            graph.call_function(getattr, (found, "absent", None)),
        ]

    module, x = graph_of(build), torch.randn(2, 3)
    decoded = round_trip(module)
    for mine, theirs in zip(decoded(x), module(x), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    assert wire.encode(decoded).graph == wire.encode(module).graph


@pytest.mark.slow
def test_many_slots_and_many_nodes_are_checked_in_time_that_grows_with_their_sum() -> None:
    graph = message(lambda graph, x: graph.get_attr("a0"), holding(a0=1))
    body, nodes = graph.modules[0], graph.modules[0].graph.nodes
    last = nodes.pop()
    del body.attributes[:]
    for index in range(20_000):
        body.buffers.add(name=f"a{index}")
        graph.targets.add(path=f"a{index}")
        nodes.add(op=pb.OPCODE_GET_ATTR, name=f"n{index}", target=len(graph.targets) - 1)
    nodes.append(last)
    start = time.thread_time()
    wire.validate(graph)
    assert time.thread_time() - start < 5


def test_a_path_of_a_megabyte_is_refused() -> None:
    graph = message(lambda graph, x: graph.get_attr("a"), holding(a=1))
    next(target for target in graph.targets if target.path == "a").path = "a." * 500_000
    assert "too long" in str(refusal(graph))


@pytest.mark.slow
def test_calls_that_double_at_each_level_are_refused() -> None:
    module: GraphModule = graph_of(lambda graph, x: x)
    for _ in range(25):
        module = graph_of(
            lambda graph, x: graph.call_module("c", (graph.call_module("c", (x,)),)), nn.ModuleDict({"c": module})
        )
    error = refusal(wire.encode(module).graph)
    assert isinstance(error, LimitError)
    assert "Limits.steps" in str(error)


@pytest.mark.parametrize("name", ["torch", "math_floor", "inf"])
def test_an_argument_hides_nothing_that_generated_code_calls(name: str) -> None:
    graph = message(lambda graph, x: (graph.call_function(torch.relu, (x,)), graph.call_function(math.floor, (2.5,))))
    graph.targets[0].path = name
    with pytest.raises(WireError, match="hides what the generated code calls"):
        wire.decode(graph)


@pytest.mark.parametrize("device", ["hpu", "privateuseone", "cuda:99"])
def test_a_tensor_on_a_device_that_is_not_there_is_refused(device: str) -> None:
    graph = message(lambda graph, x: graph.call_module("part", (x,)), holding(part=nn.Linear(2, 2)))
    graph.storages[0].device = device
    with pytest.raises(WireError, match=f"device {device}"):
        wire.decode(graph)


def test_a_recurrent_module_without_weights_is_refused() -> None:
    graph = message(lambda graph, x: graph.call_module("part", (x,)), holding(part=nn.LSTM(2, 2)))
    for attribute in graph.modules[0].attributes:
        if attribute.name in ("_all_weights", "_flat_weights_names"):
            del attribute.value.list.items[:]
    with pytest.raises(WireError, match="does not fit its weights"):
        wire.decode(graph)


def test_an_annotation_has_so_many_parts_at_most() -> None:
    graph = message(lambda graph, x: graph.call_function(torch.relu, (x,)))
    hint = graph.modules[-1].graph.nodes[1].type
    hint.name = "|"
    for _ in range(16):
        hint.arguments.add(name="|").arguments.extend(pb.TypeHint(name=name) for name in ("int", "str") * 8)
    assert "an annotation has 273 parts, and may have 256" in str(refusal(graph))
    module = graph_of(lambda graph, x: graph.call_function(torch.relu, (x,)))
    call_of(module).type = typing.cast(Any, tuple)[(int,) * 300]
    assert call_of(round_trip(module)).type is None


def test_getattr_of_a_name_that_no_tensor_has_is_guarded() -> None:
    decoded = wire.decode(message(lambda graph, x: graph.call_function(getattr, (x, "logits"))))
    assert call_of(decoded).target is not getattr


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1) if x.shape[0] % 2 == 0 else x


def sent() -> pb.Graph:
    captured = fxlib.capture(Halves(), sample_inputs=[torch.ones(8)], dynamic_shapes=({0: torch.export.Dim.AUTO},))
    return wire.encode(captured).graph


def condition_of(graph: pb.Graph) -> pb.Values:
    graph.modules[-1].graph.pytree.guards.ClearField("conditions")
    condition: pb.Values = graph.modules[-1].graph.pytree.guards.conditions.add().tuple
    return condition


@pytest.mark.slow
def test_an_expression_has_so_many_parts_at_most() -> None:
    graph = sent()
    condition = condition_of(graph)
    condition.items.add().text = "mul"
    for _ in range(300):
        condition.items.add().integer = (1 << 63) - 1
    with pytest.raises(WireError, match="an expression has 301 parts, and may have 256"):
        wire.decode(graph)


@pytest.mark.slow
def test_an_expression_that_divides_by_zero_holds_for_no_input() -> None:
    graph = sent()
    condition = condition_of(graph)
    condition.items.add().text = "mod"
    condition.items.add().integer = 1
    condition.items.add().integer = 0
    with pytest.raises(CaptureError, match="a size is 0 that others were divided by"):
        wire.decode(graph)(torch.ones(8))
