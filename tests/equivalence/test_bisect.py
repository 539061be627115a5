"""The first pass that breaks a bound is found, and inside it the first change."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from typing_extensions import override

import fxlib
from fxlib.errors import PassError
from fxlib.passes import REGISTRY, DeadCode
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Recipe
from tests.equivalence.test_verify import Model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        z = self.second(y).sigmoid()
        return z + y


X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    known = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(known)


def replaced(method: str, function: object, *more: object) -> GraphPass:
    """A pass that puts a function in the place of a method, whatever it computes."""

    @register_pass(f"replace_{method}", preserves="lossy")
    class Replace(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            found = [node for node in module.graph.nodes if node.op == "call_method" and node.target == method]
            for node in found:
                with module.graph.inserting_before(node):
                    new = module.graph.call_function(function, (node.args[0], *more))  # type: ignore[arg-type]
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
                module.graph.erase_node(node)
            return PassResult(module, changes=len(found))

    return Replace()


def recipe(*passes: GraphPass) -> Recipe:
    return Recipe(name="mine", passes=passes)


def test_nothing_is_found_where_the_bound_holds() -> None:
    assert fxlib.bisect(fxlib.capture(Net()), recipe(DeadCode(), replaced("relu", torch.relu)), [X]) is None


def test_pass_and_change_are_named_with_the_line_of_the_model() -> None:
    model = Net()
    wrong = replaced("sigmoid", torch.tanh)
    found = fxlib.bisect(fxlib.capture(model), recipe(DeadCode(), replaced("relu", torch.relu), wrong), [X])
    assert found is not None
    assert (found.name, found.place) == ("replace_sigmoid", 3)
    assert found.change is not None
    assert found.change.before == ("sigmoid = second.sigmoid()", "add = sigmoid + relu_1")
    assert found.change.after == ("tanh = torch.tanh(second)", "add = tanh + relu_1")
    assert "test_bisect.py:" in found.change.where
    assert "-    sigmoid = second.sigmoid()" in found.diff
    assert "replace_sigmoid" in str(found)
    assert "+ tanh = torch.tanh(second)" in str(found)


def test_what_an_earlier_pass_did_is_not_blamed() -> None:
    model = fxlib.capture(Net())
    chosen = recipe(replaced("relu", torch.nn.functional.leaky_relu, 1e-6), replaced("sigmoid", torch.tanh))
    found = fxlib.bisect(model, chosen, [X], rtol=1e-3, atol=1e-3)
    assert found is not None
    assert found.name == "replace_sigmoid"


def test_the_first_of_several_changes_is_found() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.relu()
            z = (y - 1).relu()
            return z * y

    # Where x is positive, the first change makes no difference.
    found = fxlib.bisect(fxlib.capture(Twice()), recipe(replaced("relu", torch.abs)), [torch.full((2,), 0.5)])
    assert found is not None
    assert found.change is not None
    assert "abs_2 = torch.abs(sub)" in found.change.after


def test_a_write_over_what_is_still_read_is_found_behind_its_victim() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = torch.sigmoid(y)
            return z.exp() + y.tan()

    @register_pass("write_in_place", preserves="bitwise")
    class WriteInPlace(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            (node,) = (node for node in module.graph.nodes if node.target is torch.sigmoid)
            node.target = torch.sigmoid_
            return PassResult(module, changes=1)

    found = fxlib.bisect(fxlib.capture(Reads()), recipe(WriteInPlace()), [X])
    assert found is not None
    assert found.change is not None
    assert found.change.node == "tan"
    assert "sigmoid = torch.sigmoid_(mul)" in found.change.after
    assert "sigmoid = torch.sigmoid(mul)" in found.change.before


def test_a_difference_in_gradients_alone_is_found() -> None:
    detached = replaced("sigmoid", lambda_free_sigmoid)
    found = fxlib.bisect(fxlib.capture(Net()), recipe(detached), [X])
    assert found is not None
    assert found.change is not None
    assert found.change.node == "second"
    assert found.change.how.startswith("its gradient: ")
    assert fxlib.bisect(fxlib.capture(Net()), recipe(detached), [X], grad=False) is None


def lambda_free_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.detach().sigmoid() + x * 0


def test_a_pass_that_makes_a_graph_that_fails_is_found_at_the_node() -> None:
    found = fxlib.bisect(fxlib.capture(Net()), recipe(replaced("sigmoid", operator.matmul, 3)), [X])
    assert found is not None
    assert found.change is not None
    assert found.change.node == "matmul"
    assert "TypeError" in found.change.how


def test_a_number_that_differs_is_found_at_its_node() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x * 2, x.numel()

    found = fxlib.bisect(fxlib.capture(Counts()), recipe(replaced("numel", torch.Tensor.dim)), [X])
    assert found is not None
    assert found.change is not None
    assert found.change.how == "8 and 2"


def test_a_result_that_is_laid_out_otherwise_is_found_at_its_node() -> None:
    class Transposes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sigmoid().t().clone()

    found = fxlib.bisect(fxlib.capture(Transposes()), recipe(replaced("clone", row_by_row)), [X])
    assert found is not None
    assert found.change is not None
    assert "strides (1, 4) and Tensor, strides (2, 1)" in found.change.how


def row_by_row(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def test_parameters_are_left_without_hooks() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).sigmoid()

    model = Scales()
    assert fxlib.bisect(fxlib.capture(model), recipe(replaced("sigmoid", torch.tanh)), [X]) is not None
    assert not model.scale._backward_hooks


def test_a_pass_that_raises_is_found() -> None:
    @register_pass("refuses", preserves="bitwise")
    class Refuses(GraphPass):
        @override
        def run(self, module: GraphModule, context: Context) -> PassResult:
            raise PassError("not today", where=self.name)

    found = fxlib.bisect(fxlib.capture(Net()), recipe(DeadCode(), Refuses()), [X])
    assert found is not None
    assert (found.name, found.place, found.error) == ("refuses", 2, "refuses: not today")
    assert "not today" in str(found)


def test_every_recipe_holds_on_a_model_with_norms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False)).eval()
    x = torch.randn(2, 3, 8, 8)
    graph = fxlib.capture(model)
    for name in ("schedule", "training"):
        assert fxlib.bisect(graph, name, [x]) is None
    assert fxlib.bisect(graph, "inference", [x], rtol=1e-4, atol=1e-5) is None
    exact = fxlib.bisect(graph, "inference", [x])
    assert exact is not None
    assert exact.name == "fold_norms"


def test_inputs_that_do_not_fit_are_an_error_that_names_the_node() -> None:
    with pytest.raises(PassError, match=r"node 'first' in 'first' .*test_bisect.py:\d+.*cannot be multiplied"):
        fxlib.bisect(fxlib.capture(Net()), "schedule", [torch.ones(2, 5)])
    with pytest.raises(PassError, match="does not accept these arguments"):
        fxlib.bisect(fxlib.capture(Net()), "schedule", [])


def test_module_and_inputs_are_left_as_they_were() -> None:
    model = Model()
    graph, x = fxlib.capture(model), torch.randn(4, 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator, given = torch.get_rng_state(), x.clone()
    assert fxlib.bisect(graph, "training", [x]) is None
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(x, given)
    assert all(each.grad is None for each in model.parameters())


def test_each_pass_shows_what_it_did_where_that_is_asked_for() -> None:
    graph = fxlib.capture(Net())
    chosen = recipe(DeadCode(), replaced("sigmoid", torch.sigmoid))
    first, second = recipes.apply(graph, chosen, diffs=True).passes
    assert first.diff == ""
    assert second.diff.splitlines()[:2] == ["--- before replace_sigmoid", "+++ after replace_sigmoid"]
    assert "+    sigmoid_1 = torch.sigmoid(second)" in second.diff
    assert "= None" not in second.diff
    assert recipes.apply(graph, chosen).passes[1].diff == ""
