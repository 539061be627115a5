"""The program on quantized tensors has the bits of a graph's int8 operators, sees changed weights, and steps aside."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from fxlib.errors import FxlibError
from fxlib.runtime import int8, quantized_program
from fxlib.runtime.int8 import layers, quint8
from fxlib.runtime.quantized_program import QuantizedProgram
from tests.runtime.test_int8 import OPERATORS, PLAIN, WRONG, figures, integers, levels

pytestmark = pytest.mark.skipif(not quint8.computes_here(), reason="FBGEMM and oneDNN do not compute on this processor")


def graph_of(*calls: tuple[Callable[..., Any], tuple[Any, ...]]) -> GraphModule:
    """Return a module that calls operators, each on the result of the one before and on tensors of its own."""
    graph, root = Graph(), nn.Module()
    value = graph.placeholder("x")
    for operator, args in calls:
        given: list[Any] = []
        for each in args:
            if isinstance(each, Tensor):
                name = f"held_{len(root._buffers)}"
                root.register_buffer(name, each)
                given.append(graph.get_attr(name))
            else:
                given.append(each)
        value = graph.call_function(operator, (value, *given))
    graph.output(value)
    return GraphModule(root, graph)


@torch.no_grad()
def outcome(module: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return module(x)
    except FxlibError as error:
        return str(error)


@torch.no_grad()
def assert_same(module: GraphModule, *inputs: Tensor) -> None:
    program = QuantizedProgram().of(module)
    assert program is not None
    for x in inputs:
        found, expected = outcome(program, x), outcome(module, x)
        if isinstance(expected, str):
            assert found == expected
        else:
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
            assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


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


def chain() -> GraphModule:
    """From images through two convolutions, a pooling, a norm and a linear layer."""
    norm = torch.linspace(-1.0, 1.0, 8), torch.linspace(0.0, 1.0, 8)
    layer = integers(8, 8, 3, 3), figures(8, 1), figures(8, 2)
    return graph_of(
        (OPERATORS.quantize.default, (0.05, 100)),
        (OPERATORS.int8_conv2d.default, (0.05, 100, *layer, [1, 1], [1, 1], [1, 1], 1, 9.0, 20, "none")),
        (OPERATORS.int8_max_pool2d.default, ([3, 3], [2, 2], [1, 1], [1, 1], True)),
        (OPERATORS.int8_norm.default, (9.0, 20, *norm, 8.0, 0)),
        (OPERATORS.int8_conv2d.default, (8.0, 0, *layer, *PLAIN, 900.0, 0, "relu")),
        (torch.flatten, (1,)),
        (OPERATORS.int8_linear.default, (900.0, 0, integers(4, 72), figures(4, 3), None, None, 0, "none")),
    )


def images(batch: int = 3, side: int = 8) -> Tensor:
    return torch.randn(batch, 8, side, side, generator=torch.Generator().manual_seed(batch))


def test_layers_hand_on_quantized_tensors() -> None:
    module = chain()
    with torch.no_grad():
        program = QuantizedProgram().of(module)
    assert program is not None
    kinds = [node.name for node in program.graph.nodes if node.op == "call_function"]
    assert sum("levels" in name or "integers" in name for name in kinds) == 2  # around the flatten
    assert_same(
        module, images(), images(1), images(2).to(memory_format=torch.channels_last), images(0), images()[:, ::2]
    )


def test_a_join_of_one_scale_stays_quantized() -> None:
    graph, root = Graph(), nn.Module()
    x = graph.placeholder("x")
    parts = [graph.call_function(OPERATORS.quantize.default, (x, 0.05, 7)) for _ in range(2)]
    joined = graph.call_function(torch.cat, (parts,), {"dim": 1})
    pooled = graph.call_function(OPERATORS.int8_max_pool2d.default, (joined, [2, 2], [2, 2], [0, 0], [1, 1], False))
    graph.output(graph.call_function(OPERATORS.dequantize.default, (pooled, 0.05, 7)))
    assert_same(GraphModule(root, graph), images(), images().to(memory_format=torch.channels_last))


def _written(module: GraphModule, name: str) -> None:
    getattr(module, name).mul_(-1)


def _of_other_data(module: GraphModule, name: str) -> None:
    getattr(module, name).data = getattr(module, name).data.roll(1, 0).clone()


def _seen_otherwise(module: GraphModule, name: str) -> None:
    held = getattr(module, name)
    held.data = held.data.flip(0).clone().flip(0) if held.dim() < 2 else held.data.transpose(0, 1).contiguous()


def _replaced(module: GraphModule, name: str) -> None:
    setattr(module, name, getattr(module, name).roll(1, 0))


@pytest.mark.parametrize("change", [_written, _of_other_data, _seen_otherwise, _replaced])
@pytest.mark.parametrize("name", [f"held_{index}" for index in range(5)])
@torch.no_grad()
def test_a_changed_weight_holds_at_once(change: Callable[[GraphModule, str], None], name: str) -> None:
    module, quantized, x = chain(), QuantizedProgram(), images()
    before = quantized.of(module)
    assert before is not None
    first = before(x)
    change(module, name)
    after = quantized.of(module)
    assert after is not None
    assert torch.equal(after(x), module(x))
    assert change is _seen_otherwise or not torch.equal(after(x), first)


@torch.no_grad()
def test_weights_that_change_at_each_forward_are_not_packed_each_time() -> None:
    module, quantized, x = chain(), QuantizedProgram(), images()
    ran: list[bool] = []
    for _ in range(20):
        module.get_buffer("held_0").mul_(-1)
        program = quantized.of(module)
        ran.append(program is not None)
        assert torch.equal((program or module)(x), module(x))
    assert ran == [True] * 8 + [False] * 12


def test_under_gradients_and_modes_the_operators_themselves_run() -> None:
    class Sees(TorchDispatchMode):
        @override
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    module, quantized = chain(), QuantizedProgram()
    assert quantized.of(module) is None
    with torch.no_grad(), Sees():  # type: ignore[no-untyped-call]
        assert quantized.of(module) is None
    with torch.no_grad():
        assert quantized.of(module) is not None


@torch.no_grad()
def test_weights_whose_writes_nobody_counts_are_left_to_the_operators() -> None:
    module = chain()
    with torch.inference_mode():
        module.held_0 = module.get_buffer("held_0").clone()
    assert_same(module, images())
    program = QuantizedProgram().of(module)
    assert program is not None
    with torch.inference_mode():
        module.get_buffer("held_0").zero_()
    assert torch.equal(program(images()), module(images()))


@torch.no_grad()
def test_packing_leaves_the_users_engine_alone() -> None:
    engines: Any = torch.backends.quantized
    before = engines.engine
    assert QuantizedProgram().of(chain()) is not None
    assert engines.engine == before
    engines.engine = "onednn"
    try:
        assert QuantizedProgram().of(chain()) is None
    finally:
        engines.engine = before


def test_graphs_without_int8_layers_have_no_program() -> None:
    with torch.no_grad():
        assert QuantizedProgram().of(graph_of((torch.relu, ()))) is None


@pytest.mark.slow
@torch.no_grad()
def test_threads_share_a_program() -> None:
    module, wrong = chain(), list[int]()
    quantized = QuantizedProgram()
    inputs = [images(batch) for batch in range(1, 9)]
    expected = [module(x) for x in inputs]

    begin = threading.Barrier(4)

    def run(first: int) -> None:
        begin.wait()
        with torch.no_grad():
            for turn in range(200):
                index = (first + 3 * turn) % len(inputs)
                program = quantized.of(module)
                wrong.extend([index] * (program is None or not torch.equal(program(inputs[index]), expected[index])))

    threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@torch.no_grad()
def test_a_graph_that_another_thread_exchanges_meanwhile_has_its_own_program(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, made = QuantizedProgram(), quantized_program._Rewriting
    module, other = (
        graph_of((OPERATORS.int8_linear.default, (scale, 0, integers(4, 8), figures(4, 1), None, 1e3, 0, "none")))
        for scale in (1.0, 0.5)
    )

    def interrupted(of: GraphModule) -> Any:
        rewriting = made(of)
        if of._graph is not other._graph:
            of._graph = other._graph
            assert quantized.of(of) is not None
        return rewriting

    monkeypatch.setattr(quantized_program, "_Rewriting", interrupted)
    quantized.of(module)
    program, x = quantized.of(module), levels(3, 8)
    assert program is not None
    assert torch.equal(program(x), other(x))


def test_a_copy_has_a_program_of_its_own() -> None:
    with torch.no_grad():
        quantized, module = QuantizedProgram(), chain()
        program = quantized.of(module)
        assert copy.deepcopy(quantized).of(module) is not program
        assert quantized.of(module) is program


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


Build = Callable[[Graph, Node], Any]


def built(build: Build, **held: Tensor) -> GraphModule:
    """Return a module of the graph that a function builds of its input, with buffers of these names."""
    graph, root = Graph(), nn.Module()
    for name, each in held.items():
        root.register_buffer(name, each.clone())
    graph.output(build(graph, graph.placeholder("x")))
    return GraphModule(root, graph)


def quantize(graph: Graph, x: Node, scale: Any = 0.05) -> Node:
    return graph.call_function(OPERATORS.quantize.default, (x, scale, 7))


def linear(graph: Graph, x: Node) -> Node:
    layer = graph.get_attr("weight"), graph.get_attr("scales"), None
    return graph.call_function(OPERATORS.int8_linear.default, (x, 0.05, 7, *layer, 0.5, 3, "none"))


def convolve(graph: Graph, x: Node, *window: Any) -> Node:
    layer = graph.get_attr("weight"), graph.get_attr("scales"), None
    return graph.call_function(OPERATORS.int8_conv2d.default, (x, 0.05, 7, *layer, *(window or PLAIN), 0.5, 3, "none"))


LINEAR = {"weight": integers(4, 8), "scales": figures(4, 1)}
CONVOLUTION = {"weight": integers(8, 8, 3, 3), "scales": figures(8, 1)}


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


@pytest.mark.parametrize("method", ["squeeze_", "t_", "unsqueeze_", "resize_"])
def test_a_graph_that_gives_values_another_shape_in_place_runs_itself(method: str) -> None:
    args: tuple[int, ...] = {"unsqueeze_": (0,), "resize_": (1, 8)}.get(method, ())

    def reshaped(graph: Graph, x: Node) -> Node:
        value = quantize(graph, x)
        graph.call_method(method, (value, *args))
        return linear(graph, value)

    with torch.no_grad():
        assert QuantizedProgram().of(built(reshaped, **LINEAR)) is None


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("is_view", [False, True])
@torch.no_grad()
def test_a_weight_that_the_graph_writes_to_holds_at_once(name: str, *, is_view: bool) -> None:
    def write(graph: Graph, x: Node) -> Node:
        held = graph.get_attr(name)
        graph.call_method("neg_", (graph.call_method("view", (held, -1)) if is_view else held,))
        return linear(graph, quantize(graph, x))

    module, quantized, x = built(write, **LINEAR), QuantizedProgram(), torch.randn(3, 8)
    alone = copy.deepcopy(module)
    for _ in range(3):
        program = quantized.of(module)
        assert program is not None
        assert torch.equal(program(x), alone(x))


@torch.no_grad()
def test_weights_of_another_dtype_sign_or_table_are_noticed() -> None:
    module, quantized, x = built(linear, **LINEAR), QuantizedProgram(), levels(3, 8)

    def check() -> None:
        program = quantized.of(module)
        assert program is not None
        found, expected = outcome(program, x), outcome(module, x)
        assert found == expected if isinstance(expected, str) else torch.equal(found, expected)

    check()
    weight, scales = module.get_buffer("weight"), module.get_buffer("scales")
    weight.data = weight.data.view(torch.uint8)
    check()
    weight.data = weight.data.view(torch.int8)
    plain = scales.data
    scales.data = torch._neg_view(plain)
    check()
    scales.data = plain
    module.__dict__["_buffers"] = {**module._buffers, "weight": weight.neg()}
    check()
    module.__dict__["weight"] = weight.roll(1, 0)
    check()


class Wrapped(Tensor):
    """A tensor without a storage, around another one."""

    around: Any

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args = [each.around if isinstance(each, Wrapped) else each for each in args]
        return func(*args, **(kwargs or {}))


def wrapped(x: Tensor) -> Tensor:
    make: Any = Tensor._make_wrapper_subclass
    made: Wrapped = make(Wrapped, x.shape, dtype=x.dtype)
    made.around = x
    return made


@pytest.mark.parametrize("form", ["zero", "negated", "wrapped"])
@torch.no_grad()
def test_tensors_that_are_more_than_their_memory_are_left_to_the_operators(form: str) -> None:
    for layer, plain in (
        (built(linear, **LINEAR), levels(3, 8)),
        (built(convolve, **CONVOLUTION), levels(3, 8, 8, 8)),
        (built(lambda graph, x: linear(graph, quantize(graph, x)), **LINEAR), torch.randn(3, 8)),
    ):
        x = {
            "zero": torch._efficientzerotensor(plain.shape, dtype=plain.dtype),
            "negated": torch._neg_view(plain),
            "wrapped": wrapped(plain),
        }[form]
        program = QuantizedProgram().of(layer)
        assert program is not None
        assert torch.equal(program(x), layer(x))


@pytest.mark.parametrize("named", LINEAR)
@torch.no_grad()
def test_weights_without_memory_are_left_to_the_operators(named: str) -> None:
    held = LINEAR | {named: torch._efficientzerotensor(LINEAR[named].shape, dtype=LINEAR[named].dtype)}
    module = built(linear, **LINEAR)
    for name, each in held.items():
        module.register_buffer(name, each)
    program = QuantizedProgram().of(module)
    assert program is not None
    assert outcome(program, levels(3, 8)) == outcome(module, levels(3, 8))


@torch.no_grad()
def test_fake_and_meta_tensors_pass_without_a_mode() -> None:
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(each) for name, each in LINEAR.items()}
        x = torch.empty(3, 8)
    module = built(lambda graph, x: linear(graph, quantize(graph, x)), **LINEAR)
    for name, each in fake.items():
        module.register_buffer(name, each)
    program = QuantizedProgram().of(module)
    assert program is None or program(x).shape == (3, 4)
    quantizes = QuantizedProgram().of(built(quantize))
    assert quantizes is not None
    assert quantizes(torch.empty(3, 8, device="meta")).device.type == "meta"


@torch.no_grad()
def test_a_trace_sees_the_operators() -> None:
    seen: list[GraphModule | None] = []
    module = chain()

    def run(x: Tensor) -> Tensor:
        seen.append(QuantizedProgram().of(module))
        return x + 1

    torch.jit.trace(run, (torch.ones(1),), check_trace=False)
    assert seen == [None]


@torch.no_grad()
def test_the_users_default_dtype_changes_nothing() -> None:
    norm = torch.ones(5), torch.ones(5)
    module = graph_of((OPERATORS.int8_norm.default, (0.05, 7, *norm, 0.1, 100)))
    x = levels(2, 5, 4, 4)
    quint8._unmoved.cache_clear()
    quint8._silence.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(module, x, x.to(memory_format=torch.channels_last))
    finally:
        torch.set_default_dtype(torch.float32)


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
