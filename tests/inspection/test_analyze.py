"""What is told of a graph without running it is what a run shows."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, Interpreter, Node, symbolic_trace
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

import fxlib
from fxlib.errors import ContractError, FxlibError
from fxlib.inspection import Analysis, NodeFigures, analyze
from fxlib.spec.profile import CallProfile, Profile, Spread, TensorShape
from tests.inspection.servers import lookup_rows, row_like
from tests.models import zoo
from tests.shared.undisturbed import undisturbed

X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        return self.second(hidden.view(-1, 16)) + 1


class Shapes(Interpreter):
    """Runs a graph for real, and keeps shape and dtype of every tensor."""

    @override
    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        if isinstance(made, torch.Tensor) and n.op != "output":
            self.seen[n.name] = [(tuple(made.shape), made.dtype)]
        return made

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {}


def figures_of(analysis: Analysis, name: str) -> NodeFigures:
    return next(figures for node, figures in analysis.nodes.items() if node.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20_cifar10", "bert"])
def test_shapes_dtypes_and_arithmetic_are_those_of_a_run(name: str) -> None:
    model, inputs = zoo.build(name)
    module = fxlib.capture(model, sample_inputs=inputs)
    analysis = analyze(module, inputs)
    flat = module.graph.process_inputs(*inputs) if hasattr(module.graph._codegen, "guards") else inputs
    run = Shapes(module)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run.run(*flat, enable_io_processing=False)
    for node, figures in analysis.nodes.items():
        if node.name in run.seen:
            assert [(each.shape, each.dtype) for each in figures.tensors] == run.seen[node.name]
    assert analysis.unknown == {}
    # torch's counter has no name for the attention that runs on a processor.
    assert analysis.flops >= counter.get_total_flops() > 0
    assert name == "bert" or analysis.flops == counter.get_total_flops()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return made


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.LSTM(8, 16, num_layers=2, bidirectional=True)),
        nn.Sequential(nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)),
        Attends(),
    ],
)
def test_layers_that_torch_runs_as_one_operator_count_as_their_parts(module: nn.Module) -> None:
    x = torch.randn(5, 7, 8)
    with torch.backends.mkldnn.flags(enabled=False):
        parts = analyze(fxlib.capture(module.train()), [x])
    whole = analyze(fxlib.capture(module.eval()), [x])
    assert whole.flops == parts.flops > 0


def test_the_module_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    module = fxlib.capture(model)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    metas = [dict(node.meta) for node in module.graph.nodes]
    drawn = torch.get_rng_state()
    analysis = analyze(module, [torch.randn(2, 3, 8, 8, device="meta")])
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert [dict(node.meta) for node in module.graph.nodes] == metas
    analysis.annotate()
    assert all(node.meta["figures"] is analysis.nodes[node] for node in module.graph.nodes)


@pytest.mark.slow
def test_symbols_stay_symbols() -> None:
    analysis = analyze(fxlib.capture(Net()), [X], symbolic=True)
    size = figures_of(analysis, "second").tensors[0].shape[0]
    assert isinstance(size, torch.SymInt)
    assert isinstance(figures_of(analysis, "second").flops, torch.SymInt)
    assert analysis.flops == analyze(fxlib.capture(Net()), [X]).flops


@pytest.mark.slow
def test_an_export_keeps_the_sizes_that_it_declared_and_needs_no_inputs_without_any() -> None:
    sizes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    dynamic = fxlib.capture(Net(), sample_inputs=[X], dynamic_shapes=sizes, how="export")
    made = [each for each in analyze(dynamic, [X]).nodes.values() if each.flops]
    assert all(isinstance(each.tensors[0].shape[0], torch.SymInt) for each in made)
    fixed = fxlib.capture(Net(), sample_inputs=[X], how="export")
    assert analyze(fixed).flops == analyze(fixed, [X]).flops == 2 * 3 * (8 * 16 + 16 * 4)
    with pytest.raises(FxlibError, match="does not say what its inputs are like"):
        analyze(dynamic)
    with pytest.raises(FxlibError, match="was exported for other inputs"):
        analyze(fixed, [torch.randn(5, 8)])


def test_views_share_memory_and_what_is_used_no_more_is_gone() -> None:
    class Chain(nn.Module):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x + 1
            view = first.view(-1)
            second = view * 2
            return second.sum() + 0 * second[0]

    analysis = analyze(fxlib.capture(Chain()), [torch.randn(256, 4)])
    live = {node.name: each.live_bytes for node, each in analysis.nodes.items()}
    assert (analysis.input_bytes, live["add"], live["view"], live["mul"]) == (4096, 8192, 8192, 12288)
    assert live["sum_1"] == 8192 + 4
    assert (analysis.peak_bytes, analysis.peak_node) == (12288, "mul")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["add", "view", "relu_", "square", "keep"]), max_size=8), st.integers(1, 64))
def test_live_memory_is_what_an_allocator_sees(steps: list[str], rows: int) -> None:
    class Program(nn.Module):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = [x := x + 1]
            for step in steps:
                if step == "keep":
                    kept.append(x)
                else:
                    x = (
                        {"add": x + x, "square": x * x}[step]
                        if step in ("add", "square")
                        else (x.view(-1, 16) if step == "view" else F.relu(x, inplace=True))
                    )
            return torch.cat([each.reshape(-1) for each in (*kept, x)])

    module = symbolic_trace(Program())
    module.graph.eliminate_dead_code()
    module.recompile()
    x = torch.randn(rows, 16)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profiled:
        module(x)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    analysis = analyze(module, [x])
    assert analysis.peak_bytes - analysis.input_bytes == most


class Remote(nn.Module):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.distributed.rpc.rpc_sync("ps0", lookup_rows, args=(x,))
        return rows * 2


def test_a_contract_tells_what_a_remote_call_returns() -> None:
    name = f"{lookup_rows.__module__}:{lookup_rows.__qualname__}"
    contract = fxlib.Contract(reads=frozenset({"rows"}), returns=row_like)
    for module in _both(fxlib.capture(Remote(), contracts={name: contract})):
        analysis = analyze(module, [torch.zeros(5, dtype=torch.int64)])
        assert analysis.unknown == {}
        assert figures_of(analysis, "mul").tensors[0].shape == (5, 8)
        assert any("reads rows of ps0" in words for each in analysis.nodes.values() for words in each.effects)


def test_a_contract_that_does_not_take_the_call_is_named() -> None:
    name = f"{lookup_rows.__module__}:{lookup_rows.__qualname__}"
    module = fxlib.capture(Remote(), contracts={name: fxlib.Contract(reads=frozenset({"rows"}), returns=lambda: 0)})
    with pytest.raises(ContractError, match="node lookup_rows: returns= of the contract fails"):
        analyze(module, [torch.zeros(5, dtype=torch.int64)])


def test_a_profile_tells_what_a_remote_call_returns_and_how_long_it_takes() -> None:
    module = fxlib.capture(Remote())
    measured = CallProfile(
        call="lookup_rows", function="", to="ps0", request_bytes=40, response_bytes=160, issue_s=0.001, wait_s=0.0,
        service_s=Spread(quantiles=(0.5,)), returns=TensorShape(shape=(5, 8), dtype=torch.float32),
    )  # fmt: skip
    told = Profile(calls=(measured,))
    for graph in _both(module):
        analysis = analyze(graph, [torch.zeros(5, dtype=torch.int64)], profile=told, device="h100")
        assert analysis.unknown == {}
        assert analysis.seconds is not None
        assert 0.501 <= analysis.seconds < 0.502


def test_what_nobody_tells_is_said_to_be_unknown() -> None:
    analysis = analyze(fxlib.capture(Remote()), [torch.zeros(5, dtype=torch.int64)])
    assert list(analysis.unknown) == ["lookup_rows"]
    assert "neither a contract's returns= nor a profile says" in analysis.unknown["lookup_rows"]
    assert figures_of(analysis, "mul").tensors == ()
    assert "unknown" in str(analysis)


def _both(module: Any) -> list[Any]:
    return [module, fxlib.optimize(module)]


class Quantized(nn.Module):
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) + self.shift.dequantize()


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_a_tensor_that_has_no_stand_in_is_unknown_and_the_rest_is_known() -> None:
    analysis = analyze(fxlib.capture(Quantized()), [torch.ones(2, 4)])
    assert list(analysis.unknown) == ["shift"]
    assert figures_of(analysis, "layer").tensors != ()


def test_shapes_that_do_not_fit_are_an_error_that_names_the_line() -> None:
    with pytest.raises(FxlibError, match=r"node 'first'.*test_analyze\.py:\d+.*same reduction dim"):
        analyze(fxlib.capture(Net()), [torch.randn(3, 9)])


@pytest.mark.parametrize(
    "inputs, message",
    [([], "no input is given for x"), ([X, X], "2 inputs were given"), ({"y": X}, "no input y"), (X, "is one tensor")],
)
def test_inputs_that_are_not_the_graphs_are_an_error(inputs: Any, message: str) -> None:
    with pytest.raises(FxlibError, match=message):
        analyze(fxlib.capture(Net()), inputs)


def test_code_that_may_do_anything_is_not_run() -> None:
    ran = []

    class Own(nn.Module):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append(1)
            return x

    module = fxlib.capture(nn.Sequential(Own(), nn.ReLU()), leaf_modules=[Own])
    analysis = analyze(module, [X])
    assert ran == []
    assert any("code of unknown effects" in why for why in analysis.unknown.values())


@pytest.mark.slow
def test_ten_times_the_nodes_take_about_ten_times_as_long() -> None:
    def seconds(count: int) -> float:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        for _ in range(count):
            x = graph.call_function(torch.relu, (x,))
        graph.output(x)
        module = GraphModule(nn.Module(), graph)
        start = time.thread_time()
        assert len(analyze(module, [X], device="h100").nodes) == count + 2
        return time.thread_time() - start

    seconds(10)
    few_s = min(seconds(500) for _ in range(3))
    assert undisturbed(lambda: seconds(5_000), lambda many_s: many_s < 30 * few_s) < 30 * few_s
