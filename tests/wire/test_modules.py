"""Modules come back without their constructors being called, and do what they did."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn.utils import parametrizations

import fxlib
from fxlib import wire
from fxlib.errors import OpaqueError, WireError
from fxlib.wire import modules
from tests.wire.support import graph_of, round_trip
from tests.wire.zoo import CASES


def calling_module(module: nn.Module, inputs: int = 1) -> Any:
    graph = Graph()
    names = [graph.placeholder(f"x{index}") for index in range(inputs)]
    graph.output(graph.call_module("part", tuple(names)))
    return GraphModule({"part": module}, graph)


def flat(value: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(value)


@pytest.mark.parametrize("name", CASES)
def test_a_torch_nn_module_is_rebuilt_and_gives_the_same_bits(name: str) -> None:
    make, inputs = CASES[name]
    module = calling_module(make(), len(inputs))
    decoded = round_trip(module)
    assert type(decoded.part) is type(module.part)
    for training in (False, True):
        module.train(training)
        decoded.train(training)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            expected = flat(module(*copy.deepcopy(inputs)))
            torch.manual_seed(0)
            found = flat(decoded(*copy.deepcopy(inputs)))
        assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)
        states = zip(module.state_dict().items(), decoded.state_dict().items(), strict=True)
        assert all(key == again and torch.equal(a, b) for (key, a), (again, b) in states)


def test_at_least_the_130_classes_that_can_be_rebuilt_are_on_the_list() -> None:
    assert len(CASES) >= 120
    assert len(modules.classes()) >= 130
    assert {type(make()).__name__ for make, _ in CASES.values()} <= modules.classes().keys()


def test_flags_none_slots_and_transient_buffers_come_back() -> None:
    module = nn.BatchNorm1d(3, affine=False)
    module.register_buffer("noise", torch.ones(3), persistent=False)
    module.register_buffer("absent", None)
    part = nn.Linear(3, 3, bias=False)
    part.weight.requires_grad_(False)
    decoded = round_trip(calling_module(nn.Sequential(part, module).eval()))
    assert (decoded.part[1].weight, decoded.part[1].absent, decoded.part[0].bias) == (None, None, None)
    assert not decoded.part[0].weight.requires_grad
    assert not decoded.part.training
    assert "part.1.noise" not in decoded.state_dict()
    assert torch.equal(decoded.part[1].noise, torch.ones(3))


def test_tied_parameters_and_modules_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5)
            self.head.weight = self.table.weight
            self.again = self.head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.table(x)) + self.head(self.table(x))

    decoded = round_trip(fxlib.capture(Tied()))
    assert decoded.head.weight is decoded.table.weight
    assert decoded.again is decoded.head
    assert len(list(decoded.parameters())) == 2


def test_tensors_that_share_a_storage_keep_sharing_it() -> None:
    root: Any = nn.Module()
    whole = torch.arange(12.0)
    root.register_buffer("whole", whole)
    root.register_buffer("part", whole[4:8].view(2, 2).t())

    def build(graph: Graph, x: Any) -> Any:
        return graph.call_function(torch.add, (graph.get_attr("whole"), graph.get_attr("part")))

    decoded = round_trip(graph_of(build, root))
    decoded.whole[5] = 99
    assert decoded.part[1, 0] == 99
    assert decoded.part.stride() == (1, 2)


def test_a_channels_last_weight_keeps_its_strides() -> None:
    module: Any = nn.Conv2d(4, 4, 3)
    module.to(memory_format=torch.channels_last)
    decoded = round_trip(calling_module(module))
    assert decoded.part.weight.stride() == module.weight.stride()


def test_of_a_storage_only_what_the_module_views_travels() -> None:
    root: Any = nn.Module()
    root.register_buffer("corner", torch.zeros(1000, 1000)[:2, :2])
    encoded = wire.encode(graph_of(lambda graph, x: graph.get_attr("corner"), root), weights=True)
    assert encoded.graph.storages[0].bytes < 5000


def test_a_nested_graph_module_comes_back_as_one() -> None:
    inner = graph_of(lambda graph, x: graph.call_function(torch.relu, (x,)))
    decoded = round_trip(calling_module(inner))
    assert isinstance(decoded.part, GraphModule)
    assert torch.equal(decoded(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


def hooked() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_forward_hook(lambda *_: None)
    return module


def tagged() -> nn.Module:
    module: Any = nn.Linear(3, 3)
    module.tag = object()
    return module


@pytest.mark.parametrize(
    "make", [Own, hooked, tagged, lambda: parametrizations.weight_norm(nn.Linear(3, 3)), lambda: nn.LazyLinear(3)]
)
def test_a_module_that_is_more_than_its_attributes_is_opaque_and_bound_back(make: Any) -> None:
    module = calling_module(make())
    encoded = wire.encode(module)
    decoded = wire.decode(encoded.graph)
    assert wire.encode(decoded).graph == encoded.graph
    with pytest.raises(OpaqueError, match="known only to the process"):
        decoded(torch.ones(2, 3))
    bound = wire.decode(wire.encode(decoded).graph, root=module)
    assert bound.part is module.part


def test_a_module_that_holds_itself_is_refused() -> None:
    part = nn.Sequential(nn.ReLU())
    module = calling_module(part)
    part._modules["loop"] = part
    with pytest.raises(WireError, match=r"module 'part.loop': the module holds itself"):
        wire.encode(module)


def test_attributes_that_nodes_read_travel_as_values_tensors_or_opaque_slots() -> None:
    root: Any = nn.Module()
    root.scale, root.constant, root.handle = math.pi, torch.arange(3), object()

    def build(graph: Graph, x: Any) -> Any:
        return tuple(graph.get_attr(name) for name in ("scale", "constant", "handle"))

    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    module = GraphModule(root, graph)
    encoded = wire.encode(module, weights=True)
    decoded = wire.decode(encoded.graph, blobs=encoded.blobs)
    assert decoded.scale == math.pi
    assert torch.equal(decoded.constant, root.constant)
    assert isinstance(decoded.handle, wire.OpaqueAttribute)
    assert wire.decode(encoded.graph, root=module)(None)[2] is root.handle


@pytest.mark.parametrize("name", ["user+item", "a b", "cat/age:1|2", "x=y@z", "100%", "~a&b", "-1"])
def test_a_child_may_have_any_name_that_is_harmless_within_quotes(name: str) -> None:
    root = nn.Module()
    root.add_module(name, nn.Linear(4, 4))
    module = graph_of(lambda graph, x: graph.call_module(name, (x,)), root)
    value = torch.randn(2, 4)
    assert torch.equal(round_trip(module)(value), module(value))
