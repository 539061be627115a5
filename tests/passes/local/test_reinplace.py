"""Operators write over arguments that nobody needs any more, and over no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.reinplace import reinplace as stock_reinplace
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils import _pytree as pytree

from benchmarks.transforms.graphs import functional_graph, reused
from fxlib.analysis.operators.schemas import facts_of
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.runtime.ops import issue_call, wait
from tests.models import zoo
from tests.passes.aten_graphs import Model, X, aten, built, functional, reasons, reinplaced, same, written
from tests.passes.aten_programs import SHAPE, programs
from tests.shared.many import many

CONVOLUTIONAL = ["mobilenet_wd4", "squeezenet_v1_1", "shufflenet_g1_wd4", "resnet20_cifar10", "preresnet10"]
CONVOLUTIONAL += ["densenet40_k12_cifar10", "seresnet10", "efficientnet_b0", "mobilenetv2_wd4", "shufflenetv2_wd2"]
TRAINED = ("mobilenet_wd4", "shufflenet_g1_wd4", "resnet20_cifar10", "seresnet10")
TRANSFORMERS = ("bert", "gpt2", "llama", "opt", "t5", "vit", "convnext", "wav2vec2")

Seen = tuple[list[tuple[torch.Tensor, tuple[int, ...]]], list[torch.Tensor], list[tuple[int, int]]]

Builder = Callable[..., Any]
WRONG_IN_STOCK: dict[str, Builder] = {
    "an argument that is a view of the one written": lambda do, x: do(
        aten.add.Tensor, y := do(aten.sin.default, x), do(aten.t.default, y)
    ),
    "a scatter of something else than what was written": lambda do, x: (
        y := do(aten.sin.default, x),
        row := do(aten.select.int, y, 0, 0),
        do(aten.mul.Tensor, row, 2),
        do(aten.select_scatter.default, y, do(aten.full.default, [4], 0.5), 0, 0),
    )[2:],
    "windows that overlap": lambda do, x: do(
        aten.mul.Tensor, do(aten.as_strided.default, do(aten.sin.default, x), [3, 2], [1, 1]), 2
    ),
    "a result of as many elements in another shape": lambda do, x: do(
        aten.add.Tensor, do(aten.select.int, do(aten.sin.default, x), 0, 0), do(aten.full.default, [1, 4], 1.0)
    ),
    "a place in the storage that is counted from its beginning": lambda do, x: do(
        aten.as_strided.default,
        do(aten.mul.Tensor, do(aten.select.int, do(aten.sin.default, x), 0, 1), 2),
        [2],
        [1],
        0,
    ),
    "a result and its part, both returned": lambda do, x: (
        y := do(aten.sin.default, x),
        part := do(aten.mul.Tensor, do(aten.select.int, y, 0, 0), 2),
        do(aten.select_scatter.default, y, part, 0, 0),
    )[1:],
}


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


def test_an_operator_in_a_block_of_autocast_which_casts_no_arguments_of_its_variant_is_left_alone() -> None:
    x = torch.stack([X, X])
    module = built(
        lambda do, x: (
            block := do(_enter_autocast, "cpu", torch.bfloat16, True, None),
            product := do(aten.bmm.default, x, x),
            total := do(aten.baddbmm.default, product, x, x),
            do(_exit_autocast, block),
            do(aten.relu.default, do(aten.sin.default, total)),
        )[-1],
        x,
    )
    rewrite = reinplaced(module)
    assert "baddbmm_" not in written(rewrite.module)
    assert "relu_" in written(rewrite.module)
    assert Reason.AUTOCAST in reasons(rewrite)
    assert same(module, rewrite, x)


def results(module: GraphModule, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Outputs, and all that was given, afterwards."""
    torch.manual_seed(3)
    inputs = [each.clone() for each in given]
    with torch.no_grad():
        return [*pytree.tree_leaves(module(*inputs)), *inputs]


def check_model(model: nn.Module, *inputs: torch.Tensor) -> None:
    module, given = functional_graph(model, *inputs)
    expected = results(module, given)
    stock = stock_reinplace(copy.deepcopy(module), *given)
    for distinct in (False, True):
        with torch.no_grad():
            chosen = recipes.from_passes([("reinplace", {"distinct_inputs": distinct})])
            ours = recipes.apply(module, chosen).module
        assert reused(module, ours) >= reused(module, stock) > 0
        assert all(torch.equal(one, other) for one, other in zip(expected, results(ours, given), strict=True))


@pytest.mark.slow
def test_a_transformer_layer_reuses_no_less_than_torch() -> None:
    check_model(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, training", [*((name, False) for name in CONVOLUTIONAL), *((name, True) for name in TRAINED)]
)
def test_a_model_reuses_no_less_than_torch_and_gives_the_same_bits(name: str, *, training: bool) -> None:
    model, inputs = zoo.build(name, training=training, small=True)
    check_model(model, *inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_reuses_no_less_than_torch_and_gives_the_same_bits(name: str) -> None:
    model, inputs = zoo.build(name)
    check_model(model, *inputs)


def seen(module: GraphModule, *, together: bool) -> Seen:
    """Outputs with their strides, inputs afterwards, and which of all these share memory."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHAPE, generator=generator)
    y = x if together else torch.randn(SHAPE, generator=generator)
    outputs = list(module(x, y))
    memory = [each.untyped_storage().data_ptr() for each in (*outputs, x)]
    shared = [(i, j) for i, one in enumerate(memory) for j, other in enumerate(memory) if i < j and one == other]
    return [(each.clone(), each.stride()) for each in outputs], [x.clone(), y.clone()], shared


def bits(value: torch.Tensor) -> list[int]:
    return value.reshape(-1).view(torch.int32).tolist()


def check(module: GraphModule, *, distinct_inputs: bool, together: bool) -> None:
    with torch.no_grad():
        rewrite = recipes.apply(
            module, recipes.from_passes([("reinplace", {"distinct_inputs": distinct_inputs})])
        ).module
        note(module.code)
        note(rewrite.code)
        try:
            before = seen(module, together=together)
        except RuntimeError:  # it copies between places of one memory that overlap
            return
        after = seen(rewrite, together=together)
    assert [bits(each) for each, _ in before[0]] == [bits(each) for each, _ in after[0]]
    assert [strides for _, strides in before[0]] == [strides for _, strides in after[0]]
    assert [bits(each) for each in before[1]] == [bits(each) for each in after[1]]
    assert before[2] == after[2]


@pytest.mark.slow
@settings(max_examples=many(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.booleans())
def test_a_reinplaced_program_gives_the_same_bits(module: GraphModule, together: bool) -> None:
    check(module, distinct_inputs=False, together=together)
    check(module, distinct_inputs=True, together=False)


def outcome(module: GraphModule) -> tuple[list[list[float]], list[tuple[int, ...]], bool]:
    """Values and strides of the outputs, and whether any two share memory."""
    with torch.no_grad():
        results = torch.utils._pytree.tree_leaves(module(X.clone()))
    memory = {each.untyped_storage().data_ptr() for each in results}
    return (
        [each.flatten().tolist() for each in results],
        [each.stride() for each in results],
        len(memory) < len(results),
    )


@pytest.mark.parametrize("case", WRONG_IN_STOCK)
def test_what_stock_gets_wrong_is_right(case: str) -> None:
    module = built(WRONG_IN_STOCK[case], X)
    expected = outcome(module)
    assert outcome(reinplaced(module).module) == expected
    with torch.no_grad():
        try:
            wrong = outcome(stock_reinplace(copy.deepcopy(module), X.clone())) != expected
        except RuntimeError:
            wrong = True
    assert wrong, "torch's own pass has learned this: the case may go"
