"""A user's own module: a model, its step, and rules for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxlib
from fxlib import Rule, Workload


class Gates(nn.Module):
    """A layer whose result gates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return F.gelu(y.sigmoid() * y)


def made() -> tuple[nn.Module, Workload]:
    """The model and its step."""
    return fxlib.capture(Gates()), Workload.describe([torch.randn(2, 4)], mode="forward")


def _gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _silu(x: Tensor) -> Tensor:
    return F.silu(x)


def rules(guard: str | None = "floating_point") -> list[Rule]:
    """What to rewrite in it."""
    return [Rule(_gate, _silu, guard, name="silu")]


def any_rules() -> list[Rule]:
    """The same, where nothing is known of dtypes."""
    return rules(guard=None)


def no_rules() -> list[Rule]:
    """None."""
    return []


def no_rule() -> list[Rule]:
    """A pattern and a replacement that disagree."""
    return [Rule(lambda x: x.exp(), lambda x, y: x + y, name="mine")]
