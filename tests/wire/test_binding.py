"""The client's way back: the graph that returns runs on the client's own objects."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace, wrap
from torch.nn import functional as F

import fxlib
from fxlib import wire
from fxlib.errors import OpaqueError, WireError
from tests.wire.support import call_of, calling, graph_of


@wrap
def helper(x: Any) -> Any:
    return x + 40


def other_helper(x: Any) -> Any:
    return x + 50


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.tower(x) * self.scale)


def there_and_back(module: GraphModule, root: nn.Module) -> GraphModule:
    """As between launcher and worker: encoded, decoded, encoded again by the worker, decoded by the launcher."""
    worker = wire.decode(wire.encode(module).graph)
    return wire.decode(wire.encode(worker).graph, root=root)


def test_parameters_submodules_and_keys_are_the_client_s_own() -> None:
    module = fxlib.capture(Model())
    bound = there_and_back(module, module)
    assert bound.state_dict().keys() == module.state_dict().keys()
    assert all(a is b for a, b in zip(bound.parameters(), module.parameters(), strict=True))
    assert bound.tower is module.tower
    assert bound.scale is module.scale
    assert torch.equal(bound(torch.ones(2, 3)), module(torch.ones(2, 3)))


def test_the_user_s_own_model_can_be_the_root() -> None:
    model = Model()
    graph = wire.encode(fxlib.capture(calling_nothing_own(model))).graph
    bound = wire.decode(graph, root=model)
    assert bound.tower[0].weight is model.tower[0].weight


def calling_nothing_own(model: Model) -> nn.Module:
    class Bare(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tower(x) * self.scale

    bare = Bare()
    bare.load_state_dict(model.state_dict())
    return bare


def test_an_unknown_callable_is_bound_back_by_the_name_of_its_slot() -> None:
    module = symbolic_trace(Model())
    worker = wire.decode(wire.encode(module).graph)
    with pytest.raises(OpaqueError, match="helper"):
        worker(torch.ones(2, 3))
    bound = there_and_back(module, module)
    assert [node.target for node in bound.graph.nodes if node.op == "call_function"][-1] is helper
    named = wire.decode(wire.encode(module).graph, functions={f"{__name__}.helper": other_helper})
    assert [node.target for node in named.graph.nodes if node.op == "call_function"][-1] is other_helper


def test_two_callables_of_one_name_keep_apart() -> None:
    first, second = (lambda x: x + 1), (lambda x: x * 2)

    def build(graph: Graph, x: Any) -> Any:
        return graph.call_function(second, (graph.call_function(first, (x,)),))

    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    first.__name__ = second.__name__ = "same"
    module = GraphModule(nn.Module(), graph)
    assert there_and_back(module, module)(3) == 8


def test_an_unknown_method_is_bound_back_as_a_method() -> None:
    class Thing:
        def special(self, x: int) -> int:
            return x + 1

    module = graph_of(lambda graph, x: graph.call_method("special", (x, 1)))
    worker = wire.decode(wire.encode(module).graph)
    with pytest.raises(OpaqueError, match="special"):
        worker(Thing())
    bound = there_and_back(module, module)
    assert call_of(bound).op == "call_method"
    assert bound(Thing()) == 2


def test_a_decoded_module_can_itself_be_the_root() -> None:
    def build(graph: Graph, x: Any) -> Any:
        return graph.call_method("special", (graph.call_function(other_helper, (x,)), graph.get_attr("handle")))

    root: Any = nn.Module()
    root.handle = object()
    worker = wire.decode(wire.encode(graph_of(build, root)).graph)
    encoded = wire.encode(worker)
    candidate = wire.decode(encoded.graph, root=worker)
    assert wire.encode(candidate).graph == encoded.graph
    assert candidate.handle is worker.handle


def test_a_part_called_label_is_no_trouble() -> None:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.label = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.label(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Labelled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    module = fxlib.capture(Outer())
    assert there_and_back(module, module).inner is module.inner
    decoded = wire.decode(wire.encode(module).graph)
    assert decoded(torch.ones(2, 3)).shape == (2, 3)
    assert wire.OpaqueModule("a.B").label == "a.B"


def test_an_opaque_slot_that_the_root_does_not_fill_is_refused() -> None:
    graph = wire.encode(graph_of(lambda graph, x: graph.call_function(helper, (x,)))).graph
    with pytest.raises(WireError, match="calls no function"):
        wire.decode(graph, root=calling(1))


def test_a_tensor_that_neither_root_nor_blobs_supply_is_refused() -> None:
    graph = wire.encode(symbolic_trace(Model())).graph
    root = symbolic_trace(Model())
    root.tower = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    with pytest.raises(WireError, match=r"tensor 'tower.0.weight'"):
        wire.decode(graph, root=root)


def test_a_module_that_a_pass_added_is_built_beside_the_client_s_own() -> None:
    module = fxlib.capture(Model())
    worker = wire.decode(wire.encode(module, weights=True).graph, blobs=wire.encode(module, weights=True).blobs)
    worker.add_module("added", nn.Linear(4, 4))
    with worker.graph.inserting_before(worker.graph.output_node()):
        worker.graph.call_module("added", (next(iter(worker.graph.nodes)),))
    worker.recompile()
    answer = wire.encode(worker, weights=True)
    bound = wire.decode(answer.graph, blobs=answer.blobs, root=module)
    assert torch.equal(bound.added.weight, worker.added.weight)
    assert bound.tower is module.tower
    assert not hasattr(module, "added")


def test_a_module_of_another_class_at_the_same_path_is_not_used() -> None:
    module = symbolic_trace(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))
    graph = wire.encode(module).graph
    root = symbolic_trace(nn.Sequential(nn.Sigmoid(), nn.Linear(3, 3)))
    bound = wire.decode(graph, root=root)
    assert type(getattr(bound, "0")) is nn.ReLU
    assert getattr(bound, "1") is getattr(root, "1")


def test_the_root_itself_is_left_as_it_was() -> None:
    module = fxlib.capture(Model())
    code, keys = module.code, list(module.state_dict())
    there_and_back(module, module)
    assert (module.code, list(module.state_dict())) == (code, keys)


def test_a_file_holds_for_the_training_flags_that_it_was_captured_with(tmp_path: Path) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.inner(x), 0.5, self.training)

    model, x = Dropped().eval(), torch.randn(8, 4)
    fxlib.save(fxlib.capture(model), tmp_path / "model.fxg")
    model.train()
    loaded = fxlib.load(tmp_path / "model.fxg", root=model)
    assert loaded.training
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    assert torch.equal(loaded(x), expected)
    model.eval()
    loaded.eval()
    assert not loaded._fxlib.broken(grad_enabled=True)
    assert torch.equal(loaded(x), model(x))
    model.inner.train()
    assert loaded._fxlib.broken(grad_enabled=True)


def test_one_module_of_a_graph_is_never_put_in_the_place_of_two() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) - self.b(x)

    model = fxlib.capture(Two())
    graph = wire.encode(model).graph
    slots = {slot.name: slot for slot in graph.modules[-1].children}
    slots["b"].module = slots["a"].module
    with pytest.raises(WireError, match="has one module where the module given as root has two"):
        wire.decode(graph, root=model)


def test_one_tensor_of_a_graph_is_never_put_in_the_place_of_two() -> None:
    class Tied(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            if tied:
                self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) - self.b(x)

    graph = wire.encode(fxlib.capture(Tied(tied=True))).graph
    with pytest.raises(WireError, match=r"'b.weight': the graph has one tensor where the module given as root has two"):
        wire.decode(graph, root=Tied(tied=False))
    same = Tied(tied=True)
    assert wire.decode(graph, root=same).b.weight is same.a.weight
