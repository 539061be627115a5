"""Int8 layers compute what their integers stand for, exactly up to one rounding, and refuse all other forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from fxlib.errors import FxlibError
from fxlib.runtime import int8
from fxlib.runtime.int8 import layers

OPERATORS = torch.ops.fxlib
LINEAR = (None, 0, "none")
PLAIN = ([1, 1], [0, 0], [1, 1], 1)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-int8.WEIGHT_LIMIT, int8.WEIGHT_LIMIT + 1, shape, generator=generator).to(torch.int8)


def levels(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def figures(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 0.5


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def finished(exact: torch.Tensor, out_scale: float | None, out_zero_point: int, activation: str) -> torch.Tensor:
    exact = ACTIVATIONS[activation](exact)
    return exact if out_scale is None else (exact / out_scale).round().add(out_zero_point).clamp(0, 255)


def assert_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.shape == exact.shape
    apart = (found.double() - exact).abs().max().item()
    # A result that lies halfway between two levels may become either.
    assert apart <= (1.0 if found.dtype is torch.uint8 else 1e-5 * max(1.0, exact.abs().max().item()))


@pytest.mark.slow
@given(
    batch=st.sampled_from([(), (1,), (5,), (2, 3), (layers.FEW_ROWS + 1,)]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    zero_point=st.integers(0, 255),
    biased=st.booleans(),
    out=st.sampled_from([(None, 0), (3.0, 0), (7.5, 100), (0.1, 3)]),
    activation=st.sampled_from(sorted(int8.ACTIVATIONS["linear"])),
)
def test_a_linear_layer_is_exact(
    *,
    batch: tuple[int, ...],
    sizes: tuple[int, int],
    zero_point: int,
    biased: bool,
    out: tuple[float | None, int],
    activation: str,
) -> None:
    x, weight = levels(*batch, sizes[0]), integers(sizes[1], sizes[0])
    scales, bias = figures(sizes[1], 2), figures(sizes[1], 3) if biased else None
    found = OPERATORS.int8_linear(x, 0.25, zero_point, weight, scales, bias, *out, activation)
    exact = F.linear(0.25 * (x.double() - zero_point), weight.double() * scales.double()[:, None])
    assert_close(found, finished(exact if bias is None else exact + bias.double(), *out, activation))


@pytest.mark.slow
@given(
    groups=st.sampled_from([1, 2]),
    channels=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    side=st.integers(5, 9),
    steps=st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(1, 2)),
    zero_point=st.sampled_from([0, 128, 255]),
    batch=st.sampled_from([(), (1,), (3,)]),
    out=st.sampled_from([(None, 0), (3.0, 0), (0.1, 3)]),
    activation=st.sampled_from(sorted(int8.ACTIVATIONS["convolution"])),
)
def test_a_convolution_is_exact(
    *,
    groups: int,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    side: int,
    steps: tuple[int, int, int],
    zero_point: int,
    batch: tuple[int, ...],
    out: tuple[float | None, int],
    activation: str,
) -> None:
    inputs, outputs = channels[0] * groups, channels[1] * groups
    x, weight = levels(*batch, inputs, side, side + 1), integers(outputs, channels[0], *kernel)
    stride, padding, dilation = ([each, each] for each in steps)
    scales, bias = figures(outputs, 2), figures(outputs, 3)
    found = OPERATORS.int8_conv2d(
        x, 0.25, zero_point, weight, scales, bias, stride, padding, dilation, groups, *out, activation
    )
    wide = weight.double() * scales.double()[:, None, None, None]
    exact = F.conv2d(0.25 * (x.double() - zero_point), wide, bias.double(), stride, padding, dilation, groups)
    assert_close(found, finished(exact, *out, activation))


@pytest.mark.parametrize("form", ["float", "levels", "sum"])
@pytest.mark.parametrize(
    "shape, kernel, window",
    [
        ((8, 3, 7, 1), (4, 3, 2, 2), ([2, 2], [1, 1], [2, 2], 1)),
        ((2, 4, 3, 14), (8, 1, 2, 2), ([2, 1], [3, 3], [1, 1], 4)),
        ((3, 1, 7, 14), (1, 1, 2, 2), ([2, 1], [3, 3], [1, 1], 1)),
        ((1, 4, 14, 1), (16, 1, 7, 7), ([1, 1], [8, 8], [1, 1], 4)),
    ],
)
def test_windows_that_lie_in_the_padding_are_exact(
    shape: tuple[int, ...], kernel: tuple[int, ...], window: tuple[Any, ...], form: str
) -> None:
    x, weight = levels(*shape), integers(*kernel)
    scales, bias = figures(kernel[0], 2), figures(kernel[0], 3)
    wide = weight.double() * scales.double()[:, None, None, None]
    exact = F.conv2d(0.25 * (x.double() - 200), wide, bias.double(), *window)
    layer = x, 0.25, 200, weight, scales, bias, *window
    out: tuple[float | None, int] = (None, 0) if form == "float" else (40.0, 128)
    if form == "sum":
        other = levels(*exact.shape, seed=5)
        found = OPERATORS.int8_conv2d_add(*layer, other, 20.0, 128, *out, False)
        exact = exact + 20.0 * (other.double() - 128)
    else:
        found = OPERATORS.int8_conv2d(*layer, *out, "none")
    assert_close(found, finished(exact, *out, "none"))


@pytest.mark.slow
@given(
    channels=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    groups=st.sampled_from([1, 3]),
    kernel=st.integers(1, 3),
    points=st.tuples(st.sampled_from([0, 90, 255]), st.sampled_from([0, 128]), st.sampled_from([0, 40])),
    batch=st.sampled_from([(), (1,), (3,)]),
    biased=st.booleans(),
    relu=st.booleans(),
)
def test_a_convolution_with_a_sum_is_rounded_once(
    *,
    channels: tuple[int, int],
    groups: int,
    kernel: int,
    points: tuple[int, int, int],
    batch: tuple[int, ...],
    biased: bool,
    relu: bool,
) -> None:
    inputs, outputs = channels[0] * groups, channels[1] * groups
    x, weight = levels(*batch, inputs, 6, 5), integers(outputs, channels[0], kernel, kernel)
    other, scales = levels(*batch, outputs, 7 - kernel, 6 - kernel, seed=5), figures(outputs, 2)
    before, bias = other.clone(), figures(outputs, 3) if biased else None
    window = ([1, 1], [0, 0], [1, 1], groups)
    given_ = (x, 0.25, points[0], weight, scales, bias, *window, other, 20.0, points[1], 30.0, points[2], relu)
    found = OPERATORS.int8_conv2d_add(*given_)
    wide, wide_bias = weight.double() * scales.double()[:, None, None, None], None if bias is None else bias.double()
    exact = F.conv2d(0.25 * (x.double() - points[0]), wide, wide_bias, groups=groups)
    exact = exact + 20.0 * (other.double() - points[1])
    assert_close(found, finished(exact, 30.0, points[2], "relu" if relu else "none"))
    assert torch.equal(other, before)
    over = OPERATORS.int8_conv2d_add_over(*given_)
    assert torch.equal(over, found)
    assert over.data_ptr() != other.data_ptr()


@pytest.mark.slow
@given(
    sides=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padded=st.booleans(),
    ceil_mode=st.booleans(),
    batch=st.sampled_from([(), (0,), (2,)]),
    last=st.booleans(),
)
def test_a_pooling_has_the_largest_levels(
    *,
    sides: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padded: bool,
    ceil_mode: bool,
    batch: tuple[int, ...],
    last: bool,
) -> None:
    padding = [each // 2 if padded else 0 for each in kernel]
    x = levels(*batch, 5, *sides)
    x = x.contiguous(memory_format=torch.channels_last) if last and x.dim() == 4 else x
    found = OPERATORS.int8_max_pool2d(x, kernel, stride, padding, [1, 1], ceil_mode)
    expected = F.max_pool2d(x.float(), kernel, stride, padding, 1, ceil_mode)
    assert torch.equal(found.float(), expected)
    assert found.stride() == expected.stride()
    with FakeTensorMode() as mode:
        fake = OPERATORS.int8_max_pool2d(mode.from_tensor(x), kernel, stride, padding, [1, 1], ceil_mode)
    assert (fake.shape, fake.stride(), fake.dtype) == (found.shape, found.stride(), found.dtype)


@pytest.mark.slow
@given(
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    batch=st.sampled_from([(), (0,), (2,)]),
    last=st.booleans(),
)
def test_a_pooling_has_the_rounded_means(
    *, sides: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], batch: tuple[int, ...], last: bool
) -> None:
    assume(all(size >= over for size, over in zip(sides, kernel, strict=True)))
    x = levels(*batch, 5, *sides)
    x = x.contiguous(memory_format=torch.channels_last) if last and x.dim() == 4 else x
    found = OPERATORS.int8_avg_pool2d(x, kernel, stride)
    exact = F.avg_pool2d(x.double(), kernel, stride)
    assert torch.equal(found.double(), exact.round())  # a half to the even one
    assert found.stride() == exact.stride()
    with FakeTensorMode() as mode:
        fake = OPERATORS.int8_avg_pool2d(mode.from_tensor(x), kernel, stride)
    assert (fake.shape, fake.stride(), fake.dtype) == (found.shape, found.stride(), found.dtype)


@pytest.mark.slow
@given(st.integers(1, 40), st.sampled_from([0, 77]), st.sampled_from([0, 90]), st.booleans(), st.integers(0, 3))
def test_a_norm_is_rounded_once(channels: int, zero_point: int, out_zero_point: int, last: bool, batch: int) -> None:
    x, weight, bias = levels(batch, channels, 3, 5), figures(channels, 2) - 1.0, figures(channels, 3) - 1.0
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    found = OPERATORS.int8_norm(x, 0.05, zero_point, weight, bias, 0.04, out_zero_point)
    exact = 0.05 * (x.double() - zero_point) * weight.double()[:, None, None] + bias.double()[:, None, None]
    if batch:
        assert found.stride() == x.stride()
        assert_close(found, finished(exact, 0.04, out_zero_point, "none"))


def test_levels_become_the_numbers_that_they_stand_for() -> None:
    x = levels(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    found = OPERATORS.dequantize(x, 0.3, 200)
    assert found.stride() == x.stride()
    assert torch.equal(found, (x.float() - 200.0) * 0.3)
    assert torch.equal(OPERATORS.quantize(found, 0.3, 200), x)


def test_no_sum_overflows() -> None:
    x, weight = torch.full((3, 4096), 255, dtype=torch.uint8), torch.full((8, 4096), int8.WEIGHT_LIMIT)
    found = OPERATORS.int8_linear(x, 1.0, 0, weight.to(torch.int8), torch.ones(8), None, *LINEAR)
    assert found.eq(255.0 * int8.WEIGHT_LIMIT * 4096).all()


@pytest.mark.slow
@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e3), st.integers(0, 255))
def test_a_number_becomes_the_level_next_to_it(value: float, scale: float, zero_point: int) -> None:
    level = int(OPERATORS.quantize(torch.tensor([value]), scale, zero_point))
    exact = min(max(value / scale + zero_point, 0.0), 255.0)
    assert abs(level - exact) <= 0.5 + 1e-4 * (1.0 + abs(value / scale)) / 256.0


def test_levels_are_those_of_plain_arithmetic() -> None:
    values = torch.randn(3, 7, 5, 11, generator=torch.Generator().manual_seed(0)) * 4.0
    for x in (values, values.transpose(1, 3), values[..., ::2], values[0, 0, 0, :3], values[:0]):
        expected = ((x * torch.tensor(1.0 / 0.037)).round() + 11).clamp(0, 255).to(torch.uint8)
        assert torch.equal(OPERATORS.quantize(x, 0.037, 11), expected)


def test_infinities_become_the_ends() -> None:
    for count in (1, 7, 100):
        for value, level in ((math.inf, 255), (3e38, 255), (-3e38, 0), (-math.inf, 0)):
            assert OPERATORS.quantize(torch.full((count,), value), 0.1, 7).eq(level).all()


def test_an_input_of_unknown_range_takes_that_of_its_values() -> None:
    x, weight, scales = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), integers(8, 64), figures(8, 1)
    found = OPERATORS.int8_linear(x, None, 0, weight, scales, None, *LINEAR)
    exact = F.linear(x.double(), weight.double() * scales.double()[:, None])
    assert (found - exact).abs().max() / exact.abs().max() < 0.02
    assert OPERATORS.int8_linear(torch.zeros(2, 64), None, 0, weight, scales, None, *LINEAR).eq(0.0).all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_an_input_of_unknown_range_that_is_not_finite_shows(wrong: float) -> None:
    x = torch.zeros(2, 64)
    x[1, 3] = wrong
    found = OPERATORS.int8_linear(x, None, 0, integers(8, 64), figures(8, 1), None, *LINEAR)
    assert found.isnan().all()


def test_a_weight_that_is_written_is_packed_again() -> None:
    x, weight, scales = levels(2, 64), integers(8, 64), figures(8, 1)
    before = OPERATORS.int8_linear(x, 1.0, 0, weight, scales, None, *LINEAR)
    weight.zero_()
    assert before.ne(0.0).any()
    assert OPERATORS.int8_linear(x, 1.0, 0, weight, scales, None, *LINEAR).eq(0.0).all()


@pytest.mark.parametrize("rows", [2, layers.FEW_ROWS + 1])
@pytest.mark.parametrize("of", ["scales", "bias"])
@pytest.mark.parametrize("counted", [True, False])
def test_scales_and_a_bias_that_are_written_hold_at_once(of: str, rows: int, counted: bool) -> None:
    x, weight, given = levels(rows, 8), integers(4, 8), {"scales": figures(4, 1), "bias": figures(4, 2)}
    with torch.inference_mode(not counted):
        given[of] = given[of].clone()
    before = OPERATORS.int8_linear(x, 1.0, 0, weight, *given.values(), *LINEAR)
    with torch.inference_mode(not counted):
        given[of].mul_(2.0)
    after = OPERATORS.int8_linear(x, 1.0, 0, weight, *given.values(), *LINEAR)
    fresh = OPERATORS.int8_linear(x, 1.0, 0, weight.clone(), *(each.clone() for each in given.values()), *LINEAR)
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)


@pytest.mark.parametrize("rows", [2, layers.FEW_ROWS + 1])
@pytest.mark.parametrize("of", ["weight", "scales", "bias"])
def test_a_layer_with_other_data_computes_with_these_wherever_they_lie(of: str, rows: int) -> None:
    x, given = levels(rows, 8), {"weight": integers(4, 8), "scales": figures(4, 1), "bias": figures(4, 2)}
    results = []
    for _ in range(20):
        results.append(OPERATORS.int8_linear(x, 1.0, 0, *given.values(), *LINEAR))
        given[of].data = given[of].data.roll(1, 0)
    for each in results:
        assert torch.equal(each, OPERATORS.int8_linear(x, 1.0, 0, *(one.clone() for one in given.values()), *LINEAR))
        given[of].data = given[of].data.roll(1, 0)


@pytest.mark.parametrize("data", [torch.ones(2), torch.ones(1).expand(4), torch.ones(4).double()])
@pytest.mark.parametrize("of", ["scales", "bias"])
def test_scales_and_a_bias_with_other_data_are_checked_again(of: str, data: torch.Tensor) -> None:
    given = {"scales": torch.ones(4), "bias": torch.ones(4)}
    row, images, flat, weight = levels(1, 8), levels(1, 8, 1, 1), integers(4, 8), integers(4, 8, 1, 1)

    def linear() -> None:
        OPERATORS.int8_linear(row, 1.0, 0, flat, *given.values(), *LINEAR)

    def convolution() -> None:
        OPERATORS.int8_conv2d(images, 1.0, 0, weight, *given.values(), *PLAIN, *LINEAR)

    for call in (linear, convolution):
        call()
    given[of].data = data
    for call in (linear, convolution):
        with pytest.raises(FxlibError, match="a float32 for each output"):
            call()


def test_a_weight_whose_writes_nobody_counts_is_packed_for_each_call() -> None:
    with torch.inference_mode():
        x, weight, scales = levels(2, 64), integers(8, 64), figures(8, 1)
        assert OPERATORS.int8_linear(x, 1.0, 0, weight, scales, None, *LINEAR).ne(0.0).any()
        weight.zero_()
        assert OPERATORS.int8_linear(x, 1.0, 0, weight, scales, None, *LINEAR).eq(0.0).all()


def test_forms_of_a_weight_do_not_add_up() -> None:
    images, weight, scales = levels(1, 4, 5, 5), integers(4, 4, 3, 3), figures(4, 1)
    for zero_point in range(40):
        OPERATORS.int8_conv2d(images, 1.0, zero_point, weight, scales, None, *PLAIN, *LINEAR)
    assert len(layers._packed[id(weight)].forms) <= 16


def test_a_packed_weight_goes_with_its_weight() -> None:
    weight = integers(8, 64)
    OPERATORS.int8_linear(levels(2, 64), 1.0, 0, weight, figures(8, 1), None, *LINEAR)
    key = id(weight)
    assert key in layers._packed
    del weight
    assert key not in layers._packed


@pytest.mark.parametrize("sizes", [(2, 3, 6, 6), (0, 3, 6, 6)])
@pytest.mark.parametrize("out", [LINEAR, (2.0, 7, "none")])
def test_a_result_without_values_has_the_form_of_others(sizes: tuple[int, ...], out: tuple[Any, ...]) -> None:
    image, kernel = torch.full(sizes, math.nan), integers(4, 3, 3, 3)
    calls: Any = (
        (image, kernel, lambda *layer: OPERATORS.int8_conv2d(*layer, *PLAIN, *out)),
        (image[..., 0], integers(4, 6), lambda *layer: OPERATORS.int8_linear(*layer, *out)),
    )
    for x, weight, call in calls:
        found = call(x, None, 0, weight, figures(4, 1), None)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(each) for each in (x, weight, figures(4, 1))]
            expected = call(fake[0], None, 0, *fake[1:], None)
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert found.isnan().all() if out is LINEAR else found.eq(7).all()


def test_quantizing_what_records_gradients_is_refused() -> None:
    with pytest.raises(FxlibError, match="no gradients"):
        OPERATORS.quantize(torch.ones(3, requires_grad=True), 1.0, 0)


def test_quantizing_doubles_is_refused_as_torch_refuses_them() -> None:
    with pytest.raises(RuntimeError, match="float32") as raised:
        OPERATORS.quantize(torch.ones(3).double(), 1.0, 0)
    assert isinstance(raised.value, FxlibError)


def test_empty_batches_have_empty_results() -> None:
    assert OPERATORS.int8_linear(levels(0, 8), 1.0, 0, integers(4, 8), figures(4, 1), None, *LINEAR).shape == (0, 4)
    images = levels(0, 2, 5, 5)
    found = OPERATORS.int8_conv2d(images, 1.0, 0, integers(4, 2, 3, 3), figures(4, 1), None, *PLAIN, 2.0, 0, "none")
    assert found.shape == (0, 4, 3, 3)
    assert found.dtype is torch.uint8


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    with FakeTensorMode() as mode:
        image, weight = (mode.from_tensor(each) for each in (levels(2, 3, 8, 9), integers(6, 3, 3, 3)))
        scales = mode.from_tensor(figures(6, 1))
        made = OPERATORS.int8_conv2d(image, 1.0, 0, weight, scales, None, [2, 1], [1, 0], [1, 1], 1, 0.5, 0, "relu")
        assert (made.shape, made.dtype) == ((2, 6, 4, 7), torch.uint8)
        rows = mode.from_tensor(torch.randn(2, 3, 8))
        assert OPERATORS.quantize(rows, 1.0, 0).dtype is torch.uint8
        layer = mode.from_tensor(integers(5, 8)), mode.from_tensor(figures(5, 1)), None
        assert OPERATORS.int8_linear(rows, None, 0, *layer, *LINEAR).shape == (2, 3, 5)


X, WEIGHT, SCALES = levels(2, 8), integers(4, 8), figures(4, 1)
IMAGE, KERNEL = levels(1, 2, 5, 5), integers(4, 2, 3, 3)
WRONG: dict[str, tuple[Any, ...]] = {
    "an input of other sizes": (levels(2, 9), 1.0, 0, WEIGHT, SCALES, None, *LINEAR),
    "an input without dimensions": (levels(), 1.0, 0, WEIGHT, SCALES, None, *LINEAR),
    "an input of doubles": (torch.zeros(2, 8).double(), None, 0, WEIGHT, SCALES, None, *LINEAR),
    "integers of unknown scale": (X, None, 0, WEIGHT, SCALES, None, *LINEAR),
    "a float of known scale": (X.float(), 1.0, 0, WEIGHT, SCALES, None, *LINEAR),
    "weights of floats": (X, 1.0, 0, WEIGHT.float(), SCALES, None, *LINEAR),
    "weights in another order": (X, 1.0, 0, integers(8, 4).T, SCALES, None, *LINEAR),
    "weights that are empty": (levels(2, 0), 1.0, 0, integers(4, 0), SCALES, None, *LINEAR),
    "scales of another length": (X, 1.0, 0, WEIGHT, figures(3, 1), None, *LINEAR),
    "a scale for all channels": (X, 1.0, 0, WEIGHT, torch.ones(1).expand(4), None, *LINEAR),
    "a bias of doubles": (X, 1.0, 0, WEIGHT, SCALES, figures(4, 1).double(), *LINEAR),
    "a scale of nothing": (X, 1.0, 0, WEIGHT, SCALES, None, 0.0, 0, "none"),
    "a zero point that is no level": (X, 1.0, 0, WEIGHT, SCALES, None, 1.0, 256, "none"),
    "an input's scale of nothing": (X, 0.0, 0, WEIGHT, SCALES, None, *LINEAR),
    "an input's scale that is no number": (X, math.nan, 0, WEIGHT, SCALES, None, *LINEAR),
    "an input's zero point that is no level": (X, 1.0, -1, WEIGHT, SCALES, None, *LINEAR),
    "an image of other channels": (levels(1, 3, 5, 5), 1.0, 0, KERNEL, SCALES, None, *PLAIN, *LINEAR),
    "a kernel that is larger": (levels(1, 2, 2, 2), 1.0, 0, KERNEL, SCALES, None, *PLAIN, *LINEAR),
    "no stride": (IMAGE, 1.0, 0, KERNEL, SCALES, None, [0, 1], *PLAIN[1:], *LINEAR),
    "less than no padding": (IMAGE, 1.0, 0, KERNEL, SCALES, None, [1, 1], [-1, 0], *PLAIN[2:], *LINEAR),
    "no groups": (IMAGE, 1.0, 0, KERNEL, SCALES, None, *PLAIN[:3], 0, *LINEAR),
    "groups that do not divide": (levels(1, 6, 5, 5), 1.0, 0, KERNEL, SCALES, None, *PLAIN[:3], 3, *LINEAR),
    "a padding that counts past 32 bits": (
        IMAGE,
        1.0,
        255,
        KERNEL,
        SCALES,
        None,
        [1, 1],
        [0, 2**31 - 1],
        *PLAIN[2:],
        *LINEAR,
    ),
    "a stride without end": (IMAGE, 1.0, 0, KERNEL, SCALES, None, [2**40, 1], *PLAIN[1:], *LINEAR),
    "an image without height": (levels(1, 2, 0, 5), 1.0, 0, KERNEL, SCALES, None, [1, 1], [3, 3], *PLAIN[2:], *LINEAR),
    "weights without memory": (X, 1.0, 0, WEIGHT.to("meta"), SCALES, None, *LINEAR),
    "a kernel without memory": (IMAGE, 1.0, 0, KERNEL.to("meta"), SCALES, None, *PLAIN, *LINEAR),
    "a bias without memory": (X, 1.0, 0, WEIGHT, SCALES, SCALES.to("meta"), *LINEAR),
    "an input that records gradients": (X.float().requires_grad_(), None, 0, WEIGHT, SCALES, None, *LINEAR),
    "scales that record gradients": (X, 1.0, 0, WEIGHT, SCALES.clone().requires_grad_(), None, *LINEAR),
    "a batch of five dimensions": (levels(1, 1, 2, 5, 5), 1.0, 0, KERNEL, SCALES, None, *PLAIN, *LINEAR),
}


OTHER = (levels(1, 4, 3, 3), 1.0, 0, 1.0, 0, False)
ADDED = (IMAGE, 1.0, 0, KERNEL, SCALES, None, *PLAIN)
POOL: tuple[Any, ...] = ([2, 2], [1, 1], [0, 0], [1, 1], False)
OTHERS: dict[str, Callable[[], Any]] = {
    "an activation that is none": lambda: OPERATORS.int8_linear(X, 1.0, 0, WEIGHT, SCALES, None, None, 0, "softmax"),
    "an activation of others": lambda: OPERATORS.int8_conv2d(*ADDED, None, 0, "gelu"),
    "a sum of other sizes": lambda: OPERATORS.int8_conv2d_add(*ADDED, levels(1, 4, 3, 2), *OTHER[1:]),
    "a sum of fewer images": lambda: OPERATORS.int8_conv2d_add(*ADDED, levels(4, 3, 3), *OTHER[1:]),
    "a sum of floats": lambda: OPERATORS.int8_conv2d_add(*ADDED, OTHER[0].float(), *OTHER[1:]),
    "a sum without memory": lambda: OPERATORS.int8_conv2d_add(*ADDED, OTHER[0].to("meta"), *OTHER[1:]),
    "a sum with a float": lambda: OPERATORS.int8_conv2d_add(IMAGE.float(), *ADDED[1:], *OTHER),
    "a sum's scale of nothing": lambda: OPERATORS.int8_conv2d_add(*ADDED, *OTHER[:3], 0.0, 0, False),
    "an addend's scale of nothing": lambda: OPERATORS.int8_conv2d_add(*ADDED, OTHER[0], 0.0, *OTHER[2:]),
    "a pooling of floats": lambda: OPERATORS.int8_max_pool2d(IMAGE.float(), *POOL),
    "a pooling of rows": lambda: OPERATORS.int8_max_pool2d(X, *POOL),
    "a pooling of nothing": lambda: OPERATORS.int8_max_pool2d(IMAGE, [0, 2], *POOL[1:]),
    "a pooling without steps": lambda: OPERATORS.int8_max_pool2d(IMAGE, [2, 2], [0, 1], *POOL[2:]),
    "a pooling of borders": lambda: OPERATORS.int8_max_pool2d(IMAGE, [2, 2], [1, 1], [2, 0], *POOL[3:]),
    "a pooling that is larger": lambda: OPERATORS.int8_max_pool2d(IMAGE, [6, 2], *POOL[1:]),
    "a pooling without end": lambda: OPERATORS.int8_max_pool2d(IMAGE, [2**40, 2], *POOL[1:]),
    "a mean of floats": lambda: OPERATORS.int8_avg_pool2d(IMAGE.float(), [2, 2], [1, 1]),
    "a mean of nothing": lambda: OPERATORS.int8_avg_pool2d(IMAGE, [0, 2], [1, 1]),
    "a mean without steps": lambda: OPERATORS.int8_avg_pool2d(IMAGE, [2, 2], [0, 1]),
    "a mean of more than there is": lambda: OPERATORS.int8_avg_pool2d(IMAGE, [6, 2], [1, 1]),
    "a mean of too much": lambda: OPERATORS.int8_avg_pool2d(levels(1, 1, 1025, 1025), [1025, 1025], [1, 1]),
    "a norm of other channels": lambda: OPERATORS.int8_norm(IMAGE, 1.0, 0, SCALES, SCALES, 1.0, 0),
    "a norm of doubles": lambda: OPERATORS.int8_norm(IMAGE, 1.0, 0, SCALES[:2].double(), SCALES[:2], 1.0, 0),
    "a norm of rows": lambda: OPERATORS.int8_norm(X, 1.0, 0, torch.ones(8), torch.ones(8), 1.0, 0),
    "a norm of floats": lambda: OPERATORS.int8_norm(IMAGE.float(), 1.0, 0, SCALES[:2], SCALES[:2], 1.0, 0),
    "a norm without memory": lambda: OPERATORS.int8_norm(IMAGE, 1.0, 0, SCALES[:2].to("meta"), SCALES[:2], 1.0, 0),
    "levels that are floats": lambda: OPERATORS.dequantize(X.float(), 1.0, 0),
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_has_no_levels_is_refused(form: str) -> None:
    with pytest.raises(FxlibError, match=r"torch\.ops\.fxlib"):
        OTHERS[form]()


@pytest.mark.parametrize("form", WRONG)
def test_what_a_layer_cannot_be_is_refused(form: str) -> None:
    operator = OPERATORS.int8_linear if len(WRONG[form]) == 9 else OPERATORS.int8_conv2d
    with pytest.raises(FxlibError, match=r"torch\.ops\.fxlib"):
        operator(*WRONG[form])
