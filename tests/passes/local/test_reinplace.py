"""Operators write over arguments that nobody needs any more, and over no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.shape_prop import ShapeProp

from fxlib.analysis.operators.schemas import facts_of
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime.ops import issue_call, wait
from tests.passes.aten_graphs import Model, X, aten, built, functional, reasons, reinplaced, same, written


def test_a_chain_writes_over_what_the_program_made_and_not_over_its_input() -> None:
    module = functional(lambda x: ((x + 1).relu() * 2).sigmoid(), X)
    rewrite = reinplaced(module)
    assert written(rewrite.module) == ["relu_", "mul_", "sigmoid_"]
    assert same(module, rewrite, X)
    assert Reason.INPUT_KEPT in reasons(rewrite)


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.diagonal(),
        lambda y: y[:, :2],
        lambda y: y[1],
        lambda y: y.as_strided((2, 2), (4, 1), 5),
        lambda y: y[1:][0, 2:],
    ],
    ids=["diagonal", "slice", "select", "as_strided", "a view of a view"],
)
def test_a_write_to_a_view_needs_no_scatter(view: Model) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        view(y).mul_(2).add_(3)
        return y

    module = functional(model, X)
    rewrite = reinplaced(module)
    assert written(rewrite.module) == ["mul_", "add_"]
    assert not [node for node in rewrite.module.graph.nodes if "scatter" in str(node.target)]
    assert same(module, rewrite, X)


def test_a_scatter_of_something_else_becomes_a_copy_into_the_view() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[0] = x[1]
        return y

    module = functional(model, X)
    rewrite = reinplaced(module)
    assert written(rewrite.module)[-1] == "copy_"
    assert same(module, rewrite, X)


def test_an_input_that_the_program_overwrites_is_written_where_it_lies() -> None:
    def model(x: torch.Tensor) -> None:
        x.mul_(2).add_(1).sigmoid_()

    module = functional(model, X)
    rewrite = reinplaced(module)
    assert written(rewrite.module) == ["mul_", "add_", "sigmoid_"]
    assert same(module, rewrite, X)


def test_an_input_stays_as_it_is_where_the_program_returns_what_it_copied() -> None:
    module = built(lambda do, x: [y := do(aten.relu.default, x), do(aten.copy_.default, x, y)][:1], X)
    assert written(reinplaced(module).module) == ["copy_"]


def test_an_input_that_is_copied_onto_itself_keeps_its_old_value_until_then() -> None:
    module = built(lambda do, x: [do(aten.sin.default, do(aten.relu.default, x)), do(aten.copy_.default, x, x)][:1], X)
    rewrite = reinplaced(module)
    assert same(module, rewrite, X)


def test_an_input_is_not_written_before_a_step_that_may_fail() -> None:
    def build(do: Model, x: Node, rows: Node) -> tuple[Node, ...]:
        y = do(aten.mul.Tensor, x, 2)
        z = do(aten.index_select.default, do(aten.full.default, [3], 1.0), 0, rows)
        do(aten.copy_.default, x, y)
        return (z,)

    module = built(build, X, torch.tensor([0, 1]))
    before = X.clone()
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
        reinplaced(module).module(before, torch.tensor([7]))
    assert torch.equal(before, X)


def test_inputs_may_share_memory_unless_the_caller_knows_better() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x.add_(y)
        return y * 3

    module = functional(model, X, X + 1)
    careful, told = reinplaced(module), reinplaced(module, distinct_inputs=True)
    assert "mul_" not in written(careful.module)
    assert written(told.module)[:2] == ["mul_", "add_"]
    assert same(module, told, X, X + 1)
    shared = [X.clone(), X.clone()]
    with torch.no_grad():
        ours, theirs = module(shared[0], shared[0]), careful.module(shared[1], shared[1])
    assert torch.equal(ours, theirs)
    assert torch.equal(*shared)


def test_a_comparison_writes_numbers_where_the_program_casts_it_back() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).ge_(0.5).logical_not_()

    module = functional(model, X)
    rewrite = reinplaced(module)
    assert written(rewrite.module) == ["ge_", "logical_not_"]
    assert same(module, rewrite, X)


def test_the_second_argument_serves_where_the_order_does_not_matter() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y * y.sin()
        return z - y

    module = functional(model, X)
    rewrite = reinplaced(module)
    assert "mul_" in written(rewrite.module)
    assert same(module, rewrite, X)


def test_nothing_is_written_where_gradients_are_recorded() -> None:
    module = functional(lambda x: (x + 1).sigmoid().sin(), X)
    rewrite = recipes.apply(module, recipes.from_passes([("reinplace", {})]))
    assert not rewrite.changed
    assert reasons(rewrite) == {Reason.MAY_BE_SAVED}


def test_without_shapes_nothing_is_written() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.relu.default, (graph.call_function(aten.sin.default, (x,)),))
    graph.output(y)
    assert reasons(reinplaced(GraphModule({}, graph))) == {Reason.LAYOUT_UNKNOWN}


def test_parameters_and_constants_are_kept() -> None:
    module = torch.nn.Linear(4, 4)
    graph = Graph()
    weight = graph.get_attr("weight")
    graph.output(graph.call_function(aten.mul.Tensor, (weight, 2)))
    held = GraphModule(module, graph)
    ShapeProp(held).propagate()
    before = module.weight.detach().clone()
    with torch.no_grad():
        reinplaced(held).module()
    assert torch.equal(module.weight, before)


def test_the_argument_of_a_call_in_flight_is_in_use_until_the_wait() -> None:
    def program(*, late: bool) -> GraphModule:
        graph = Graph()
        x = graph.placeholder("x")
        y = graph.call_function(aten.sin.default, (x,))
        future = graph.call_function(issue_call, ("ps0", "shop:lookup", (y,), {}, None))
        first = None if late else graph.call_function(wait, (future,))
        z = graph.call_function(aten.mul.Tensor, (y, 2))
        first = first or graph.call_function(wait, (future,))
        graph.output((z, first))
        for node in (x, y, z):
            node.meta["val"] = X.clone()
        return GraphModule({}, graph)

    assert written(reinplaced(program(late=True)).module) == []
    assert written(reinplaced(program(late=False)).module) == ["mul_"]


def test_strides_that_somebody_could_see_are_kept() -> None:
    """In place on a slice, the result would lie in the slice's strides, and `view` would refuse them."""
    module = built(
        lambda do, x: do(
            aten.view.default, do(aten.relu.default, do(aten.slice.Tensor, do(aten.sin.default, x), 1, 0, 2)), [8]
        ),
        X,
    )
    rewrite = reinplaced(module)
    assert same(module, rewrite, X)
    assert Reason.OTHER_LAYOUT in reasons(rewrite)


def test_memory_that_repeats_is_not_written_even_where_nobody_sees_the_strides() -> None:
    def build(do: Any, x: Any) -> Any:
        made = do(aten.relu.default, x)
        repeated = do(aten.expand.default, made, [2, *X.shape])
        do(aten._to_copy.default, do(aten.ge.Scalar, repeated, 0.1), dtype=torch.float32)
        return x

    module = built(build, X)
    rewrite = reinplaced(module)
    assert "ge_" not in written(rewrite.module)
    assert same(module, rewrite, X)


def test_views_that_schemas_deny_are_known() -> None:
    for target in (aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.lift.default):
        found = facts_of(target)
        assert found is not None
        assert found.shares


def test_an_operator_that_writes_a_second_argument_is_left_alone() -> None:
    """Torch's own pass asserts that there are none, and raises."""
    module = built(lambda do, x: do(aten.rrelu_with_noise.default, do(aten.sin.default, x), do(aten.cos.default, x)), X)
    assert "rrelu_with_noise_" not in written(reinplaced(module).module)
