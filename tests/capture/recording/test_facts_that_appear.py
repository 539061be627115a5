"""What a class, a module or an object did not have at capture, and has later, where Python would look for it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import CaptureError

X = torch.linspace(-2, 2, 12).view(3, 4)
MODULE = "a_module_of_this_test"
Run: TypeAlias = Callable[[Any, torch.Tensor], torch.Tensor]


def kinds() -> Any:
    """Classes of a test's own, which it may change."""

    class Meta(type):
        pass

    class Named(metaclass=Meta):
        rate = 2.0

    class Number(int):
        pass

    return types.SimpleNamespace(meta=Meta, named=Named, number=Number)


class Model(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.kinds = run, kinds()
        self.kept, self.other, self.number = self.kinds.named(), self.kinds.named(), self.kinds.number(3)
        self.partial = functools.partial(torch.mul, other=2.0)
        self.module = types.ModuleType("made")
        self.module.__getattr__ = lambda _: 2.0  # type: ignore[method-assign]
        self.scalar = np.array(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def imports(_: Any, x: torch.Tensor) -> torch.Tensor:
    import a_module_of_this_test as found  # type: ignore[import-not-found]

    return x * float(found.rate)


def ninefold(_: Any, name: str) -> Any:
    return 9.0 if name == "rate" else object.__getattribute__(_, name)


FACTS: dict[str, tuple[Run, Callable[[Any], object]]] = {
    "how attributes are looked up": (
        lambda m, x: x * m.kept.rate,
        lambda m: setattr(m.kinds.named, "__getattribute__", ninefold),
    ),
    "a property of a class's class": (
        lambda m, x: x * m.kinds.named.rate,
        lambda m: setattr(m.kinds.meta, "rate", property(lambda _: 9.0)),
    ),
    "what a module makes up": (
        lambda m, x: x * m.module.rate,
        lambda m: setattr(m.module, "__getattr__", lambda _: 9.0),
    ),
    "an imported module": (imports, lambda _: sys.modules.__setitem__(MODULE, made_module(9.0))),
    "a product": (lambda m, x: x * (m.number * 2), lambda m: setattr(m.kinds.number, "__mul__", lambda *_: 9)),
    "an equality": (
        lambda m, x: x if m.kept == m.other else -x,
        lambda m: setattr(m.kinds.named, "__eq__", lambda *_: True),
    ),
    "a partial function": (
        lambda m, x: m.partial(x),
        lambda m: m.partial.__setstate__((torch.add, (), {"other": 2.0}, {})),
    ),
    "an array without dimensions": (lambda m, x: x * float(m.scalar), lambda m: m.scalar.__setitem__((), 9.0)),
}


def made_module(rate: float) -> types.ModuleType:
    made = types.ModuleType(MODULE)
    vars(made)["rate"] = rate
    return made


@pytest.mark.parametrize("fact", FACTS)
def test_what_python_would_find_sooner_makes_the_original_run(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, made_module(2.0))
    run, change = FACTS[fact]
    model = Model(run)
    captured = fxlib.capture(model)
    before = model(X)
    assert torch.equal(captured(X), before)
    assert not captured._fxlib.broken(grad_enabled=True)
    change(model)
    after = model(X)
    assert torch.equal(captured(X), after)
    assert not torch.equal(before, after)


def test_how_the_attributes_of_the_model_are_looked_up_is_watched() -> None:
    class Own(nn.Module):
        rate = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.rate

    captured = fxlib.capture(Own())
    assert torch.equal(captured(X), X * 2)
    Own.__getattribute__ = ninefold  # type: ignore[method-assign]
    assert torch.equal(captured(X), X * 9)


@pytest.mark.parametrize(
    "run", [lambda m, x: x * len(m.kinds.named.__subclasses__()), lambda _, x: x * len(np.geterr())]
)
def test_an_answer_that_depends_on_the_rest_of_the_program_is_refused(run: Run) -> None:
    with pytest.raises(CaptureError, match="may be another at each run") as refused:
        fxlib.capture(Model(run))
    assert __file__ in refused.value.where


def test_a_gradient_that_appears_is_noticed_where_the_forward_asked_whether_there_is_one() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2 if next(self.parameters()).grad is None else 1)

    model = Asks()
    captured, x = fxlib.capture(model), torch.ones(3)
    assert torch.equal(captured(x), x * 2)
    assert not fxlib.usage(captured).original
    model.weight.grad = torch.ones(3)
    assert torch.equal(captured(x), x)
