"""The program on quantized tensors sees changed weights, steps aside, and is shared by threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from fxlib.runtime import quantized_program
from fxlib.runtime.int8 import quint8
from fxlib.runtime.quantized_program import QuantizedProgram
from tests.runtime.int8_graphs import (
    CONVOLUTION,
    LINEAR,
    assert_same,
    built,
    chain,
    convolve,
    graph_of,
    images,
    linear,
    outcome,
    quantize,
)
from tests.runtime.test_int8 import OPERATORS, figures, integers, levels

pytestmark = pytest.mark.skipif(not quint8.computes_here(), reason="FBGEMM and oneDNN do not compute on this processor")


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


@pytest.mark.parametrize("activation", sorted(quantized_program._WITHIN, key=attrgetter("__name__")))
@pytest.mark.parametrize("others", [0, 1])
@torch.no_grad()
def test_an_activation_overwrites_only_what_nothing_else_uses(activation: Callable[..., Tensor], others: int) -> None:
    graph, root = Graph(), nn.Module()
    root.weight, root.scales = nn.Buffer(integers(4, 8)), nn.Buffer(figures(4, 1))
    layer = graph.get_attr("weight"), graph.get_attr("scales"), None
    found = graph.call_function(
        OPERATORS.int8_linear.default, (graph.placeholder("x"), None, 0, *layer, None, 0, "none")
    )
    active = graph.call_function(activation, (found,), {"inplace": False})
    graph.output((active, found) if others else (active,))
    module = GraphModule(root, graph)
    program = QuantizedProgram().of(module)
    assert program is not None
    (made,) = program.graph.find_nodes(op="call_function", target=activation)
    assert made.kwargs["inplace"] is not bool(others)
    for x in (torch.randn(3, 8), torch.randn(200, 8), torch.randn(2, 5, 8)):
        for one, expected in zip(program(x), module(x), strict=True):
            assert torch.equal(one, expected)
            assert one.stride() == expected.stride()


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
