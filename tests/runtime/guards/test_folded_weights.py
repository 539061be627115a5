"""A graph that holds values computed from weights stands in for its model only while these are what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import FxlibWarning, WireError
from fxlib.runtime.guards.folded_weights import marks_of
from tests.models.nets import made

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> nn.Module:
    return made(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))


def _write(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2.0)


def _load(model: Any) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _replace(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight * 2)


def _swap(model: Any) -> None:
    model[0].weight.data = model[0].weight.data * 2


@pytest.mark.parametrize("change", [_write, _load, _replace, _swap])
def test_weights_that_change_make_the_original_run(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    with torch.no_grad():
        before = fast(X)
        assert not torch.equal(before, torch.zeros_like(before))
        change(model)
        with pytest.warns(FxlibWarning, match="optimize the model again"):
            after = fast(X)
        assert torch.equal(after, model(X))
        assert not torch.allclose(after, before)
        again = fxlib.optimize(fxlib.capture(model), recipe="inference")
        torch.testing.assert_close(again(X), after)


def _train(model: Any) -> None:
    model.train()(X * 3 + 1)
    model.eval()


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_steps_of_fused_optimizers_are_changes_too(model: nn.Module, kind: Any) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    model(X).sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))


def test_statistics_of_a_norm_that_trained_on_are_changes_too(model: nn.Module) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    _train(model)
    with torch.no_grad(), pytest.warns(FxlibWarning, match="optimize the model again"):
        assert torch.equal(fast(X), model(X))


class OwnNorm(nn.Module):
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if self.training:
            return nn.functional.batch_norm(x, self.mean, self.var, self.weight, None, training=True)
        return (x - self.mean) * (self.weight * torch.rsqrt(self.var + 1e-5))


class Uncounted(nn.BatchNorm1d):
    """Has the counter of its base class, and does not count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=self.training)


@pytest.mark.parametrize("make", [OwnNorm, lambda: nn.Sequential(nn.Linear(4, 4), Uncounted(4))])
def test_statistics_that_no_norm_of_torchs_counts_are_changes_too(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    with torch.no_grad():
        fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
        x = torch.randn(8, 4) + 3
        before = fast(x)
        assert "folded" in str(fast.graph)
        for _ in range(9):
            model.train()(x)
        model.eval()
        with pytest.warns(FxlibWarning, match="optimize the model again"):
            assert torch.equal(fast(x), model(x))
        assert not torch.allclose(fast(x), before)


class WithNan(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, float("nan"), 1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.nan_to_num(self.scale) * 2)


def test_nan_that_stays_is_no_change() -> None:
    model = WithNan().eval()
    with torch.no_grad():
        fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
        assert "folded" in str(fast.graph)
        assert torch.equal(fast(torch.ones(2, 4)), model(torch.ones(2, 4)))
        assert not fxlib.usage(fast).original


def test_where_gradients_are_recorded_the_original_gives_them(model: nn.Module) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    fast(X).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_without_gradients_the_graph_runs_whatever_was_recorded_at_capture(model: nn.Module) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    with torch.no_grad():
        fast(X)
    assert not fxlib.usage(fast).original


def test_frozen_weights_give_inputs_their_gradient(model: nn.Module) -> None:
    model.requires_grad_(requires_grad=False)
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    one, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    fast(one).square().sum().backward()
    model(other).square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_a_deep_copy_relies_on_its_own_weights(model: nn.Module) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    copied = copy.deepcopy(fast)
    with torch.no_grad():
        expected = fast(X)
        _write(model)
        assert torch.equal(copied(X), expected)


def test_new_memory_at_an_old_address_is_not_what_was_there() -> None:
    def memory(value: float) -> torch.Tensor:  # as an allocator may give it: `model.half().float()` often gets it so
        numbers.fill(value)
        return torch.from_numpy(numbers)

    class Sine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(memory(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight.exp().sin()

    numbers = np.empty(3, np.float32)
    model, x = Sine().eval(), torch.zeros(3)
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    address = model.weight.data_ptr()
    model.weight.data = memory(2.0)
    assert model.weight.data_ptr() == address
    with torch.no_grad(), pytest.warns(FxlibWarning, match="optimize the model again"):
        assert torch.equal(fast(x), model(x))


def test_values_are_no_part_of_the_state(model: nn.Module) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    assert list(fast.state_dict()) == list(model.state_dict())
    assert {id(each) for each in fast.parameters()} == {id(each) for each in model.parameters()}


def test_values_from_elsewhere_are_those_of_the_weights_that_were_sent(model: nn.Module) -> None:
    sent = marks_of(model)
    with torch.no_grad():
        model[0].weight.mul_(1.0)  # type: ignore[index]
    late: Any = fxlib.optimize(fxlib.capture(model), recipe="inference")
    late._fxlib.weight_assumptions.since(sent)
    with torch.no_grad(), pytest.warns(FxlibWarning, match="optimize the model again"):
        assert torch.equal(late(X), model(X))


@pytest.mark.parametrize("write", [fxlib.save, fxlib.to_folder])
@pytest.mark.parametrize("change", [_write, _replace])
def test_a_module_whose_weights_have_changed_is_not_written(
    model: nn.Module, change: Callable[[nn.Module], None], write: Callable[..., None], tmp_path: Path
) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    change(model)
    with pytest.raises(WireError, match="optimize the model again"):
        write(fast, tmp_path / "written")
    assert not (tmp_path / "written").exists()


def test_a_file_on_a_model_with_other_weights_runs_the_model(model: nn.Module, tmp_path: Path) -> None:
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    fxlib.save(fast, tmp_path / "model.fxg")
    same, other = fxlib.load(tmp_path / "model.fxg", root=copy.deepcopy(model)), copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(same(X), fast(X))
        _write(other)
        unlike = fxlib.load(tmp_path / "model.fxg", root=other)
        with pytest.warns(FxlibWarning, match="optimize the model again"):
            assert torch.equal(unlike(X), other(X))


def test_without_an_original_weights_that_change_are_warned_of(model: nn.Module, tmp_path: Path) -> None:
    fxlib.save(fxlib.optimize(fxlib.capture(model), recipe="inference"), tmp_path / "model.fxg")
    alone = fxlib.load(tmp_path / "model.fxg")
    with torch.no_grad():
        before = alone(X)
        _load(alone)
        with pytest.warns(FxlibWarning, match="no original to run"):
            assert torch.equal(alone(X), before)


def test_a_sparse_buffer_is_no_hindrance() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("links", torch.eye(3).to_sparse())
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.get_buffer("links"), x) + self.weight.exp()

    model, x = Sparse().eval(), torch.randn(3, 3)
    assert list(marks_of(model)) == ["weight"]
    with torch.no_grad():
        fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
        assert torch.equal(fast(x), model(x))
