"""The program on quantized tensors has the bits, the layouts and the errors of a graph's int8 operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxlib.errors import FxlibError
from fxlib.runtime import int8
from fxlib.runtime.int8 import layers, quint8
from fxlib.runtime.quantized_program import QuantizedProgram
from tests.runtime.int8_graphs import (
    CONVOLUTION,
    LINEAR,
    assert_same,
    built,
    convolve,
    graph_of,
    images,
    outcome,
    quantize,
)
from tests.runtime.test_int8 import OPERATORS, WRONG, figures, integers, levels

pytestmark = pytest.mark.skipif(not quint8.computes_here(), reason="FBGEMM and oneDNN do not compute on this processor")


@pytest.mark.slow
@given(
    shapes=st.lists(st.sampled_from([(), (1,), (5,), (0,), (2, 3), (layers.FEW_ROWS + 1,)]), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    point=st.tuples(st.sampled_from([0.25, 1e-31]), st.integers(0, 255)),
    biased=st.booleans(),
    out=st.sampled_from([(None, 0), (3.0, 0), (7.5, 100), (0.02, 0)]),
    activation=st.sampled_from(sorted(int8.ACTIVATIONS["linear"])),
)
def test_a_linear_layer_has_its_bits(
    *,
    shapes: list[tuple[int, ...]],
    sizes: tuple[int, int],
    point: tuple[float, int],
    biased: bool,
    out: tuple[float | None, int],
    activation: str,
) -> None:
    layer = integers(sizes[1], sizes[0]), figures(sizes[1], 2), figures(sizes[1], 3) if biased else None
    module = graph_of((OPERATORS.int8_linear.default, (*point, *layer, *out, activation)))
    assert_same(module, *(levels(*shape, sizes[0]) for shape in shapes))


@pytest.mark.slow
@given(
    groups=st.sampled_from([1, 2, 8, 64]),
    channels=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    side=st.integers(1, 9),
    steps=st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(1, 2)),
    zero_point=st.sampled_from([0, 128, 255]),
    batches=st.lists(st.sampled_from([(), (1,), (3,), (0,)]), min_size=1, max_size=3),
    ordered=st.booleans(),
    out=st.sampled_from([(None, 0), (3.0, 0), (0.1, 3), (0.02, 0)]),
    activation=st.sampled_from(sorted(int8.ACTIVATIONS["convolution"])),
)
def test_a_convolution_has_its_bits(
    *,
    groups: int,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    side: int,
    steps: tuple[int, int, int],
    zero_point: int,
    batches: list[tuple[int, ...]],
    ordered: bool,
    out: tuple[float | None, int],
    activation: str,
) -> None:
    inputs, outputs = (channels[0] * groups, channels[1] * groups) if groups < 8 else (groups, groups * channels[1])
    weight = integers(outputs, inputs // groups, *kernel)
    stride, padding, dilation = ([each, each] for each in steps)
    layer = weight, figures(outputs, 2), figures(outputs, 3)
    module = graph_of(
        (OPERATORS.int8_conv2d.default, (0.25, zero_point, *layer, stride, padding, dilation, groups, *out, activation))
    )
    images = [levels(*batch, inputs, side, side + 1) for batch in batches]
    assert_same(module, *(x.to(memory_format=torch.channels_last) if ordered and x.dim() == 4 else x for x in images))


def summed(name: str, layer: tuple[Any, ...], others: tuple[Any, ...], *, computed: bool, twice: bool) -> GraphModule:
    """A convolution of `x` to which `other` is added.

    Args:
        name: the operator.
        layer: its arguments after the input, up to the levels to add.
        others: its arguments after these.
        computed: whether both come from operators, instead of from outside.
        twice: whether `other` is used once more.
    """
    graph, root = Graph(), nn.Module()
    given = list[Any]()
    for each in layer:
        if isinstance(each, Tensor):
            root.register_buffer(f"held_{len(given)}", each)
            given.append(graph.get_attr(f"held_{len(given)}"))
        else:
            given.append(each)
    x, other = graph.placeholder("x"), graph.placeholder("other")
    if computed:
        x = graph.call_function(OPERATORS.quantize.default, (x, *layer[:2]))
        other = graph.call_function(OPERATORS.quantize.default, (other, *others[:2]))
    total = graph.call_function(getattr(OPERATORS, name).default, (x, *given, other, *others))
    graph.output((total, other) if twice else total)
    return GraphModule(root, graph)


@pytest.mark.slow
@given(
    name=st.sampled_from(["int8_conv2d_add", "int8_conv2d_add_over"]),
    groups=st.sampled_from([1, 2, 16]),
    batches=st.lists(st.sampled_from([(), (1,), (3,), (0,)]), min_size=1, max_size=3),
    sides=st.tuples(st.sampled_from([1, 6]), st.sampled_from([1, 7])),
    more_rows=st.sampled_from([0, 0, 0, 1]),
    channels=st.sampled_from([1, 4]),
    orders=st.tuples(*[st.sampled_from(["contiguous", "channels last", "cropped", "batch last"])] * 2),
    relu=st.booleans(),
    points=st.tuples(*[st.tuples(st.sampled_from([0.05, 3.0]), st.sampled_from([0, 100, 255]))] * 3),
    computed=st.booleans(),
)
def test_a_sum_has_its_bits_and_leaves_alone_what_is_used_again(
    *,
    name: str,
    groups: int,
    batches: list[tuple[int, ...]],
    sides: tuple[int, int],
    more_rows: int,
    channels: int,
    orders: tuple[str, str],
    relu: bool,
    points: tuple[tuple[float, int], ...],
    computed: bool,
) -> None:
    both = channels * groups
    weight = integers(both, channels, 3, 3)
    layer = (*points[0], weight, figures(both, 2), figures(both, 3), [1, 1], [1, 1], [1, 1], groups)
    module = summed(name, layer, (*points[1], *points[2], relu), computed=computed, twice=not name.endswith("over"))
    with torch.no_grad():
        program = QuantizedProgram().of(module)
    assert program is not None
    for batch in batches:
        shapes = [(*batch, both, sides[0] + more, sides[1]) for more in (0, more_rows)]
        images = [laid_out(order, *shape) for order, shape in zip(orders, shapes, strict=True)]
        if computed:
            images = [x.float() for x in images]
        found, expected = (outcome_of_two(each, *images) for each in (program, module))
        assert found == expected


@pytest.mark.parametrize(
    "other",
    [levels(1, 3, 3, 2).permute(0, 3, 1, 2)[:, :2, :1, :1], levels(2, 4, 1, 1).transpose(0, 1)],
    ids=["cropped", "transposed"],
)
def test_what_is_added_keeps_its_strides_where_a_dimension_is_of_size_one(other: Tensor) -> None:
    layer = (0.05, 0, integers(2, 2, 1, 1), figures(2, 2), figures(2, 3), [1, 1], [0, 0], [1, 1], 1)
    module = summed("int8_conv2d_add", layer, (0.05, 0, 0.05, 0, False), computed=False, twice=False)
    with torch.no_grad():
        program = QuantizedProgram().of(module)
        assert program is not None
        x = torch.zeros(other.shape, dtype=torch.uint8)
        assert program(x, other).stride() == module(x, other).stride()


def laid_out(order: str, *shape: int) -> Tensor:
    """Return levels of a shape; those of a batch lie in memory in this order."""
    x = levels(*shape)
    if x.dim() < 4 or order == "contiguous":
        return x
    if order == "cropped":
        return levels(*[each + 1 for each in shape])[tuple(map(slice, shape))]
    if order == "batch last":
        return levels(*shape[1:], shape[0]).permute(3, 0, 1, 2)
    return x.to(memory_format=torch.channels_last)


@torch.no_grad()
def outcome_of_two(module: Callable[[Tensor, Tensor], Any], x: Tensor, other: Tensor) -> object:
    """Return results' bytes and strides, or the error's words; the inputs stay as they are."""
    try:
        found = module(copy.deepcopy(x), copy.deepcopy(other))
    except FxlibError as error:
        return str(error)
    results = found if isinstance(found, tuple) else (found,)
    return [(each.dtype, each.stride(), each.contiguous().numpy().tobytes()) for each in results]


@pytest.mark.parametrize("reshaped", ["view", "reshape"])
@pytest.mark.parametrize("first", [True, False])
def test_joined_images_of_a_batch_of_one_lie_as_torch_lays_them(reshaped: str, first: bool) -> None:
    graph = Graph()
    x = graph.call_function(OPERATORS.quantize.default, (graph.placeholder("x"), 0.05, 0))
    other = graph.call_method(reshaped, (x, 1, 4, 4, 5))
    graph.output(graph.call_function(torch.cat, ([x, other] if first else [other, x], 1)))
    image = torch.rand(1, 4, 4, 5)
    assert_same(GraphModule(nn.Module(), graph), image, image.to(memory_format=torch.channels_last))


def test_a_join_of_one_scale_stays_quantized() -> None:
    graph, root = Graph(), nn.Module()
    x = graph.placeholder("x")
    parts = [graph.call_function(OPERATORS.quantize.default, (x, 0.05, 7)) for _ in range(2)]
    joined = graph.call_function(torch.cat, (parts,), {"dim": 1})
    pooled = graph.call_function(OPERATORS.int8_max_pool2d.default, (joined, [2, 2], [2, 2], [0, 0], [1, 1], False))
    graph.output(graph.call_function(OPERATORS.dequantize.default, (pooled, 0.05, 7)))
    assert_same(GraphModule(root, graph), images(), images().to(memory_format=torch.channels_last))


@pytest.mark.parametrize("form", WRONG)
def test_what_a_layer_cannot_be_is_refused_in_the_same_words(form: str) -> None:
    x, *args = WRONG[form]
    operator = OPERATORS.int8_linear if len(WRONG[form]) == 9 else OPERATORS.int8_conv2d
    module = graph_of((operator.default, tuple(args)))
    assert isinstance(outcome(module, x), str) or "gradients" in form
    assert_same(module, x)


def test_integers_of_another_dtype_are_refused() -> None:
    layer = (1.0, 0, integers(4, 8), figures(4, 1), None, 1.0, 0, "none")
    module = graph_of((OPERATORS.int8_linear.default, layer))
    with torch.no_grad():
        program = QuantizedProgram().of(module)
        assert program is not None
        with pytest.raises(FxlibError, match="uint8"):
            program(torch.zeros(2, 8))


@pytest.mark.parametrize(
    "options",
    [
        ((), {"dim": 1}),
        ((), {"axis": 1}),
        ((2,), {}),
        ((-3,), {}),
        ((), {}),
        ((), {"dim": "depth"}),
        ((), {"tensors": True, "dim": 1}),
    ],
)
@pytest.mark.parametrize("scale", [0.05, 1e37])
def test_a_join_is_that_of_integers(options: tuple[tuple[Any, ...], dict[str, Any]], scale: float) -> None:
    dims, named = options

    def join(graph: Graph, x: Node) -> Node:
        parts = [quantize(graph, x, scale), quantize(graph, x, scale)]
        if "tensors" in named:
            return graph.call_function(torch.cat, (), {**named, "tensors": parts})
        return graph.call_function(torch.cat, (parts, *dims), named)

    x = images() * (1e37 if scale > 1.0 else 1.0)
    forms = x, x.to(memory_format=torch.channels_last), x[:, :1], x[:, :, :1, :1], x.transpose(2, 3), x[:0]
    module = built(join)
    if named.get("dim") == "depth":
        with torch.no_grad():
            program = QuantizedProgram().of(module)
            assert program is not None
            with pytest.raises(TypeError, match="must be int"):
                program(x)
    else:
        assert_same(module, *forms, *(each.to(memory_format=torch.channels_last) for each in forms))


def test_a_join_over_a_computed_dimension_is_left_as_it_is() -> None:
    def join(graph: Graph, x: Node) -> Node:
        dim = graph.call_method("dim", (graph.get_attr("one"),))
        return graph.call_function(torch.cat, ([quantize(graph, x)] * 2, dim))

    assert_same(built(join, one=torch.zeros(1)), images())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
@pytest.mark.parametrize("named", [False, True])
def test_a_view_of_another_dtype_is_one(dtype: torch.dtype, *, named: bool) -> None:
    given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {"dtype": dtype}) if named else ((dtype,), {})
    module = built(lambda graph, x: graph.call_method("view", (quantize(graph, x), *given[0]), given[1]))
    assert_same(module, torch.randn(3, 8))


@pytest.mark.parametrize("window", [(1, 0, 1, 1), ([1, 1], 0, [1, 1], True), ([2, 2], [1, 1], 1, 1)])
def test_arguments_that_the_dispatcher_converts_are_converted(window: tuple[Any, ...]) -> None:
    assert_same(built(lambda graph, x: convolve(graph, quantize(graph, x), *window), **CONVOLUTION), images())
    pool = (2, 2, 0, 1, False)
    pooled = built(lambda graph, x: graph.call_function(OPERATORS.int8_max_pool2d.default, (quantize(graph, x), *pool)))
    assert_same(pooled, images())
    assert_same(built(lambda graph, x: quantize(graph, x, 1)), images())


@pytest.mark.parametrize("wrong", [3.0, "x", [1]])
@pytest.mark.parametrize("position", range(5))
def test_what_the_dispatcher_refuses_is_refused_when_it_runs(wrong: Any, position: int) -> None:
    def call(graph: Graph, x: Node) -> Node:
        args: list[Any] = [quantize(graph, x), 0.05, 7, graph.get_attr("weight"), graph.get_attr("scales"), None]
        args[position] = wrong if (position, wrong) != (1, 3.0) else "3.0"
        return graph.call_function(OPERATORS.int8_linear.default, (*args, 0.5, 3, "none"))

    module = built(call, **LINEAR)
    with torch.no_grad():
        program = QuantizedProgram().of(module)
        assert program is not None
        kinds = list[type]()
        for each in (module, program):
            try:
                each(torch.randn(3, 8))
            except (FxlibError, RuntimeError, TypeError, AttributeError) as error:
                kinds.append(type(error))
        assert len(kinds) == 2
        assert kinds[0] is kinds[1]


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 1, 4, 3), (2, 8, 1, 1), (1, 8, 3, 3)])
def test_images_whose_memory_is_in_both_orders_keep_theirs(shape: tuple[int, ...]) -> None:
    norm = torch.linspace(0.5, 1.0, shape[1]), torch.linspace(-1.0, 1.0, shape[1])
    first = (OPERATORS.quantize.default, (0.05, 7))
    x = torch.randn(shape)
    for module in (
        graph_of(first, (OPERATORS.int8_norm.default, (0.05, 7, *norm, 0.1, 100))),
        graph_of(first, (OPERATORS.int8_max_pool2d.default, ([1, 1], [1, 1], [0, 0], [1, 1], False))),
    ):
        assert_same(
            module, x, x.to(memory_format=torch.channels_last), x.permute(0, 2, 3, 1).clone().permute(0, 3, 1, 2)
        )
