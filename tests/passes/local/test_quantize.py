"""Layers run on int8 weights within the bound, and the module looks from outside as it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed import rpc
from torch.nn import functional as F

import fxlib
from fxlib import Workload, wire
from fxlib.client.request import Question, calibrated
from fxlib.errors import FxlibWarning
from fxlib.recipes import recipes
from fxlib.recipes.recipes import PlanningRequest, Rewrite
from fxlib.spec.report import Report, Sensitivity
from fxlib.utils.compare import relative_error
from tests.capture.servers import lookup
from tests.models.nets import assert_same_on_integers, called, changes, graph_runs, made, reasons

pytestmark = pytest.mark.usefixtures("seeded")


class Net(nn.Module):
    """Convolutions with norms and a residual, and a head of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.left, self.right = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 1, bias=False)
        self.hidden, self.head = nn.Linear(64, 100), nn.Linear(100, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = torch.relu(self.right(F.relu(self.left(x)))) + x
        return self.head(self.hidden(x.mean((2, 3))).relu())


def images(batch: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def rows(batch: int, size: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, size, generator=torch.Generator().manual_seed(seed))


def workload(*batches: object) -> Workload:
    return Workload(batches=[*batches], mode="forward", optimizer="none")


def quantized(
    model: nn.Module, steps: Workload | None = None, bound: float | None = None, recipe: str = "int8"
) -> Rewrite:
    request = PlanningRequest(workload=steps, max_relative_error=bound)
    chosen = recipes.from_passes([("quantize", {"least_weights": 1})]) if recipe == "quantize" else recipes.get(recipe)
    return chosen.run(fxlib.capture(model), request)


@torch.no_grad()
def assert_near(model: nn.Module, rewrite: Rewrite, *inputs: Tensor, within: float = 0.03) -> None:
    expected, found = model(*inputs), graph_runs(rewrite)(*inputs)
    assert 0.0 < relative_error(found, expected) < within
    assert found.stride() == expected.stride()
    assert_same_on_integers(rewrite, *inputs)
    assert rewrite.module.state_dict().keys() == model.state_dict().keys()


def sensitivity(rewrite: Rewrite) -> tuple[Sensitivity, ...]:
    return next(each for each in rewrite.passes if each.name == "quantize").sensitivity


STEPS = workload(images(4, 2), images(4, 3))


@pytest.mark.parametrize("steps", [None, STEPS, Workload.describe([images(4)], mode="forward")])
def test_layers_run_on_int8_weights(steps: Workload | None) -> None:
    model = made(Net())
    rewrite = quantized(model, steps)
    # The stem has too few weights, and pays where it hands integers on.
    assert changes(rewrite, "quantize") == (4 if steps is None else 5)
    assert rewrite.preserves == "lossy"
    assert_near(model, rewrite, images(5))


def test_known_ranges_let_integers_go_from_layer_to_layer() -> None:
    names = called(quantized(made(Net()), STEPS).module)
    assert names.count("quantize.default") == 2  # before the first convolution and the first linear layer
    assert "relu" not in names[names.index("int8_conv2d.default") :]
    assert called(quantized(made(Net())).module).count("quantize.default") == 0


class Forms(nn.Module):
    """One layer, written in one of several ways."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(rows(8, 16, 5)), nn.Parameter(rows(1, 8, 6)[0])
        self.layer, self.call = nn.Linear(16, 8), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


FORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "module": lambda self, x: self.layer(x),
    "function": lambda self, x: F.linear(x, self.weight, self.bias),
    "keywords": lambda self, x: F.linear(bias=self.bias, weight=self.weight, input=x),
    "no bias": lambda self, x: F.linear(x, self.weight),
    "operator": lambda self, x: torch.ops.aten.linear.default(x, self.weight, self.bias),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_layer_are_one(form: str) -> None:
    model = Forms(FORMS[form]).eval()
    rewrite = quantized(model, workload(rows(8, 16)), recipe="quantize")
    assert changes(rewrite, "quantize") == 1
    assert_near(model, rewrite, rows(3, 16, 7), within=0.1)


CONVOLUTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "module": lambda self, x: self.layer(x),
    "function": lambda self, x: F.conv2d(x, self.weight, stride=2, padding=1),
    "valid": lambda self, x: F.conv2d(x, self.weight, padding="valid"),
    "groups": lambda self, x: F.conv2d(x, self.weight[:, :4].contiguous(), groups=2),
    "operator": lambda self, x: torch.ops.aten.conv2d.default(x, self.weight, None, [2, 1], [1, 0]),
    "whole": lambda self, x: torch.ops.aten.convolution.default(
        x, self.weight, None, [1, 1], [2, 2], [2, 2], False, [0, 0], 1
    ),
}


class Convolved(nn.Module):
    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = nn.Conv2d(8, 6, 3, (1, 2), (0, 1), bias=False), call
        self.weight = nn.Parameter(self.layer.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x).flatten(1)


@pytest.mark.parametrize("form", CONVOLUTIONS)
@pytest.mark.parametrize("known", [False, True])
def test_convolutions_keep_their_options_and_layout(form: str, known: bool) -> None:
    model, x = Convolved(CONVOLUTIONS[form]).eval(), rows(2, 8 * 9 * 7).reshape(2, 8, 9, 7)
    rewrite = quantized(model, workload(x) if known else None, recipe="quantize")
    if form == "groups":  # its weights are computed
        assert changes(rewrite, "quantize") == 0
        return
    assert changes(rewrite, "quantize") == 1
    assert_near(model, rewrite, x, within=0.1)


def test_a_result_that_leaves_the_module_has_its_strides() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval()
    for recipe in ("int8", "quantize"):
        assert_near(model, quantized(model, recipe=recipe), rows(2, 64 * 25).reshape(2, 64, 5, 5))


@pytest.mark.slow
def test_layers_that_move_the_results_too_far_stay_in_float() -> None:
    model = made(Net())
    free = quantized(model, STEPS)
    with torch.no_grad():
        most = max(relative_error(free.module(images(4, seed)), model(images(4, seed))) for seed in (2, 3))
    bound = most / 2
    rewrite = quantized(model, STEPS, bound)
    assert 0 < changes(rewrite, "quantize") < 4
    assert set(reasons(rewrite, "quantize")) == {"ERROR_BOUND"}
    with torch.no_grad():
        for seed in (2, 3):
            assert relative_error(rewrite.module(images(4, seed)), model(images(4, seed))) <= bound * 1.2
    left = next(each for each in rewrite.passes if each.name == "quantize").declined
    shares = [float(each.detail.split()[0]) for each in left if "alone" in each.detail]
    assert shares
    assert shares == sorted(shares)
    assert sensitivity(free) == ()  # nothing is measured without a bound
    (within,) = sensitivity(quantized(model, STEPS, most * 2))
    assert (len(within.nodes), within.lossy) == (5, True)
    assert within.error == pytest.approx(most, rel=0.2)


class Weighed(nn.Module):
    """Four layers of one input, two of which have at least a hundred times the share of the others in the results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.third = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second, self.fourth = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) * 200.0 + self.third(x) + self.fourth(x) * 100.0


def test_two_layers_each_beyond_the_bound_stay_in_float_with_the_error_of_each() -> None:
    model, batch = Weighed().eval(), rows(32, 64)
    bound = 2e-4
    rewrite = quantized(model, workload(batch), bound)
    left = next(each for each in rewrite.passes if each.name == "quantize").declined
    assert [(each.node, each.reason.name) for each in left] == [
        ("fourth", "ERROR_BOUND"), ("second", "ERROR_BOUND")
    ]  # fmt: skip
    alone = [float(each.detail.split()[0]) for each in left]
    assert bound < alone[0] < alone[1]
    found = sensitivity(rewrite)
    assert [(each.nodes, each.lossy) for each in found[2:]] == [(("fourth",), False), (("second",), False)]
    assert {each.nodes: each.lossy for each in found[:2]} == {("first",): True, ("third",): True}
    errors = [each.error for each in found]
    assert errors == sorted(errors)
    report = str(Report(decision="adopt", reason=None, explanation="", passes=rewrite.passes))
    assert f"layers that quantize left exact, the least first: fourth: {errors[2]:.2g}; second: " in report
    assert changes(rewrite, "quantize") == 2
    with torch.no_grad():
        assert 0.0 < relative_error(graph_runs(rewrite)(batch), model(batch)) <= bound


def test_a_bound_of_zero_leaves_all_in_float() -> None:
    rewrite = quantized(made(Net()), STEPS, 0.0)
    assert changes(rewrite, "quantize") == 0
    assert reasons(rewrite, "quantize") == ["ERROR_BOUND"] * 5


def test_batches_that_are_not_finite_calibrate_nothing() -> None:
    broken = images(4)
    broken[0, 0, 0, 0] = torch.nan
    rewrite = quantized(made(Net()), workload(images(4), broken))
    assert reasons(rewrite, "quantize") == ["CALIBRATION_NOT_FINITE"] * 4


@pytest.mark.parametrize("batch", [rows(0, 64), torch.zeros(8, 64), rows(1, 64)], ids=["none", "zeros", "one row"])
def test_batches_that_hold_next_to_nothing_calibrate_nothing(batch: Tensor) -> None:
    rewrite = quantized(nn.Sequential(nn.Linear(64, 64)).eval(), workload(batch), 0.05)
    assert reasons(rewrite, "quantize") == ["CALIBRATION_TOO_SMALL"]
    assert reasons(quantized(nn.Sequential(nn.Linear(64, 64)).eval(), workload(rows(8, 64)), 0.05), "quantize") == []


class Others(nn.Module):
    """Layers that have no int8 form here."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.back = nn.Conv1d(64, 64, 1), nn.ConvTranspose2d(64, 64, 1)
        self.each, self.around = nn.Conv2d(64, 64, 9, groups=64), nn.Conv2d(64, 64, 1, padding_mode="circular")
        self.wide = nn.Linear(64, 64).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.sound(x.flatten(2)).reshape(x.shape)
        x = self.each(self.around(self.back(x)))
        return self.wide(x.double().flatten(2).transpose(1, 2))


def test_what_has_no_int8_form_stays_as_it_is() -> None:
    model, x = Others().eval(), rows(1, 64 * 144).reshape(1, 64, 12, 12)
    rewrite = quantized(model)
    assert changes(rewrite, "quantize") == 0
    assert reasons(rewrite, "quantize") == ["NOT_INT8"] * 5
    with torch.no_grad():
        assert relative_error(graph_runs(rewrite)(x), model(x)) < 1e-6


def test_a_layer_whose_weight_is_a_vector_stays_as_it_is() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(rows(1, 64)[0])

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    model, x = Single().eval(), rows(8, 64, 2)
    rewrite = quantized(model, workload(x), recipe="quantize")
    assert reasons(rewrite, "quantize") == ["NOT_INT8"]
    with torch.no_grad():
        assert torch.equal(graph_runs(rewrite)(x), model(x))


@pytest.mark.parametrize("kind", ["gradients", "autocast", "forward derivative", "weights"])
def test_the_original_runs_where_integers_would_not_do(kind: str) -> None:
    model, x = made(Net()), images(4)
    module = quantized(model, STEPS).module
    if kind == "gradients":
        x.requires_grad_()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        gradients = [torch.autograd.grad(each(x).sum(), x)[0] for each in (module, model)]
        assert torch.equal(*gradients)
        return
    with torch.no_grad():
        assert not torch.equal(module(x), model(x))
        if kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16), pytest.warns(FxlibWarning, match="autocast is on"):
                assert torch.equal(module(x), model(x))
            return
        if kind == "forward derivative":
            with forward_ad.dual_level():
                both = forward_ad.make_dual(x, torch.ones_like(x))
                with pytest.warns(FxlibWarning, match="a forward derivative is taken"):
                    found = forward_ad.unpack_dual(module(both)).tangent
                assert found is not None
                assert torch.equal(found, forward_ad.unpack_dual(model(both)).tangent)
            return
        model.get_parameter("hidden.weight").mul_(2.0)
        with pytest.warns(FxlibWarning, match="have changed: optimize the model again"):
            assert torch.equal(module(x), model(x))


def test_a_range_is_that_of_a_value_when_its_layer_takes_it() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x.mul_(100.0)
            return self.second(x)

    model, batch = Writes().eval(), rows(16, 64)
    rewrite = quantized(model, workload(batch))
    assert changes(rewrite, "quantize") == 2
    assert_near(model, rewrite, batch)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand(1)


def test_calibration_leaves_the_generator_as_it_was() -> None:
    model, steps = Noisy().eval(), workload(rows(4, 64))
    state = torch.get_rng_state()
    assert changes(quantized(model, steps), "quantize") == 1
    assert torch.equal(torch.get_rng_state(), state)


class Counting(nn.Module):
    """Counts its calls in a buffer, or writes to its input."""

    def __init__(self, *, writes_input: bool) -> None:
        super().__init__()
        self.layer, self.writes_input = nn.Linear(64, 64), writes_input
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes_input:
            return self.layer(x.relu_())
        self.calls += 1
        return self.layer(x) * self.calls


@pytest.mark.parametrize("writes_input", [False, True])
def test_a_program_that_writes_to_what_it_is_given_or_holds_is_left_alone(writes_input: bool) -> None:
    model, batch = Counting(writes_input=writes_input).eval(), rows(4, 64)
    before = batch.clone()
    assert reasons(quantized(model, workload(batch)), "quantize") == ["WEIGHT_WRITTEN"]
    assert model.calls == 0
    assert torch.equal(batch, before)


class Renewing(nn.Module):
    """Writes to state of its own, whatever the model's mode: running statistics, or rows that are too long."""

    def __init__(self, *, norms: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64) if norms else nn.Identity()
        self.rows = nn.Embedding(8, 64, max_norm=None if norms else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + self.rows((x[:, 0] > 0).long())


@pytest.mark.parametrize("norms", [False, True])
def test_calibration_leaves_the_state_of_the_program_as_it_was(norms: bool) -> None:
    model = Renewing(norms=norms).eval()
    model.norm.train(norms)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    rewrite = quantized(model, workload(rows(8, 64)), 0.5)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert changes(rewrite, "quantize") == 1


def test_a_quantized_module_travels() -> None:
    model = made(Net())
    captured, steps = fxlib.capture(model), STEPS
    rewrite = recipes.get("int8").run(captured, PlanningRequest(workload=steps))
    encoded = wire.encode(rewrite.module, beside=captured)
    decoded = wire.decode(wire.parse(wire.serialize(encoded.graph)), blobs=encoded.blobs, root=model)
    with torch.no_grad():
        assert torch.equal(decoded(images(3)), rewrite.module(images(3)))


def test_weights_that_others_have_folded_go_when_they_are_quantized() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)).eval()
    found = dict(quantized(model).module.named_buffers()).keys() - dict(model.named_buffers()).keys()
    assert {name.rpartition("_")[2] for name in found} == {"int8", "scales", "bias"}


def test_a_layer_that_is_called_twice_has_one_range_for_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(100.0 * self.layer(x))

    model, batch = Twice().eval(), rows(16, 64)
    rewrite = quantized(model, workload(batch))
    assert changes(rewrite, "quantize") == 2
    assert_near(model, rewrite, batch)


class Shared(nn.Module):
    """A layer that is called twice, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(100.0 * self.middle(self.first(x).relu())))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [None, 0.02])
@pytest.mark.parametrize("model", [Net, Shared])
def test_ranges_that_were_taken_elsewhere_make_the_same_module(model: type[nn.Module], bound: float | None) -> None:
    net = made(model())
    batches = (images(4, 2), images(4, 3)) if model is Net else (rows(16, 64), rows(16, 64, 2))
    own = quantized(net, workload(*batches), bound)
    described = Workload.describe(list(batches), mode="forward", optimizer="none")
    told = calibrated(fxlib.capture(net), described, Question(recipe="int8", max_relative_error=bound or 1.0))
    assert len(told.ranges) >= 3
    elsewhere = quantized(net, replace(told, calibration=()), bound)
    assert [(each.changes, each.declined) for each in elsewhere.passes] == [
        (each.changes, each.declined) for each in own.passes
    ]
    with torch.no_grad():
        assert torch.equal(elsewhere.module(*batches[:1]), own.module(*batches[:1]))


def test_a_layer_of_which_no_range_was_told_stays_in_float() -> None:
    net, batch = made(Shared()), rows(16, 64)
    described = Workload.describe([batch], mode="forward", optimizer="none")
    told = calibrated(fxlib.capture(net), described, Question(recipe="int8", max_relative_error=1.0))
    rewrite = quantized(net, replace(told, calibration=(), ranges=told.ranges[1:]))
    assert reasons(rewrite, "quantize") == ["CALIBRATION_TOO_SMALL"]
    assert changes(rewrite, "quantize") == 3


class Beside(nn.Module):
    """A layer of its own, and a call that does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        own = self.layer(x).relu()
        answer: Tensor = rpc.rpc_sync("ps0", lookup, args=("items", x))
        return own + answer


def test_a_call_overlaps_layers_on_int8_weights() -> None:
    names = called(quantized(Beside().eval(), recipe="int8").module)
    assert names == ["issue_call", "int8_linear.default", "wait", "add"]
