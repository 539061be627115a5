"""A model whose forward is given to it, and that has state of every kind for it to read."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import nn

import fxlib
from fxlib.runtime import CapturedModule

X = torch.linspace(-2, 2, 12).view(3, 4)
HOW = pytest.mark.parametrize("how", ["trace", "export"])
Run: TypeAlias = Callable[[Any, torch.Tensor], Any]


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    mask: Any = None
    mode: Mode = Mode.PLAIN
    dtype: torch.dtype = torch.float32
    bias: dataclasses.InitVar[int] = 0


class Plain:
    shared = 2.0

    def __init__(self) -> None:
        self.value = 2.0
        self.parts = {"a": [1.0, 2.0]}
        self.__dict__["hidden"] = 3.0

    @property
    def twice(self) -> float:
        return self.value * 2

    def __getattr__(self, name: str) -> Any:
        if name == "computed":
            return self.hidden * 2
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.parts["a"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


class Heir(Plain):
    shared = 4.0


class Asked:
    """Hears of all that is asked of it."""

    def __init__(self) -> None:
        self.value = 2.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("value" if name == "factor" else name)


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


class Described:
    """A descriptor that keeps its value under another name."""

    def __get__(self, owner: Any, _: Any = None) -> Any:
        return owner.__dict__["_kept"] if owner is not None else self


class Tripled(Plain):
    @property
    def twice(self) -> float:
        return self.value * 3


class Base:
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Derived(Base):
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x)


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Model(nn.Module):
    described = Described()
    level = 5.0

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.block = nn.Linear(4, 4), Block()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("mean", torch.full((4,), 2.0))
        self.register_parameter("gain", None)
        self.scale, self.name = 2.0, "scale"
        self.plain, self.slots, self.config, self.heir, self.asked = Plain(), Slots(), Config(), Heir(), Asked()
        self.options = type("Options", (), {})()
        self.sizes, self.table, self.names = [1.0, 2.0], {"a": 2.0}, {"a"}
        self.nested = {"outer": [{"inner": 2.0}]}
        self.array, self.offset = np.array([1.0, 2.0]), torch.full((4,), 2.0)
        self.activation, self.partial = torch.tanh, functools.partial(torch.mul, 2.0)
        self.closed = closed(2.0)
        self.threshold, self.graded = torch.tensor(1.0), nn.Parameter(torch.ones(4))
        self.graded.grad = torch.ones(4)
        self._kept, self._run = 2.0, [run]

    def forward(self, x: torch.Tensor) -> Any:
        return self._run[0](self, self.linear(x))


class Sized(Model):
    """A model that tracing does not take."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x if x.shape[0] > 1 else -x)


def captured(run: Run, how: str) -> tuple[Model, CapturedModule]:
    torch.manual_seed(0)
    if how == "trace":
        return (model := Model(run)), fxlib.capture(model, how="trace")
    return (model := Sized(run)), fxlib.capture(model, sample_inputs=[X], how="export")


def closed(scale: float) -> Callable[..., Any]:
    def apply(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    apply.change = change  # type: ignore[attr-defined]
    return apply
