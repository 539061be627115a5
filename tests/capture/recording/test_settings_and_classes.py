"""What a forward reads of classes, contexts and torch's settings: noticed when it changes."""

from __future__ import annotations

import contextvars
import dataclasses
import decimal
import enum
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxlib

X = torch.linspace(-1, 1, 4)
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)


class Base:
    pass


class Other:
    pass


class Counting(type):
    def __len__(cls) -> int:
        return 2


class Model(nn.Module):
    """A model whose forward each test gives; all classes that it reads are its own."""

    def __init__(self, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.run = run
        make_enum: Any = enum.Enum
        make_pair: Any = typing.NamedTuple
        self.mode = make_enum("Mode", {"A": 1, "B": 2})
        self.kind: Any = type("Kind", (Base,), {})
        self.held = self.kind()
        self.counted: Any = Counting("Counted", (), {})
        self.settings: Any = dataclasses.make_dataclass("Settings", [("scale", float)])
        self.pair = make_pair("Pair", [("one", float), ("two", float)])
        self.pair.__new__.__defaults__ = (3.0,)
        self.function = lambda x, by=2.0: x * by
        self.context = contextvars.Context()
        self.context.run(SCALE.set, 2.0)
        self.number, self.array, self.tensor = decimal.Decimal("2.5"), np.ones(2) / 3, torch.ones(2) / 3

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def other_bases(model: Any) -> None:
    model.kind.__bases__ = (Other,)


def renamed(kind: Any) -> None:
    kind.__name__ = kind.__qualname__ = "OfQuiteAnotherLength"


backends: Any = torch.backends
TRAPS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], object]]] = {
    "a member of an enum by name": (
        lambda m, x: x * m.mode["A"].value,
        lambda m: setattr(m.mode.A, "_value_", 7),
    ),
    "members of an enum": (
        lambda m, x: x * sum(each.value for each in m.mode),
        lambda m: setattr(m.mode.B, "_value_", 7),
    ),
    "the number of members": (lambda m, x: x * len(m.mode), lambda m: m.mode._member_names_.append("A")),
    "a member by value": (
        lambda m, x: x * (2 if m.mode(1) is m.mode.A else 3),
        lambda m: m.mode._value2member_map_.update({1: m.mode.B}),
    ),
    "a member as text": (lambda m, x: x * len(str(m.mode.A)), lambda m: renamed(m.mode)),
    "an object as text": (lambda m, x: x * len(object.__repr__(m.held).split(" ")[0]), lambda m: renamed(m.kind)),
    "a method of a class's class": (lambda m, x: x * len(m.counted), lambda m: setattr(Counting, "__len__", seven)),
    "issubclass": (lambda m, x: x * (2 if issubclass(m.kind, Base) else 3), other_bases),
    "isinstance": (lambda m, x: x * (2 if isinstance(m.held, Base) else 3), other_bases),
    "names of a class": (lambda m, x: x * len(dir(m.kind)), lambda m: setattr(m.kind, "more", 1)),
    "names of an object": (lambda m, x: x * len(dir(m.held)), lambda m: setattr(m.kind, "more", 1)),
    "members by inspect": (lambda m, x: x * len(inspect.getmembers(m.kind)), lambda m: setattr(m.kind, "more", 1)),
    "an attribute by inspect": (
        lambda m, x: x * (2 if inspect.getattr_static(m.kind, "more", None) is None else 3),
        lambda m: setattr(m.kind, "more", 1),
    ),
    "hints of a class": (
        lambda m, x: x * len(typing.get_type_hints(m.settings)),
        lambda m: m.settings.__annotations__.update(more=int),
    ),
    "a default of a named tuple": (
        lambda m, x: x * m.pair(1.0).two,
        lambda m: setattr(m.pair.__new__, "__defaults__", (7.0,)),
    ),
    "a signature in another's place": (
        lambda m, x: x * len(inspect.signature(m.function).parameters),
        lambda m: setattr(m.function, "__signature__", inspect.Signature()),
    ),
    "a copy of the context": (lambda m, x: x * contextvars.copy_context().get(SCALE, 2.0), lambda m: SCALE.set(7.0)),
    "all of the context": (
        lambda m, x: x * dict(contextvars.copy_context().items()).get(SCALE, 2.0),
        lambda m: SCALE.set(7.0),
    ),
    "a context that is held": (lambda m, x: x * m.context[SCALE], lambda m: m.context.run(SCALE.set, 7.0)),
    "a run in a context": (
        lambda m, x: m.context.run(lambda: x * SCALE.get()),
        lambda m: m.context.run(SCALE.set, 7.0),
    ),
    "rounding": (
        lambda m, x: x * float(m.number.quantize(decimal.Decimal(1))),
        lambda m: setattr(decimal.getcontext(), "rounding", decimal.ROUND_UP),
    ),
    "the default dtype's bits": (
        lambda m, x: x * torch.finfo().bits,
        lambda m: torch.set_default_dtype(torch.float64),
    ),
    "a tensor of the default dtype": (
        lambda m, x: x * torch.Tensor([0.1]),
        lambda m: torch.set_default_dtype(torch.float64),
    ),
    "the seed": (lambda m, x: x * (torch.initial_seed() % 7), lambda m: torch.manual_seed(4)),
    "kinds of attention": (
        lambda m, x: x * (2 if backends.cuda.flash_sdp_enabled() else 3),
        lambda m: backends.cuda.enable_flash_sdp(False),
    ),
    "precision of products": (
        lambda m, x: x * (2 if backends.cuda.matmul.allow_tf32 else 3),
        lambda m: torch.set_float32_matmul_precision("medium"),
    ),
    "precision of sums in products": (
        lambda m, x: x * (2 if backends.cuda.matmul.allow_fp16_reduced_precision_reduction else 3),
        lambda m: setattr(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    ),
    "an array as text": (lambda m, x: x * len(str(m.array)), lambda m: np.set_printoptions(precision=2)),
    "a tensor as text": (lambda m, x: x * len(f"{m.tensor}"), lambda m: torch.set_printoptions(precision=2)),
}


def seven(_: object) -> int:
    return 7


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Put settings back, and the seed to one that is no other test's."""
    counted, random = Counting.__dict__["__len__"], torch.get_rng_state()
    torch.manual_seed(3)
    with decimal.localcontext():
        yield
    Counting.__len__ = counted  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float32)
    torch.set_rng_state(random)
    backends.cuda.enable_flash_sdp(True)
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    np.set_printoptions(precision=8)
    torch.set_printoptions(profile="default")


@pytest.mark.parametrize("what", TRAPS)
def test_what_changed_since_the_capture_shows_in_the_next_step(what: str) -> None:
    run, change = TRAPS[what]
    model = Model(run)

    def in_a_context_of_its_own() -> None:
        captured = fxlib.capture(model)
        before = captured(X)
        assert torch.equal(before, model(X))
        assert not captured._fxlib.broken(grad_enabled=True)
        change(model)
        found, expected = captured(X), model(X)
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)
        assert not torch.equal(expected.float(), before) or expected.dtype is not before.dtype

    contextvars.copy_context().run(in_a_context_of_its_own)
