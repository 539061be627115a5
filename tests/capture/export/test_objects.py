"""What an exported forward returns besides tensors: objects of the program's own classes, with all they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxlib
from fxlib import wire
from fxlib.errors import CaptureError, WireError
from fxlib.utils import pytree
from fxlib.v1 import graph_pb2

pytestmark = pytest.mark.slow


class Layer:
    """Keys of one layer, with what a cache notes beside them."""

    kind = "layer"

    def __init__(self, keys: Tensor) -> None:
        self.dtype, self.keys, self.factory = keys.dtype, keys, Layer
        self.length = int(keys.shape[0])


class Cache:
    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.sizes = [1, 2]
        self.name = "cache"

    def append(self, keys: Tensor) -> Tensor:
        self.layers.append(Layer(keys))
        return keys


@dataclass
class Answer:
    logits: Tensor
    cache: Cache | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 4)
        self.config = {"size": 4}

    def forward(self, x: Tensor, cache: Cache | None = None) -> Any:
        cache = Cache() if cache is None else cache
        for _ in range(2 if x.shape[0] > 1 else 1):
            x = cache.append(self.top(x))
        return Answer(x, cache, notes={"config": self.config, "rows": x.shape[0]})


def test_objects_in_a_result_are_the_programs_own_and_new_at_each_call() -> None:
    model, x = Decoder(), torch.randn(3, 4)
    captured = fxlib.capture(model, sample_inputs=[x])
    first, second, expected = captured(x), captured(x), model(x)
    assert type(first) is Answer
    assert type(first.cache) is Cache
    assert [type(each) for each in first.cache.layers] == [Layer, Layer]
    assert first.cache.layers[0].factory is Layer
    assert first.cache.layers[0].length == 3
    assert torch.equal(first.cache.layers[1].keys, expected.cache.layers[1].keys)
    assert first.cache is not second.cache
    assert first.cache.sizes is not second.cache.sizes
    assert vars(first.cache).keys() == vars(expected.cache).keys()
    assert fxlib.verify(model, captured, [x])


def test_objects_travel_as_their_parts_and_come_back_as_the_programs_own() -> None:
    model, x = Decoder(), torch.randn(3, 4)
    captured = fxlib.capture(model, sample_inputs=[x])
    graph = wire.parse(wire.serialize(wire.encode(captured).graph))
    back = wire.decode(graph, root=captured)(x)
    assert type(back.cache.layers[0]) is Layer
    alone = wire.decode(graph)(x)
    assert type(alone) is not Answer
    assert alone.cache.layers[0].length == 3
    assert alone.cache.name == "cache"
    tensors = [name for name, leaf in pytree.leaves(alone, "out") if isinstance(leaf, Tensor)]
    assert tensors == ["out['logits']", "out['cache']['layers'][0]['keys']", "out['cache']['layers'][1]['keys']"]


@pytest.mark.parametrize("key", ["parts", "plain", "order"])
def test_an_answer_that_describes_an_object_otherwise_is_refused(key: str) -> None:
    captured = fxlib.capture(Decoder(), sample_inputs=[torch.randn(3, 4)])
    graph = wire.encode(captured).graph
    (layer,) = {id(each): each for each in containers_in(graph.modules[-1].graph.pytree.outputs, "Layer")[:1]}.values()
    (entry,) = [each for each in layer.context.dict.items if each.key.text == key]
    layer.context.dict.items.remove(entry)
    with pytest.raises(WireError, match="is not described as in the client's own graphs"):
        wire.decode(graph, root=captured)


def containers_in(value: graph_pb2.Value, name: str) -> list[Any]:
    """The containers of a class in a structure, at any depth."""
    data: Any = getattr(value, str(value.WhichOneof("kind")))
    items = getattr(data, "items", ())
    found = [data] if value.WhichOneof("kind") == "container" and data.name.endswith(name) else []
    return found + [each for item in items for each in containers_in(getattr(item, "value", item), name)]


def test_an_object_that_the_forward_was_given_and_changes_is_refused() -> None:
    with pytest.raises(CaptureError, match="Cache"):
        fxlib.capture(Decoder(), sample_inputs=[torch.randn(3, 4), Cache()])


class Positions(nn.Module):
    """A relative position table made of numbers, as vision transformers make it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([0.5, 2.0, 3.0])[: x.shape[0]].unsqueeze(1)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Positions(), Positions())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) if x.shape[0] > 1 else x


def test_tensors_that_submodules_make_of_numbers_are_attributes_of_the_captured_module() -> None:
    model, x = Wrapper(), torch.randn(3, 4)
    captured = fxlib.capture(model, sample_inputs=[x], how="export")
    assert torch.equal(captured(x), model(x))
    assert torch.equal(wire.decode(wire.encode(captured).graph, root=captured)(x), model(x))
    assert fxlib.verify(model, captured, [x])
    assert not any("lifted" in name for _, each in model.named_modules() for name in vars(each))


class Sized:
    def __init__(self, keys: Tensor) -> None:
        rows = keys.shape[0]
        self.keys, self.half, self.is_long = keys, rows / 2, rows > 2


def _sized(x: Tensor) -> Sized:
    return Sized(x * 2 if x.shape[0] > 1 else x)


def test_numbers_of_an_object_are_computed_from_the_sizes_of_each_call() -> None:
    sizes = {"x": {0: torch.export.Dim("rows", min=3)}}
    captured = fxlib.capture(_sized, sample_inputs=[torch.ones(4)], how="export", dynamic_shapes=sizes)
    found = [captured(torch.ones(rows)) for rows in (5, 8)]
    assert [(each.half, each.is_long) for each in found] == [(2.5, True), (4.0, True)]
    assert sum(fxlib.usage(captured).graphs.values()) == 2


class Setting:
    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Setting()"


class Configured:
    def __init__(self, logits: Tensor, settings: list[Any]) -> None:
        self.logits, self.settings = logits, settings


class Configures(nn.Module):
    def __init__(self, make: Callable[[], list[Any]]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Configured:
        return Configured(x * 2 if x.shape[0] > 1 else x, self.make())


def test_an_object_has_the_attributes_of_its_own_capture() -> None:
    made: list[Callable[[], list[Any]]] = [
        lambda: [Setting(1)],
        lambda: [Setting(2)],
        lambda: [0.0, {"a": {1, 2}}],
        lambda: [-0.0, {"a": {1, 2}}],
    ]
    captures = [fxlib.capture(Configures(each), sample_inputs=[torch.ones(3)], how="export") for each in made]
    one, two, zero, negative = [each(torch.ones(3)).settings for each in captures]
    assert (one[0].value, two[0].value) == (1, 2)
    assert repr((zero[0], negative[0])) == "(0.0, -0.0)"
    again = fxlib.capture(Configures(made[3]), sample_inputs=[torch.ones(3)], how="export")
    assert wire.encode(again).graph.SerializeToString() == wire.encode(captures[3]).graph.SerializeToString()
