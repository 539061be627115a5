"""What every forward computes alike is computed once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxlib
from fxlib.passes.local.fold_constants import _ROUNDED_ONCE
from tests.models.nets import applied, called, changes, reasons

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Program(nn.Module):
    """A function as a module with a weight, a buffer and a table."""

    def __init__(self, body: Callable[[Program, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("places", torch.arange(8))
        self.places: Tensor
        self.table = nn.Embedding(8, 4)
        self.body = body

    def forward(self, x: Tensor) -> object:
        return self.body(self, x)


def _table(module: Program, x: Tensor) -> Tensor:
    return x + module.table(module.places[2:6])


def _gated(module: Program, x: Tensor) -> Tensor:
    return x @ (module.weight * torch.relu(module.weight))


def _sized(module: Program, x: Tensor) -> Tensor:
    return x.reshape(module.weight.shape[0], -1) * 2


def _mask(module: Program, x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(4, device="cpu") > 1, 0.0)


FOLDED = {"a lookup": _table, "work on weights": _gated, "a literal": _mask}


@pytest.mark.parametrize("case", FOLDED)
def test_values_of_constants_are_held(case: str) -> None:
    model = Program(FOLDED[case]).eval()
    rewrite = applied(model, "fold_constants", "dead_code")
    assert changes(rewrite, "fold_constants") == 1
    assert len(called(rewrite.module)) < len(called(fxlib.capture(model)))
    with torch.no_grad():
        assert torch.equal(rewrite.module(X), model(X))
    assert list(rewrite.module.state_dict()) == list(model.state_dict())


def _returned(module: Program, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, module.weight * 2


def _written(module: Program, x: Tensor) -> Tensor:
    twice = module.weight * 2
    twice.add_(1.0)
    return twice @ x


def _summed(module: Program, x: Tensor) -> Tensor:
    return x * module.weight.sum()


def _ambient(module: Program, x: Tensor) -> Tensor:
    return x * (module.places[:4] / 3)


KEPT = {
    "a value that is returned": (_returned, ["VALUE_ESCAPES"]),
    "a value that is written": (_written, ["VALUE_WRITTEN"]),
    "a sum": (_summed, ["SUM_ORDER"]),
    "a function": (lambda module, x: x * torch.sigmoid(module.weight), ["ROUNDED_OTHERWISE"]),
    "two roundings": (lambda module, x: x * torch.add(module.weight, module.weight, alpha=3), ["ROUNDED_OTHERWISE"]),
    "the default dtype": (_ambient, ["AMBIENT_DEFAULT"]),
    "noise": (lambda module, x: x + torch.rand_like(module.weight), []),
    "a view": (lambda module, x: x @ module.weight.t(), []),
    "a size": (_sized, []),
    "the default device": (lambda module, x: x + torch.arange(4), []),
    "a device move": (lambda module, x: x + module.weight.cpu(), ["AMBIENT_DEFAULT"]),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_other_values_are_computed_each_time(case: str) -> None:
    body, why = KEPT[case]
    model = Program(body).eval()
    rewrite = applied(model, "fold_constants")
    assert (changes(rewrite, "fold_constants"), reasons(rewrite, "fold_constants")) == (0, why)


def test_a_buffer_that_is_replaced_by_one_of_another_size_counts() -> None:
    with torch.no_grad():
        model = Program(lambda module, x: x / module.places.size(0)).eval()
        rewritten = applied(model, "fold_constants").module
        model.places = torch.arange(2 * len(model.places))
        assert torch.equal(rewritten(X), model(X))


def test_within_a_tolerance_functions_are_held_too() -> None:
    model = Program(lambda module, x: x * torch.sigmoid(module.weight)).eval()
    rewrite = applied(model, "fold_constants", bitwise=False)
    assert (changes(rewrite, "fold_constants"), rewrite.preserves) == (1, "tolerance")
    assert applied(model, "fold_constants").preserves == "bitwise"
    with torch.no_grad():
        torch.testing.assert_close(rewrite.module(X), model(X))


TAKES_TWO = frozenset(
    {
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "truediv", "true_divide"),
        "copysign",
    }
)
LIMITS = {"clamp": (-0.3, 0.3), "clip": (-0.3,), "clamp_min": (0.3,), "clamp_max": (0.7,), "threshold": (0.1, 0.2)}


def pointwise(name: str, x: Tensor, y: Tensor) -> Tensor:
    if name == "where":
        return torch.where(x > 0, x, y)
    function: Any = next(getattr(each, name) for each in (torch, F, operator) if hasattr(each, name))
    found: Tensor = function(x, y) if name in TAKES_TWO else function(x, *LIMITS.get(name, ()))
    return found


@pytest.mark.parametrize("name", sorted(_ROUNDED_ONCE))
def test_what_is_rounded_once_has_the_same_bits_among_others_and_alone(name: str) -> None:
    """Kernels take most numbers several at once, and the last ones of a thread's share one by one."""
    x, y = torch.randn(2, 999, generator=torch.Generator().manual_seed(1)) * 7
    pairs = zip(x.split(1), y.split(1), strict=True)
    alone = torch.cat([pointwise(name, *pair) for pair in pairs])
    assert torch.equal(pointwise(name, x, y).view(torch.int32), alone.view(torch.int32))


def test_no_more_memory_is_taken_than_allowed() -> None:
    model = Program(lambda module, x: x + (module.weight * 2).repeat(1000, 1, 1).select(0, 3)).eval()
    rewrite = applied(model, "fold_constants", max_bytes=1000)
    assert "TOO_LARGE" in reasons(rewrite, "fold_constants")
    huge = Program(lambda module, x: x + torch.zeros(1 << 50, dtype=torch.int8, device="cpu")[0]).eval()
    assert reasons(applied(huge, "fold_constants"), "fold_constants") == ["TOO_LARGE"]


def test_a_check_of_weights_stays_where_values_of_others_are_held() -> None:
    def body(module: Any, x: Tensor) -> Tensor:
        torch.index_select(module.weight, 0, module.limit)  # nothing uses it: it is there to raise
        return x * (module.scale * 2)

    model: Any = Program(body).eval()
    model.register_buffer("limit", torch.tensor([3]))
    model.register_buffer("scale", torch.ones(4))
    rewrite = applied(model, "fold_constants")
    assert changes(rewrite, "fold_constants") == 1
    with torch.no_grad():
        model.limit.fill_(9)
        for module in (model, rewrite.module):
            with pytest.raises((IndexError, RuntimeError), match="out of range"):
                module(X)


def test_a_weight_that_changes_makes_the_original_run() -> None:
    model = Program(_gated).eval()
    fast = applied(model, "fold_constants").module
    with torch.no_grad():
        model.weight.mul_(2.0)
    with torch.no_grad(), pytest.warns(fxlib.errors.FxlibWarning, match="optimize the model again"):
        assert torch.equal(fast(X), model(X))
