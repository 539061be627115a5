"""What every forward computes alike is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxlib
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
    return x @ (module.weight * torch.sigmoid(module.weight))


def _sized(module: Program, x: Tensor) -> Tensor:
    return x.reshape(module.weight.shape[0], -1) * 2


def _mask(module: Program, x: Tensor) -> Tensor:
    return x.masked_fill(torch.arange(4, device="cpu") > 1, 0.0)


FOLDED = {"a lookup": _table, "work on weights": _gated, "a size": _sized, "a literal": _mask}


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
    "the default dtype": (_ambient, ["AMBIENT_DEFAULT"]),
    "noise": (lambda module, x: x + torch.rand_like(module.weight), []),
    "a view": (lambda module, x: x @ module.weight.t(), []),
    "the default device": (lambda module, x: x + torch.arange(4), []),
    "a device move": (lambda module, x: x + module.weight.cpu(), ["AMBIENT_DEFAULT"]),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_other_values_are_computed_each_time(case: str) -> None:
    body, why = KEPT[case]
    model = Program(body).eval()
    rewrite = applied(model, "fold_constants")
    assert (changes(rewrite, "fold_constants"), reasons(rewrite, "fold_constants")) == (0, why)


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
