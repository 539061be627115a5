"""What `torch.export` gets wrong without a word, and captures do not."""

from __future__ import annotations

import importlib
import logging
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxlib
from fxlib import wire
from fxlib.errors import CaptureError, FxlibWarning
from fxlib.runtime import CapturedModule
from tests.wire.support import over_the_wire

X = torch.randn(3, 4)


def _export(model: Any, *samples: Any) -> CapturedModule:
    return fxlib.capture(model, sample_inputs=list(samples), how="export")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # type: ignore[misc]
        return x * self.count


def test_a_counter_that_a_gradient_needs_is_written_once() -> None:
    model, x = Counts(), X.clone().requires_grad_()
    same = fxlib.verify(model, _export(model, x), [x])
    assert same, same


class Replaces(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1  # type: ignore[assignment]
        return x * self.count


def test_a_buffer_that_is_replaced_is_refused() -> None:
    model = Replaces()
    before = model.count
    with pytest.raises(CaptureError, match=r"replaces the buffer Replaces\.count.*copy_\(\)") as refused:
        _export(model, X)
    assert __file__ in refused.value.where
    assert model.count is before


def test_hooks_of_the_root_run_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.register_forward_hook(lambda _, __, result: result * 2)
    same = fxlib.verify(model, _export(model, X), [X])
    assert same, same
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


KEPT = torch.zeros(4)


class WritesToPlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.plain.add_(1)
        return x + self.plain


def _writes_to_a_global(x: Tensor) -> Tensor:
    KEPT[0] = 1
    return x + KEPT


def _writes_to_a_view_of_a_global(x: Tensor) -> Tensor:
    KEPT[1:].add_(1)
    return x + KEPT


def _writes_to_a_global_by_out(x: Tensor) -> Tensor:
    return torch.add(x[0], 1, out=KEPT)


@pytest.mark.parametrize(
    "model",
    [WritesToPlainTensor(), _writes_to_a_global, _writes_to_a_view_of_a_global, _writes_to_a_global_by_out],
    ids=["attribute", "global", "view", "out"],
)
def test_writes_to_tensors_that_export_would_copy_are_refused_and_not_made(model: Any) -> None:
    with pytest.raises(CaptureError, match=r"neither an argument.*Register it as a buffer"):
        _export(model, X)
    assert not getattr(model, "plain", KEPT).any()


def _detaches_and_tracks(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() * 2


def _sets_requires_grad(x: Tensor) -> Tensor:
    y = x * 2
    y.requires_grad = True
    return y


def _uses_data(x: Tensor) -> Tensor:
    return x + x.data


def _asks_for_history(x: Tensor) -> Tensor:
    return x if (x * 2).grad_fn is None else -x


@pytest.mark.parametrize(
    "model, problem",
    [
        (_detaches_and_tracks, "sets requires_grad"),
        (_sets_requires_grad, "sets requires_grad"),
        (_uses_data, r"uses \.data of a tensor.*detach\(\)"),
        (_asks_for_history, "asks for .grad_fn"),
    ],
)
def test_what_export_does_not_write_down_is_refused_with_its_place(model: Any, problem: str) -> None:
    with pytest.raises(CaptureError, match=problem) as refused:
        _export(model, X)
    assert __file__ in refused.value.where


def _asks_for_gradients(x: Tensor) -> Tensor:
    return x * 2 if x.requires_grad else x * 3


def test_where_the_forward_asks_who_takes_a_gradient_others_run_the_original() -> None:
    captured = _export(_asks_for_gradients, X)
    with pytest.warns(FxlibWarning, match="x takes a gradient, and took none at capture"):
        assert torch.equal(captured(X.clone().requires_grad_()), X * 2)
    with pytest.raises(CaptureError, match="x takes a gradient, and took none"):
        over_the_wire(captured, weights=True)(X.clone().requires_grad_())


def test_where_nobody_asks_inputs_may_take_a_gradient_or_not() -> None:
    x = X.clone().requires_grad_()
    assert torch.equal(over_the_wire(_export(_flat, X), weights=True)(x), x.flatten())


MASK = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    "model",
    [
        lambda x, mask: x[mask.nonzero().squeeze()],
        lambda x, mask: torch.squeeze(x[mask], dim=(0, 1)),
        lambda x, mask: x[:, : mask.sum().item()].squeeze_(),
    ],
)
def test_a_size_that_may_be_one_or_not_is_not_squeezed(model: Any) -> None:
    with pytest.raises(CaptureError, match=r"whose size depends on values.*squeeze\(-1\)") as refused:
        _export(model, X, MASK)
    assert __file__ in refused.value.where


def _squeezes_what_is_known(x: Tensor, mask: Tensor) -> Tensor:
    rows = x[mask.nonzero().squeeze(-1)]
    torch._check(rows.shape[0] > 1)
    return rows.squeeze() + x.sum().squeeze(0)


def test_sizes_that_are_known_are_squeezed() -> None:
    captured = _export(_squeezes_what_is_known, X, MASK)
    assert torch.equal(captured(X, ~MASK | MASK), _squeezes_what_is_known(X, ~MASK | MASK))


class AsksParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(x) if self.top.weight.requires_grad else x


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
def test_a_parameter_that_is_frozen_later_runs_the_original_where_the_forward_asks() -> None:
    model = AsksParameter()
    captured = _export(model, X)
    model.top.weight.requires_grad = False
    assert torch.equal(captured(X), X)


def _casts(x: Tensor) -> Tensor:
    return (x @ x.t()).float() + 1


@pytest.mark.slow
def test_autocast_around_the_forward_is_part_of_the_capture() -> None:
    outside = _export(_casts, X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, inside = _casts(X), _export(_casts, X)
        assert torch.equal(over_the_wire(inside, weights=True)(X), expected)
        with pytest.warns(FxlibWarning, match="autocast is bfloat16 on cpu, and was off at capture"):
            assert torch.equal(outside(X), expected)
    with pytest.raises(CaptureError, match="autocast is off, and was bfloat16 on cpu"):
        over_the_wire(inside, weights=True)(X)


class Distills(nn.Module):
    """A student and a teacher whose gradients are turned off within autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mean = nn.Buffer(torch.zeros(4))

    @torch.no_grad()
    def teach(self, x: Tensor) -> Tensor:
        return self.teacher(x)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.student(x)
            return y, self.teach(x)


class DistillsByCalls(Distills):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.student(x)
            torch.set_grad_enabled(False)
            z = self.teacher(x)
            torch.set_grad_enabled(True)
            return y * z, self.teacher(y)


class DistillsFirst(Distills):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            z = self.teacher(x)
        return self.student(x), z


class Averages(Distills):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.student(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.float().mean(0), alpha=0.1)
                with torch.enable_grad():
                    z = self.teacher(x)
            return y - self.mean, z


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Distills, DistillsByCalls, DistillsFirst, Averages])
def test_gradients_that_are_turned_off_within_autocast_stay_off(kind: type[Distills]) -> None:
    model = kind()
    captured = _export(model, X)
    same = fxlib.verify(model, captured, [X])
    assert same, same
    assert [each.requires_grad for each in captured(X)] == [each.requires_grad for each in model(X)]


def test_blocks_without_gradients_are_left_out_where_gradients_are_off() -> None:
    with torch.no_grad():
        captured = _export(Distills(), X)
    assert torch._C._set_grad_enabled not in {node.target for node in captured.graph.nodes}


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1)


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
def test_strides_are_those_of_the_samples() -> None:
    captured = _export(_flat, torch.randn(8, 8)[:4, :4])
    assert torch.equal(over_the_wire(captured, weights=True)(x := torch.randn(8, 8)[4:, :4]), x.reshape(-1))
    for x in (torch.randn(4, 4).t(), torch.randn(4, 8)[:, ::2], torch.randn(4, 4)):
        assert torch.equal(captured(x), x.reshape(-1))
        with pytest.raises(CaptureError, match="has the strides"):
            over_the_wire(captured, weights=True)(x)


def _negated(x: Tensor) -> Tensor:
    return -x


def test_sparse_and_conjugated_inputs_are_refused() -> None:
    with pytest.raises(CaptureError, match="has the layout"):
        _export(_negated, torch.eye(3).to_sparse())
    captured = _export(_negated, torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(CaptureError, match="a view that conjugates"):
        over_the_wire(captured, weights=True)(torch.zeros(3, dtype=torch.complex64).conj())


@pytest.mark.slow
@torch.no_grad()
def test_attention_that_a_run_computes_in_a_fused_kernel_is_not_exported() -> None:
    layer = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    x = torch.randn(2, 3, 8)
    with pytest.raises(CaptureError, match=r"fused kernel.*set_fastpath_enabled\(False\)"):
        _export(layer, x)
    assert fxlib.verify(layer, fxlib.capture(layer), [x], grad=False)
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        assert fxlib.verify(layer, _export(layer, x), [x], grad=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(value=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("layers", [0, 2])
def test_attention_that_is_frozen_later_runs_the_original_in_its_fused_kernel(layers: int) -> None:
    one = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer = (nn.TransformerEncoder(one, layers) if layers else one).eval()
    x = torch.randn(2, 3, 8)
    captured = _export(layer, x)
    assert torch.equal(captured(x), layer(x))
    layer.requires_grad_(requires_grad=False)
    assert torch.equal(captured(x), layer(x))
    usage = fxlib.usage(captured)
    assert sum(usage.graphs.values()) == sum(usage.original.values()) == 1


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - what old programs have


def _swapped(pair: Pair) -> Pair:
    return Pair(pair.right, pair.left + 1)


@pytest.mark.slow
def test_named_tuples_go_in_and_come_back() -> None:
    captured = _export(_swapped, Pair(X, X + 1))
    bound = wire.decode(wire.encode(captured).graph, root=captured)
    for module in (captured, bound, over_the_wire(captured, weights=True)):
        found = module(Pair(X, 2 * X))
        assert torch.equal(found.left, 2 * X)
        assert torch.equal(found.right, X + 1)
    assert type(bound(Pair(X, 2 * X))) is Pair


def _minus(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 - y if x is not y else x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
def test_one_tensor_in_two_places_is_not_two() -> None:
    y = torch.randn(3, 4)
    for samples, others in (((X, X), (X, y)), ((X, y), (X, X))):
        captured = _export(_minus, *samples)
        assert torch.equal(over_the_wire(captured, weights=True)(*samples), _minus(*samples))
        assert torch.equal(captured(*others), _minus(*others))
        with pytest.raises(CaptureError, match=r"the argument y is .*and was .* at capture"):
            over_the_wire(captured, weights=True)(*others)


def test_a_parameter_is_no_sample() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"a sample is a parameter.*Pass a copy"):
        _export(model, model.weight)


def test_a_lazy_model_is_asked_to_see_a_batch_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with pytest.raises(CaptureError, match=r"0: LazyLinear has parameters without a shape.*one batch"):
        fxlib.capture(model)
    model(X)
    assert fxlib.verify(model, fxlib.capture(model), [X])


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    z = torch.fft.fft(torch.view_as_complex(x.reshape(-1, 2)))
    return z.real, z.imag, (z * 1j).abs(), z.conj()


def test_parts_of_complex_numbers_are_taken_where_the_program_takes_them() -> None:
    x = X.clone().requires_grad_()
    captured = fxlib.capture(_parts, how="trace")
    for module in (captured, over_the_wire(captured, weights=True)):
        same = fxlib.verify(fxlib.runtime.module_state.FunctionModel(_parts), module, [x])
        assert same, same


def _turned(x: Tensor) -> Tensor:
    before = x.T
    x.t_()
    return before


def test_a_view_is_of_the_tensor_as_it_was() -> None:
    expected = _turned(X.clone())
    assert torch.equal(fxlib.capture(_turned, how="trace")(X.clone()), expected)


def _asks_for_shapes(x: Tensor, y: Tensor) -> Tensor:
    torch.broadcast_shapes(x.shape, y.shape)
    return x + y


def test_shapes_that_fit_in_a_run_fit_in_a_trace() -> None:
    assert torch.equal(fxlib.capture(_asks_for_shapes)(X, X), X + X)


def test_without_gradients_outputs_that_take_one_are_only_compared() -> None:
    x = X.clone().requires_grad_()
    model = nn.Flatten(0)
    assert fxlib.verify(model, fxlib.capture(model), [x], grad=False)


class Keeps(nn.Module):
    """Keeps what it computes, as attention layers do with their weights, and never asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x)
        return x + 1


class KeepsShape(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.shape[0]
        return x + 1


class KeepsInside(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.inner.last = x
        return x + 1


@pytest.mark.parametrize("model", [Keeps(), KeepsShape(), KeepsInside()], ids=lambda each: type(each).__name__)
def test_an_attribute_that_is_kept_for_later_is_refused(model: Keeps) -> None:
    model.inner.last = None  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"changes \w+\.(kept|last), so one step would depend") as refused:
        _export(model, X)
    assert __file__ in refused.value.where
    assert model.kept is None
    assert model.inner.last is None


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_a_hook_computes_is_refused() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    weight = model[0].weight
    with pytest.raises(CaptureError, match=r"changes Linear\.weight"):
        _export(model, X)
    assert model[0].weight is weight


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules_rebuild_lists_of_their_own(kind: Callable[[int, int], nn.RNNBase]) -> None:
    model = kind(4, 4)
    lists = model._flat_weights
    same = fxlib.verify(model, _export(model, X), [X])
    assert same, same
    assert model._flat_weights is lists


class DecidesByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else x


def test_what_is_refused_is_said_in_the_error_alone(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CaptureError, match="data-dependent"):
        _export(DecidesByValue(), X)
    assert capfd.readouterr() == ("", "")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert "print" not in vars(importlib.import_module("torch.export._trace"))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = deque([1.0, 2.0], maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(self.scales)


def test_a_queue_that_is_read_is_not_taken_for_changed() -> None:
    model = Remembers()
    captured, scales = _export(model, X), model.scales
    assert torch.equal(captured(X), X * 3)
    assert model.scales is scales
    scales.append(5.0)
    assert torch.equal(captured(X), X * 7)
