"""What norms are left alone, with a reason, and what is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxlib
from fxlib.errors import FxlibWarning, PassError
from fxlib.recipes import recipes
from tests.models.nets import IMAGE, SOUND, applied, made, reasons


class Branching(nn.Module):
    """A convolution whose result is used beside its norm, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y) + y


class Writing(nn.Module):
    """A program that writes to a norm's statistics on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("statistics", self.norm.running_mean)
        self.statistics: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.statistics.add_(1.0)
        return self.norm(self.conv(x))


class Recording(nn.Module):
    """A program with a block of its own that records gradients, in whichever mode it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.conv(x)
        return self.norm(y)


class OwnStatistics(nn.Module):
    """A norm as a function, on statistics that it would update in training with nobody counting."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.mean, self.variance = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.conv(x), self.mean, self.variance, training=self.training)


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[0].register_full_backward_hook(lambda *_: None)
    return model


def _partly_training() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def _overflowing() -> nn.Module:
    model: Any = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, eps=0.0))
    with torch.no_grad():
        model[1].running_var.zero_()
    return model


DECLINED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "a hook on the layer": (_hooked, IMAGE, "OPAQUE_MODULE"),
    "a result used elsewhere": (Branching, IMAGE, "NORM_ALONE"),
    "no layer beside it": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), IMAGE, "NORM_ALONE"),
    "no statistics": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), IMAGE, "NORM_OF_BATCH",
    ),
    "zeros that are not shifted": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)), IMAGE, "NORM_BEFORE_PADDING",
    ),
    "borders of a transposed one": (
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 3)), IMAGE, "NORM_BEFORE_PADDING",
    ),
    "a weight that is written": (Writing, IMAGE, "WEIGHT_WRITTEN"),
    "statistics without a counter": (OwnStatistics, IMAGE, "WEIGHT_UNCOUNTED"),
    "channels of another dimension": (
        lambda: nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(4)), SOUND, "NORM_OTHER_DIMENSION",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DECLINED)
def test_what_cannot_be_folded_is_left_alone_and_says_why(case: str) -> None:
    build, inputs, reason = DECLINED[case]
    model = made(build())
    rewrite = applied(model, "fold_norms")
    assert reasons(rewrite, "fold_norms") == [reason]
    assert not rewrite.changed
    if case != "a weight that is written":
        with torch.no_grad():
            assert torch.equal(rewrite.module(inputs), model(inputs))


def test_a_program_that_records_gradients_by_itself_keeps_them() -> None:
    model = made(Recording())
    with torch.no_grad():
        assert reasons(applied(model, "fold_norms"), "fold_norms") == ["MODE_BLOCKS"]
    recorded_anyway = applied(model, "fold_norms")
    with torch.no_grad():
        assert recorded_anyway.module(IMAGE).requires_grad == model(IMAGE).requires_grad


def test_a_norm_in_training_mode_is_left_alone() -> None:
    model = made(_partly_training())
    model[1].train()  # type: ignore[index]
    assert reasons(applied(model, "fold_norms"), "fold_norms") == ["NORM_IN_TRAINING"]


def test_weights_that_would_not_be_finite_are_not_folded() -> None:
    model = _overflowing().eval()
    assert reasons(applied(model, "fold_norms"), "fold_norms") == ["NOT_FINITE"]


def test_training_mode_is_refused() -> None:
    graph = fxlib.capture(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(PassError, match="eval mode"):
        recipes.apply(graph, recipes.from_passes([("fold_norms", {})]))


def test_shapes_that_do_not_fit_are_an_error_that_says_where() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(6)).eval()
    graph = fxlib.capture(model)
    before = graph.code
    with pytest.raises(PassError, match=r"_1, 1.*6 channels, and the layer beside it 8"):
        recipes.apply(graph, recipes.from_passes([("fold_norms", {})]))
    assert graph.code == before


def test_missing_weights_are_an_error_that_says_which() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).eval()
    with pytest.raises(PassError, match=r"values of 0\.weight, and they are missing"):
        applied(model, "fold_norms")


def test_operators_of_python_are_not_taken_for_norms() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return operator.getitem(torch.split(x, 2, 1), 0) * 2

    rewrite = applied(Picks().eval(), "fold_norms")
    assert not rewrite.changed


def test_an_input_that_the_norm_refuses_is_refused_still() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    fast = fxlib.optimize(fxlib.capture(model), recipe="inference")
    with torch.no_grad(), pytest.warns(FxlibWarning), pytest.raises(ValueError, match="expected 4D input"):
        fast(torch.randn(3, 8, 8))
