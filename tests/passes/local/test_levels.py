"""Integers go from one int8 layer to the next through sums, activations, norms, poolings and joins, in all forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F
from typing_extensions import override

import fxlib
from fxlib import Workload, wire
from fxlib.recipes import recipes
from fxlib.recipes.recipes import PlanningRequest, Rewrite
from fxlib.utils.compare import relative_error
from tests.models.nets import assert_same_on_integers, called, changes, graph_runs, made

CHANNELS = 16


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("seeded")]


def images(batch: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(batch, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(seed))


def quantized(model: nn.Module, *batches: Tensor, recipe: str = "int8", least_weights: int = 1) -> Rewrite:
    steps = Workload(batches=[*(batches or (images(),))], mode="forward", optimizer="none")
    chosen = recipes.get(recipe) if recipe == "int8" else recipes.from_passes([("quantize", {"least_weights": 1})])
    if recipe == "int8":
        passes = [
            (each.name, {"least_weights": least_weights} if each.name == "quantize" else {}) for each in chosen.passes
        ]
        chosen = recipes.from_passes(passes)
    graph = model if isinstance(model, GraphModule) else fxlib.capture(model)
    return chosen.run(graph, PlanningRequest(workload=steps))


@torch.no_grad()
def assert_near(model: nn.Module, rewrite: Rewrite, x: Tensor, within: float = 0.06) -> None:
    expected, found = model(x), graph_runs(rewrite)(x)
    assert 0.0 < relative_error(found, expected) < within
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert_same_on_integers(rewrite, x)


class Block(nn.Module):
    """Two convolutions, between which something happens, and a third one behind both."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], *, last: int = CHANNELS) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.each = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.norm, self.last, self.between = nn.BatchNorm2d(last), nn.Conv2d(last, CHANNELS, 1), between
        self.relu, self.into = nn.ReLU(inplace=True), nn.ReLU()
        self.pool, self.gate, self.six = nn.MaxPool2d(2, ceil_mode=True), nn.Hardswish(), nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x))).amax((2, 3))


def _in_place(self: Any, x: Tensor) -> Tensor:
    y = self.second(x)
    y += x
    return self.relu(y)


SUMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "operator": lambda self, x: F.relu(self.second(x) + x),
    "turned": lambda self, x: self.into(x + self.second(x)),
    "no relu": lambda self, x: self.second(x) + x,
    "function": lambda self, x: torch.relu(torch.add(x, self.second(x))),
    "keywords": lambda self, x: F.relu(input=torch.add(other=x, input=self.second(x), alpha=1)),
    "method": lambda self, x: self.second(x).add(x).relu(),
    "in place": _in_place,
    "aten": lambda self, x: torch.ops.aten.relu.default(torch.ops.aten.add.Tensor(self.second(x), x)),
}


@pytest.mark.parametrize("form", SUMS)
def test_a_sum_is_part_of_the_convolution_before_it(form: str) -> None:
    model = made(Block(SUMS[form]))
    rewrite = quantized(model)
    names = called(rewrite.module)
    assert names.count("int8_conv2d_add.default") == 1  # x is the convolution's own input
    assert not {"add", "relu", "dequantize.default"} & set(names)
    assert_near(model, rewrite, images(3, 5))


def _writes_shortcut(self: Any, x: Tensor) -> Tensor:
    x += self.second(x)
    return F.relu(x)


def _used_again(self: Any, x: Tensor) -> Tensor:
    y = self.second(x)
    return F.relu(y + x) * y


def _doubled(y: Tensor) -> Tensor:
    return y + y


OTHER_SUMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one that writes what others hold": _writes_shortcut,
    "one of a result that is used again": _used_again,
    "one with a factor": lambda self, x: torch.add(x, self.second(x), alpha=2),
    "one that spreads": lambda self, x: x + self.second(x[:, :, :3, :3]),
    "one of a result with itself": lambda self, x: _doubled(self.second(x)),
    "one of numbers": lambda self, x: self.second(x) + 1.0,
}


@pytest.mark.parametrize("form", OTHER_SUMS)
def test_other_sums_stay_in_float(form: str) -> None:
    model = made(Block(OTHER_SUMS[form]))
    if form == "one that spreads":
        model.second = nn.Conv2d(CHANNELS, CHANNELS, 3)
    rewrite = quantized(model)
    assert "int8_conv2d_add.default" not in called(rewrite.module)
    assert changes(rewrite, "quantize") == 3
    assert_near(model, rewrite, images(3, 5))


def test_what_is_added_can_be_used_again() -> None:
    class Twice(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(x))
            y = F.relu(self.second(x) + x)
            return (self.last(y) + x).amax((2, 3)) + x.amax((2, 3))

    model = made(Twice(lambda self, x: x))
    rewrite = quantized(model)
    names = called(rewrite.module)
    assert names.count("int8_conv2d_add.default") == 1
    assert names.count("dequantize.default") == 1
    assert_near(model, rewrite, images())


@pytest.mark.parametrize("later", [False, True])
def test_what_is_added_is_overwritten_where_nothing_takes_it_later(later: bool) -> None:
    class Residual(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(x))
            y = F.relu(self.second(F.relu(self.each(x))) + x)
            y = self.last(y)
            return (y + self.last(x) if later else y).amax((2, 3))

    model = made(Residual(lambda self, x: x))
    rewrite = quantized(model)
    assert ("int8_conv2d_add_over.default" in called(rewrite.module)) != later
    assert_near(model, rewrite, images())


BETWEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu6": lambda self, x: self.second(self.six(x)),
    "relu6 by bounds": lambda self, x: self.second(F.hardtanh(x, 0.0, 6.0)),
    "hardswish": lambda self, x: self.second(self.gate(x)),
    "silu": lambda self, x: self.second(F.silu(input=x)),
    "silu in two": lambda self, x: self.second(x * torch.sigmoid(x)),
    "max pool": lambda self, x: self.second(self.pool(x)),
    "max pool by function": lambda self, x: self.second(F.max_pool2d(F.relu(x), 3, stride=2, padding=1)),
    "max pool by keywords": lambda self, x: self.second(F.max_pool2d(kernel_size=(2, 1), input=x)),
    "depthwise": lambda self, x: self.second(F.relu(self.each(F.relu6(x)))),
    "a view": lambda self, x: self.second(x.view(x.size(0), CHANNELS, 4, 16)),
    "a transpose": lambda self, x: self.second(torch.transpose(x, 2, 3).contiguous()),
    "a pixel shuffle": lambda self, x: self.second(F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2)),
    "a contiguous copy": lambda self, x: self.second(x.contiguous()),
}


@pytest.mark.parametrize("recipe", ["int8", "quantize"])
@pytest.mark.parametrize("form", BETWEEN)
def test_integers_go_through(form: str, recipe: str) -> None:
    model = made(Block(BETWEEN[form]))
    rewrite = quantized(model, recipe=recipe)
    names = called(rewrite.module)
    assert names.count("quantize.default") == 1
    assert "dequantize.default" not in names
    assert changes(rewrite, "quantize") == (4 if form == "depthwise" else 3)
    assert_near(model, rewrite, images(3, 5), within=0.1)


@pytest.mark.parametrize("form", ["product", "gate"])
def test_an_activation_that_writes_to_a_buffer_stays_as_it_is(form: str) -> None:
    def between(self: Any, x: Tensor) -> Tensor:
        buffer = torch.empty(4, CHANNELS, 8, 8)
        if form == "product":
            torch.mul(x, torch.sigmoid(x), out=buffer)
            return self.second(buffer)
        x = x * torch.sigmoid(x, out=buffer)
        return self.second(x) + buffer.mean()

    model = made(Block(between))
    rewrite = quantized(model)
    assert "sigmoid" in called(rewrite.module)
    assert_near(model, rewrite, images(4, 5), within=0.1)


JOINS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cat": lambda self, x: F.relu(self.norm(torch.cat([x, self.second(x)], 1))),
    "concat": lambda self, x: torch.relu(self.norm(torch.concat((self.second(F.relu(x)), x), dim=1))),
    "no norm": lambda self, x: torch.cat(
        [self.second(F.relu(x)), self.pool(F.interpolate(x, scale_factor=2.0))], dim=-3
    ),
}


@pytest.mark.parametrize("form", JOINS)
def test_joined_values_share_their_levels(form: str) -> None:
    model = made(Block(JOINS[form], last=2 * CHANNELS))
    rewrite = quantized(model)
    names = called(rewrite.module)
    assert names.count("int8_norm.default") == (form != "no norm")
    assert "norm" not in names
    assert_near(model, rewrite, images(3, 5), within=0.1)


def test_linear_layers_apply_activations_and_hand_levels_on() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.selu = nn.ModuleList(nn.Linear(32, 32) for _ in range(6)), nn.SELU()
            self.drop, self.gelu = nn.Dropout(), nn.GELU()

        def forward(self, x: Tensor) -> Tensor:
            one, two, three, four, five, six = self.layers
            x = two(F.gelu(one(x)))
            x = four(torch.tanh(three(F.gelu(x, approximate="tanh"))))
            return self.selu(six(self.selu(five(self.drop(x.flatten(1))))))

    model, x = made(Dense()), torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    rewrite = quantized(model, x)
    names = called(rewrite.module)
    assert names.count("int8_linear.default") == 6
    assert names.count("quantize.default") == 2  # of the input, and behind SELU
    assert not {"gelu", "tanh"} & set(names)
    assert_near(model, rewrite, x)


AVERAGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function": lambda self, x: F.avg_pool2d(self.second(x), 2),
    "keywords": lambda self, x: F.avg_pool2d(input=self.second(x), kernel_size=(3, 1), stride=2),
    "module": lambda self, x: self.mean(self.second(x)),
}


@pytest.mark.parametrize("form", AVERAGES)
def test_means_of_few_values_stay_integers(form: str) -> None:
    block = Block(AVERAGES[form])
    block.mean = nn.AvgPool2d(2, count_include_pad=False)
    model = made(block)
    rewrite = quantized(model)
    names = called(rewrite.module)
    assert names.count("int8_avg_pool2d.default") == 1
    assert not {"avg_pool2d", "dequantize.default"} & set(names)
    assert_near(model, rewrite, images(3, 5))


@pytest.mark.parametrize(
    "mean",
    [
        lambda x: F.avg_pool2d(x, 2, padding=1),
        lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        lambda x: F.avg_pool2d(x, 4),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: x.mean((2, 3)),
    ],
)
def test_other_means_are_of_the_numbers_that_integers_stand_for(mean: Callable[[Tensor], Tensor]) -> None:
    class Pooled(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return mean(F.relu(self.second(x) + x))

    model = made(Pooled(lambda self, x: x))
    rewrite = quantized(model)
    names = called(rewrite.module)
    assert names.count("int8_conv2d_add.default") == names.count("dequantize.default") == 1
    assert "int8_avg_pool2d.default" not in names
    assert_near(model, rewrite, images(3, 5))


@pytest.mark.parametrize("gain", [1.0, 100.0])
@pytest.mark.parametrize("behind", [lambda x: x, lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2)])
def test_what_is_averaged_shares_no_far_wider_range(gain: float, behind: Callable[[Tensor], Tensor]) -> None:
    class Joined(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            means = behind(torch.cat([F.relu(self.second(x)), self.last(x) * gain], 1)).mean((2, 3))
            return means * torch.tensor([gain, 1.0]).repeat_interleave(CHANNELS)

    model = made(Joined(lambda self, x: x))
    rewrite = quantized(model)
    with torch.no_grad():
        expected, found = (each(images(3, 5))[:, :CHANNELS] for each in (model, graph_runs(rewrite)))
    assert 0.0 < relative_error(found, expected) < 0.06


def test_a_module_of_all_of_it_travels() -> None:
    class Everything(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(F.relu(self.first(x)), 2)
            x = F.relu(self.second(self.six(self.each(x))) + x)
            return self.last(F.relu(self.norm(torch.cat([x, self.second(x)], 1)))).mean((2, 3)) + x.amax((2, 3))

    model = made(Everything(lambda self, x: x, last=2 * CHANNELS))
    captured = fxlib.capture(model)
    rewrite = quantized(captured)
    names = {each.removesuffix(".default") for each in called(rewrite.module)}
    assert names >= {"int8_conv2d", "int8_conv2d_add_over", "int8_max_pool2d", "int8_norm", "quantize", "dequantize"}
    encoded = wire.encode(rewrite.module, beside=captured)
    decoded = wire.decode(wire.parse(wire.serialize(encoded.graph)), blobs=encoded.blobs, root=model)
    with torch.no_grad():
        assert torch.equal(decoded(images(3)), rewrite.module(images(3)))
    x = images().requires_grad_()
    gradients = [torch.autograd.grad(each(x).sum(), x)[0] for each in (rewrite.module, model)]
    assert torch.equal(*gradients)  # the original has run


def test_small_layers_are_left_where_they_are_alone() -> None:
    alone = made(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS), nn.ReLU(), nn.Softmax(1)))
    assert changes(quantized(alone), "quantize") == 0
    averaged = made(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS), nn.AdaptiveAvgPool2d(1)))
    assert changes(quantized(averaged, least_weights=10_000), "quantize") == 0
    small = made(Block(BETWEEN["depthwise"]))
    assert changes(quantized(small, least_weights=10_000), "quantize") == 0
    assert changes(quantized(small, least_weights=2_000), "quantize") == 4


def test_a_value_that_is_written_is_not_held() -> None:
    def writes(self: Any, x: Tensor) -> Tensor:
        y = self.second(x)
        x.mul_(2.0)
        return y + self.each(x)

    model = made(Block(writes))
    rewrite = quantized(model)
    assert changes(rewrite, "quantize") >= 3
    assert_near(model, rewrite, images(3, 5), within=0.1)


def _plain(x: Tensor, scale: float, zero_point: int) -> Tensor:
    return scale * (x.double() - zero_point)


def _rounded(x: Tensor, scale: float | None, zero_point: int) -> Tensor:
    return x if scale is None else (x / scale).round().add(zero_point).clamp(0, 255)


def _weights(weight: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    spread = scales.double().reshape(-1, *[1] * (weight.dim() - 1))
    return weight.double() * spread, None if bias is None else bias.double()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "relu": F.relu, "relu6": F.relu6, "hardswish": F.hardswish, "silu": F.silu
}  # fmt: skip


def _conv2d(x: Tensor, scale: float, zero: int, *rest: Any) -> Tensor:
    exact = F.conv2d(_plain(x, scale, zero), *_weights(*rest[:3]), *rest[3:7])
    return _rounded(ACTIVATIONS[rest[9]](exact), *rest[7:9])


def _conv2d_add(x: Tensor, scale: float, zero: int, *rest: Any) -> Tensor:
    exact = F.conv2d(_plain(x, scale, zero), *_weights(*rest[:3]), *rest[3:7]) + _plain(*rest[7:10])
    return _rounded(exact.relu() if rest[12] else exact, *rest[10:12])


def _norm(x: Tensor, scale: float, zero: int, weight: Tensor, bias: Tensor, *out: Any) -> Tensor:
    return _rounded(_plain(x, scale, zero) * weight[:, None, None].double() + bias[:, None, None].double(), *out)


OPERATORS = torch.ops.fxlib
PLAIN: dict[Any, Callable[..., Tensor]] = {
    OPERATORS.quantize.default: lambda x, *point: _rounded(x.double(), *point),
    OPERATORS.dequantize.default: _plain,
    OPERATORS.int8_conv2d.default: _conv2d,
    OPERATORS.int8_conv2d_add.default: _conv2d_add,
    OPERATORS.int8_conv2d_add_over.default: _conv2d_add,
    OPERATORS.int8_norm.default: _norm,
    OPERATORS.int8_max_pool2d.default: lambda x, *options: F.max_pool2d(x.double(), *options),
}
"""The operators in plain arithmetic."""


class Checked(Interpreter):
    """Runs a program, and computes the result of each int8 operator in plain arithmetic, too."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.checked = 0

    @override
    def run_node(self, n: Node) -> Any:
        if n.target not in PLAIN:
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        expected = PLAIN[n.target](*args)
        found = super().run_node(n)
        if found.numel():
            apart = (expected - found.double()).abs().max().item()
            # What lies halfway between two levels may become either.
            assert apart <= (1.0 if found.dtype is torch.uint8 else 1e-5 * max(1.0, found.abs().max().item()))
            self.checked += 1
        return found


class Drawn(nn.Module):
    """A program of drawn steps over a list of values of one shape."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps, width = steps, CHANNELS
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in steps)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in steps)
        self.narrow = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in steps)
        self.norms = nn.ModuleList(nn.BatchNorm2d(2 * width) for _ in steps)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for place, (name, one, other) in enumerate(self.steps):
            first, second = values[one % len(values)], values[other % len(values)]
            values.append(self._step(name, place, first, second))
        return values[-1].sum((2, 3)) + values[-1].amax((2, 3))

    def _step(self, name: str, place: int, first: Tensor, second: Tensor) -> Tensor:
        if name == "join":
            joined = torch.cat([first, second], 1)
            return self.narrow[place](F.relu(self.norms[place](joined)) if place % 2 else joined)
        steps: dict[str, Callable[[], Tensor]] = {
            "convolution": lambda: self.convolutions[place](first),
            "depthwise": lambda: F.relu6(self.depthwise[place](first)),
            "sum": lambda: self.convolutions[place](first) + second,
            "residual": lambda: self.convolutions[place](F.relu(self.depthwise[place](first))) + second,
            "sum in place": lambda: self.convolutions[place](first).add_(second).relu_(),
            "add": lambda: first + second,
            "relu": lambda: F.relu(first),
            "silu": lambda: (
                self.convolutions[place](first).mul(1.0) if place % 2 else F.silu(self.convolutions[place](first))
            ),
            "pool": lambda: F.max_pool2d(first, 3, 1, 1),
            "scale": lambda: first * 0.5,
        }
        return steps[name]()


NAMES = ("convolution", "depthwise", "sum", "residual", "sum in place", "join", "add", "relu", "silu", "pool", "scale")
STEPS = st.tuples(st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 3))


@given(st.lists(STEPS, min_size=1, max_size=7), st.sampled_from(["int8", "quantize"]))
def test_a_drawn_program_computes_what_plain_arithmetic_does(steps: list[tuple[str, int, int]], recipe: str) -> None:
    model = made(Drawn(steps))
    rewrite = quantized(model, images(2), recipe=recipe)
    run = Checked(rewrite.module)
    with torch.no_grad():
        expected, found = model(images(2)), run.run(images(2))
    assert relative_error(found, expected) < 0.15
    if recipe == "quantize" or run.checked:  # the other recipe drops layers that nothing uses
        assert (run.checked > 0) == (changes(rewrite, "quantize") > 0)
    with torch.no_grad():
        assert torch.equal(found, graph_runs(rewrite)(images(2)))
