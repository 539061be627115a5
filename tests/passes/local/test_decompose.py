"""An operator is taken apart into what the user says it is made of, in its place."""

# ruff: noqa: PLW0108 - a side of a rule names its inputs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

import fxlib
from fxlib.errors import PassError
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Rewrite
from tests.rules.rule_programs import Program, targets, why_not

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
Rules = dict[Any, Callable[..., Any]]


class Net(nn.Module):
    """A layer, and one activation in several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(4, 4), nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.activation(self.layer(x))) + torch.ops.aten.gelu.default(x, approximate="tanh")


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def apart(model: nn.Module, rules: Rules) -> Rewrite:
    graph = fxlib.capture(model)
    return recipes.apply(graph, recipes.Recipe(name="mine", passes=(fxlib.decompose(rules),)))


def test_functions_modules_and_overloads_are_taken_apart() -> None:
    model = Net()
    rewrite = apart(model, {F.gelu: gelu, torch.ops.aten.gelu.default: gelu})
    assert rewrite.passes[0].changes == 3
    assert rewrite.preserves == "tolerance"
    assert not any("gelu" in each for each in targets(rewrite))
    graph = GraphModule(rewrite.module, rewrite.module.graph)
    assert fxlib.verify(model, graph, [X], rtol=1e-5, atol=1e-6)


def test_a_class_of_modules_is_taken_apart_with_its_own_weights() -> None:
    def linear(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight) + layer.bias

    model = Net()
    rewrite = apart(model, {nn.Linear: linear})
    assert targets(rewrite)[:2] == ["linear", "add"]
    graph = GraphModule(rewrite.module, rewrite.module.graph)
    assert fxlib.verify(model, graph, [X], rtol=1e-5, atol=1e-6)
    assert rewrite.module.get_parameter("layer.weight") is model.layer.weight


def test_a_method_and_several_results_are_taken_apart() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        values, places = x.max(1)
        return values.tanh() + places + y

    def largest(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return x.amax(dim), x.argmax(dim)

    rules: Rules = {"max": largest, torch.Tensor.tanh: lambda x: 1 - 2 / (1 + torch.exp(2 * x))}
    rewrite = apart(Program(program), rules)
    assert targets(rewrite) == ["amax", "argmax", "mul", "exp", "add", "truediv", "sub", "add", "add"]
    assert fxlib.verify(Program(program), rewrite.module, [X, X], grad=False, rtol=1e-5, atol=1e-6)


def test_what_is_put_in_stands_where_the_call_stood() -> None:
    model = Net()
    graph = fxlib.capture(model)
    (before,) = (node for node in graph.graph.nodes if node.target == "activation")
    rewrite = recipes.apply(graph, recipes.from_passes([("decompose", {"rules": {F.gelu: gelu}})]))
    (after,) = (node for node in rewrite.module.graph.nodes if node.target is torch.tanh)
    assert {key: after.meta[key] for key in ("order", "source")} == {
        key: before.meta[key] for key in ("order", "source")
    }


def test_a_call_that_does_more_than_compute_is_left_alone() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return F.relu_(x + y) + F.dropout(y)

    rewrite = apart(Program(program), {F.relu_: lambda x: x.clamp(min=0), F.dropout: lambda x, **_: x})
    assert why_not(rewrite) == ["VALUE_WRITTEN", "RANDOM_ORDER"]
    assert not rewrite.changed


def test_a_result_that_would_share_memory_is_left_alone() -> None:
    rewrite = apart(Program(lambda x, y: (torch.clone(x), y)), {torch.clone: lambda x: x})
    assert why_not(rewrite) == ["VALUE_ESCAPES"]


def test_a_call_whose_argument_is_written_afterwards_is_left_alone_where_backward_may_need_it() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        value = x * 2
        bent = torch.tanh(value)
        value.mul_(y)
        return bent + value

    rules: Rules = {torch.tanh: lambda x: 1 - 2 / (1 + torch.exp(2 * x)) + 0 * x * x}
    assert why_not(apart(Program(program), rules)) == ["MAY_BE_SAVED"]
    with torch.no_grad():
        assert apart(Program(program), rules).passes[0].changes == 1


def test_not_implemented_leaves_a_call_as_it_is() -> None:
    rewrite = apart(Net(), {F.gelu: lambda _, **given: NotImplemented})
    assert not rewrite.changed


def test_the_library_knows_some_by_name() -> None:
    class Activations(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(F.silu(x)) + F.mish(x) * F.hardswish(x) + F.leaky_relu(x) + F.gelu(x, approximate="tanh")

    names = ["gelu", "silu", "mish", "hardswish", "leaky_relu"]
    rewrite = recipes.apply(fxlib.capture(Activations()), recipes.from_passes([("decompose", {"operators": names})]))
    assert rewrite.passes[0].changes == 6
    graph = GraphModule(rewrite.module, rewrite.module.graph)
    assert fxlib.verify(Activations(), graph, [X], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["hardswish", "leaky_relu"])
def test_what_is_known_by_name_has_the_gradient_of_the_operator_where_it_bends(name: str) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return getattr(F, name)(x) * y

    chosen = recipes.from_passes([("decompose", {"operators": [name]})])
    rewrite = recipes.apply(fxlib.capture(Program(program)), chosen)
    assert rewrite.passes[0].changes == 1
    bends = torch.tensor([-3.0, 0.0, 3.0], requires_grad=True)
    graph = GraphModule(rewrite.module, rewrite.module.graph)
    assert fxlib.verify(Program(program), graph, [bends, torch.ones(3)], rtol=1e-5, atol=1e-6)


def test_what_is_known_by_name_may_be_told_by_position_not_to_work_in_place() -> None:
    graph = Graph()
    value = graph.placeholder("x")
    for function in (F.silu, F.mish, F.hardswish):
        value = graph.call_function(function, (value, False))
    graph.output(graph.call_function(F.leaky_relu, (value, 0.2, False)))
    model = GraphModule(nn.Module(), graph)
    names = ["silu", "mish", "hardswish", "leaky_relu"]
    rewrite = recipes.apply(model, recipes.from_passes([("decompose", {"operators": names})]))
    assert rewrite.passes[0].changes == 4
    assert fxlib.verify(model, GraphModule(rewrite.module, rewrite.module.graph), [X], rtol=1e-5, atol=1e-6)


def test_a_call_in_a_block_of_autocast_which_its_parts_would_give_another_dtype_is_left_alone() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            within = F.mish(x @ y)
        return within + F.mish(y)

    rewrite = recipes.apply(
        fxlib.capture(Program(program)), recipes.from_passes([("decompose", {"operators": ["mish"]})])
    )
    assert (rewrite.passes[0].changes, why_not(rewrite)) == (1, ["AUTOCAST"])
    graph = GraphModule(rewrite.module, rewrite.module.graph)
    assert fxlib.verify(Program(program), graph, [X, X], rtol=1e-5, atol=1e-6)


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "an `if`": (lambda x: x if x.sum() > 0 else -x, "raises TraceError"),
    "noise": (lambda x: torch.rand_like(x), "draws random numbers"),
    "a write": (lambda x: x.exp_(), "writes to its argument"),
    "a write whose result nobody takes": (lambda x: (y := x.exp(), y.mul_(x))[0], "mul_, which writes"),
    "no_grad": (torch.no_grad()(lambda x: x.exp()), "turns gradients off"),
    "autocast": (torch.autocast("cpu", torch.bfloat16)(lambda x: x.exp()), "enters autocast"),
    "a tensor": (lambda x: x * torch.ones(4), "holds a tensor of its own"),
    "a number": (lambda x: 3, "returns 3"),
    "other arguments": (lambda x, y: x, "raises TypeError"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_decomposition_is_an_error_that_names_the_call(case: str) -> None:
    function, words = BAD[case]
    model = Program(lambda x, y: torch.tanh(x) + y)
    graph = fxlib.capture(model)
    code = graph.code
    with pytest.raises(PassError, match=rf"node 'tanh' \(.*test_decompose.py:\d+\).*{words}"):
        recipes.apply(graph, recipes.from_passes([("decompose", {"rules": {torch.tanh: function}})]))
    assert graph.code == code


@pytest.mark.parametrize(
    "options", [{"operators": ["softmax"]}, {"operators": range(1 << 60)}, {"rules": {F.gelu: 3}}, {"rules": 1.5}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PassError, match="decompose"):
        recipes.from_passes([("decompose", options)])


def test_hardswish_of_half_precision_overflows_where_torchs_does() -> None:
    x = torch.tensor([10_000.0, 11_000.0, 60_000.0], dtype=torch.float16)
    captured = fxlib.capture(nn.Hardswish())
    rewrite = recipes.apply(captured, recipes.from_passes([("decompose", {"operators": ["hardswish"]})]))
    assert rewrite.passes[0].changes == 1
    assert torch.equal(rewrite.module(x), F.hardswish(x))
