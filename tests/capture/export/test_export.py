"""What tracing cannot take is exported, and is the program that it was."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fxlib
from fxlib import wire
from fxlib.errors import CaptureError, FxlibWarning
from tests.wire.support import over_the_wire

pytestmark = pytest.mark.slow


class Decides(nn.Module):
    """Goes one way or the other by a size, with blocks, constants, tied weights, statistics, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.count = nn.Buffer(torch.zeros(()))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor, scale: float = 2.0, *, more: dict[str, Tensor] | None = None) -> Any:
        if x.shape[0] % 2 == 0 and x.shape[0] > 3:
            x = x * scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(self.norm(self.first(x)))
        x = x.float()
        self.count.add_(1)
        x[0] = 1
        with torch.no_grad():
            seen = x * 2
        if more is not None:
            seen = seen + more["bias"]
        return {"x": nn.functional.dropout(x + self.plain + torch.tensor([1.0, 2, 3, 4])), "seen": seen, "none": None}


def test_a_decision_by_a_size_is_exported() -> None:
    model, x = Decides(), torch.randn(8, 4, requires_grad=True)
    captured = fxlib.capture(model, sample_inputs=[x])
    assert fxlib.verify(model, captured, [x])
    assert captured.first.weight is captured.second.weight is model.first.weight
    assert captured.state_dict().keys() == model.state_dict().keys()
    assert "lifted_tensor_0" not in vars(model)
    assert all("order" in node.meta for node in captured.graph.nodes)
    assert any(__file__ in node.meta.get("source", "") for node in captured.graph.nodes)


def test_without_samples_tracing_alone_is_tried() -> None:
    with pytest.raises(CaptureError, match="decides which way"):
        fxlib.capture(Decides())


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ([torch.randn(5, 4)], {}),
        ([torch.randn(8, 4).double()], {}),
        ([torch.randn(8, 4), 3.0], {}),
        ([torch.randn(8, 4)], {"more": {"bias": torch.ones(4)}}),
    ],
    ids=["size", "dtype", "value", "argument"],
)
def test_other_inputs_run_the_original_and_say_why(args: list[Any], kwargs: dict[str, Any]) -> None:
    model = Decides().eval()
    captured = fxlib.capture(model, sample_inputs={"x": torch.randn(8, 4), "scale": 2.0})
    if args[0].dtype is torch.float64:
        model.double()
    torch.manual_seed(0)
    expected = model(*args, **kwargs)
    torch.manual_seed(0)
    with pytest.warns(FxlibWarning, match="at capture|the graph is for"):
        found = captured(*args, **kwargs)
    assert torch.equal(found["x"], expected["x"])


def test_without_the_original_other_inputs_are_an_error() -> None:
    captured = fxlib.capture(Decides(), sample_inputs=[torch.randn(8, 4)])
    with pytest.raises(CaptureError, match=r"the argument x has the shape \(5, 4\)"):
        over_the_wire(captured, weights=True)(torch.randn(5, 4))


def test_samples_may_be_given_by_name_and_runs_by_position() -> None:
    model = Decides().eval()
    captured = fxlib.capture(model, sample_inputs={"more": {"bias": torch.ones(4)}, "x": torch.randn(8, 4)})
    x, more = torch.randn(8, 4), {"bias": torch.randn(4)}
    assert fxlib.verify(model, captured, [x], kwargs={"more": more})
    assert fxlib.verify(model, captured, [], kwargs={"x": x, "more": more})


def _joins(x: Tensor, *, y: Tensor, z: Tensor, **more: Tensor) -> Tensor:
    return torch.cat([x, y, z, *more.values()])


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
def test_the_forward_sees_the_order_of_arguments_that_it_names_by_two_stars() -> None:
    x, y, z, user, item = torch.randn(5, 1)
    given = {"y": y, "user": user, "z": z, "item": item}
    captured = fxlib.capture(_joins, sample_inputs={"x": x, **given}, how="export")
    assert torch.equal(captured(x, item=item, z=z, y=y, user=user), _joins(x, item=item, z=z, y=y, user=user))
    assert sum(fxlib.usage(captured).graphs.values()) == 0
    there = over_the_wire(captured, weights=True)
    for module in (captured, there):
        assert torch.equal(module(x, user=user, z=z, y=y, item=item), _joins(x, **given))
    assert sum(fxlib.usage(captured).graphs.values()) == 1
    with pytest.raises(CaptureError, match="item, user were given in this order, and as user, item at capture"):
        there(x, item=item, z=z, y=y, user=user)


def test_declared_sizes_may_differ_and_conditions_on_them_are_checked() -> None:
    model = Decides().eval()
    captured = fxlib.capture(model, sample_inputs=[torch.randn(8, 4)], dynamic_shapes=({0: Dim.AUTO},))
    for there in (captured, over_the_wire(captured, weights=True)):
        torch.manual_seed(0)
        assert there(torch.randn(12, 4))["x"].shape == (12, 4)
        assert there.graph._codegen.guards == captured.graph._codegen.guards  # type: ignore[attr-defined]
    with pytest.warns(FxlibWarning, match=r"% 2\) == 0\) does not hold"):
        captured(torch.randn(9, 4))
    with pytest.raises(CaptureError, match=r"a size is 2, and the graph holds where \w+ is at least"):
        over_the_wire(captured, weights=True)(torch.randn(2, 4))


def _decides_by_the_batch(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 1 else x + 1


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("batch", [Dim("batch"), Dim("batch", min=1), Dim("batch", max=8)])
def test_sizes_that_a_trace_takes_for_larger_run_the_original(batch: Any) -> None:
    captured = fxlib.capture(_decides_by_the_batch, sample_inputs=[torch.ones(4, 3)], dynamic_shapes={"x": {0: batch}})
    for size in (0, 1, 2, 5):
        assert torch.equal(captured(torch.zeros(size, 3)), _decides_by_the_batch(torch.zeros(size, 3)))
    assert sum(fxlib.usage(captured).graphs.values()) == 2
    with pytest.raises(CaptureError, match=r"a size is 1, and the graph holds where \w+ is"):
        over_the_wire(captured, weights=True)(torch.zeros(1, 3))


def _half(x: Tensor, y: Tensor) -> Tensor:
    return x[::2] + y if x.shape[0] > 3 else y


def test_a_size_may_be_a_multiple_of_that_of_a_later_argument() -> None:
    half = Dim("half", min=2, max=64)
    shapes = {"x": {0: 2 * half}, "y": {0: half}}
    captured = fxlib.capture(_half, sample_inputs=[torch.ones(8), torch.ones(4)], dynamic_shapes=shapes)
    inputs = [torch.randn(12), torch.randn(6)]
    assert torch.equal(captured(*inputs), _half(*inputs))
    with pytest.raises(CaptureError, match=r"the argument x has the shape \(11,\)"):
        over_the_wire(captured, weights=True)(torch.randn(11), torch.randn(6))


def _asks_before_it_adds(x: Tensor, y: Tensor) -> Tensor:
    doubled = y * 2 if y.shape[0] % 3 == 0 else y
    return (x * 3 if x.shape[0] % 5 == 0 else x) + doubled


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
def test_conditions_on_sizes_that_prove_to_be_equal_hold_for_both() -> None:
    shapes = ({0: Dim.AUTO}, {0: Dim.AUTO})
    samples = [torch.ones(15), torch.ones(15)]
    captured = fxlib.capture(_asks_before_it_adds, sample_inputs=samples, dynamic_shapes=shapes)
    for size in (15, 30, 18, 20, 7):
        inputs = [torch.randn(size), torch.randn(size)]
        assert torch.equal(captured(*inputs), _asks_before_it_adds(*inputs))


def _divides(x: Tensor, by: float) -> Tensor:
    return x / by if x.shape[0] > 1 else x


def _asks_for_the_layout(x: Tensor) -> Tensor:
    return x * 2 if x.is_contiguous() else x * 3


def test_zeros_of_the_other_sign_and_other_layouts_run_the_original() -> None:
    captured = fxlib.capture(_divides, sample_inputs=[torch.ones(3), 0.0])
    with pytest.warns(FxlibWarning, match="by is -0.0, and was 0.0"):
        assert torch.equal(captured(torch.ones(3), -0.0), torch.full((3,), -torch.inf))
    captured = fxlib.capture(_asks_for_the_layout, sample_inputs=[torch.ones(3, 4).t()])
    with pytest.warns(FxlibWarning, match="x has the strides"):
        assert torch.equal(captured(torch.ones(4, 3)), torch.full((4, 3), 2.0))


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - what old programs have


class Kept(dict[str, Any]):
    """A container of a class that only this process has."""


torch.utils._pytree.register_pytree_node(
    Kept, lambda kept: (list(kept.values()), list(kept)), lambda parts, names: Kept(zip(names, parts, strict=True))
)


def test_containers_of_any_class_come_back_and_the_wire_stands_in_for_them() -> None:
    def forward(x: Tensor) -> Any:
        parts = Kept(left=x * len(x), pair=Pair(x + 1, [x]))
        return parts if x.shape[0] > 1 else x

    captured = fxlib.capture(forward, sample_inputs=[torch.ones(2, 3)])
    x = torch.randn(2, 3)
    found = captured(x)
    assert type(found) is Kept
    assert isinstance(found["pair"], Pair)
    assert torch.equal(found["left"], x * 2)
    bound = wire.decode(wire.encode(captured).graph, root=captured)
    assert type(bound(x)) is Kept
    stand_in = over_the_wire(captured, weights=True)(x)
    assert torch.equal(stand_in["left"], x * 2)
    assert torch.equal(stand_in[1].right[0], x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient * 100


def _scaled(x: Tensor) -> Tensor:
    return Scaled.apply(x)  # type: ignore[no-untyped-call]


def _hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.rand(3)


def _decides_by_value(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "forward, problem",
    [
        (_scaled, "autograd.Function, whose backward export would lose"),
        (_hooked, "a hook on a tensor"),
        (_seeded, "seeds the random generator"),
        (_decides_by_value, "torch.export refuses the forward"),
    ],
    ids=["function", "hook", "seed", "value"],
)
def test_what_export_would_get_wrong_is_refused_with_its_place(forward: Any, problem: str) -> None:
    with pytest.raises(CaptureError, match=problem) as refused:
        fxlib.capture(forward, sample_inputs=[torch.randn(3, requires_grad=True)], how="export")
    assert __file__ in refused.value.where


def test_a_model_that_no_capture_takes_is_told_once_with_both_reasons() -> None:
    with pytest.raises(CaptureError, match=r"Tracing: .*\n?Export: .*torch.export refuses") as refused:
        fxlib.capture(_decides_by_value, sample_inputs=[torch.randn(3)])
    assert __file__ in refused.value.where


class Remembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        return x if len(x) > 2 else -x


def test_state_kept_in_python_is_refused_and_undone() -> None:
    model = Remembers()
    with pytest.raises(CaptureError, match="steps"):
        fxlib.capture(model, sample_inputs=[torch.randn(3)], how="export")
    assert not hasattr(model, "steps")


def test_samples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CaptureError, match="do not fit the forward"):
        fxlib.capture(Decides(), sample_inputs={"y": torch.randn(3)})
    with pytest.raises(CaptureError, match="is one tensor"):
        fxlib.capture(Decides(), sample_inputs=torch.randn(8, 4))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="no way to capture"):
        fxlib.capture(Decides(), how="guess")  # type: ignore[arg-type]
