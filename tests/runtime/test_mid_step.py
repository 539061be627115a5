"""Code of the program's own changes in mid-step what the forward reads: that very step is the original's, too."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.rpc import rpc_sync

import fxlib
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards import dict_entries
from tests.runtime.gradients.pushing import log
from tests.runtime.remote_functions import NAME, read

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]
ROWS, X = torch.tensor([1, 2]), torch.linspace(-1, 1, 6).reshape(2, 3)
CONTRACTS = {f"{NAME}:read": fxlib.Contract(reads=frozenset({"t"}), gradient=f"{NAME}:take_gradient")}
THIS = sys.modules[__name__]
RATE = 2.0
ARMED: list[Callable[[], object]] = []
"""What the program's code does the next times that it runs."""


def touch() -> None:
    if ARMED:
        ARMED.pop(0)()


@torch.fx.wrap
def whole(x: torch.Tensor) -> torch.Tensor:
    touch()
    return x * 1


class Same(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        touch()
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0]


class Leaf(nn.Module):
    """Draws, writes to a buffer, and counts: none of which may happen twice."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        touch()
        self.calls += 1
        return x * torch.rand(())


class Answer:
    def get(self, x: torch.Tensor) -> torch.Tensor:
        touch()
        return x * 3


def answer() -> list[Answer]:
    return [Answer()]


class Meter:
    def update(self, x: torch.Tensor) -> torch.Tensor:
        touch()
        return x * 1


class Config:
    scale, depth = 1.0, 4

    def __init__(self) -> None:
        self.depth = 1


def double(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by


def closure() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    amount = 1.0

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + amount

    def put(value: float) -> None:
        nonlocal amount
        amount = value

    return add, put


class Model(nn.Module):
    mean: torch.Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.rate, self.extra = way, 2.0, False
        self.table, self.items, self.names = {"a": 1.0}, [1.0, 2.0], {"x"}
        self.config, self.counted = Config(), [None]
        self.add, self.put = closure()
        self.leaf, self.lin, self.drop, self.norm = Leaf(), nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.ones(3))

    def own(self, x: torch.Tensor, meter: Any) -> Any:
        if self.way == "a function":
            return whole(x)
        if self.way == "an autograd function":
            return Same.apply(x)  # type: ignore[no-untyped-call]
        if self.way == "a module":
            return self.leaf(x)
        if self.way == "an argument":
            return meter.update(x)
        return rpc_sync("ps1", answer)[0].get(x)

    def facts(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.rate * RATE * self.scale + self.mean * len(self.counted)
        x = x + sum(self.items) + self.table.get("a", 5.0) + self.table.get("b", 0.0) + ("y" in self.names)
        x = double(self.add(x)) * self.config.depth * self.config.scale * getattr(self.config, "more", 1.0)
        for layer in self.layers:
            x = layer(x)
        if self.training:
            x = self.drop(x)
        return x if next(self.norm.parameters()).requires_grad else x.detach() + x

    def forward(self, rows: torch.Tensor, x: torch.Tensor, meter: Any) -> Any:
        hidden = self.norm(self.drop(self.facts(x))) + rpc_sync("ps0", read, args=("a", rows)).sum()
        y = self.own(hidden, meter)
        if self.extra:  # a value that the graph has not kept for itself, and a call that it does not make
            y = y + hidden + rpc_sync("ps1", read, args=("c", rows)).mean()
        z = self.own(self.facts(y), meter)
        return z + rpc_sync("ps0", read, args=("b", rows)).mean() * self.rate + self.facts(z).mean()


def _no_grad(_: Model) -> None:
    torch.set_grad_enabled(False)


CHANGES: dict[str, Callable[[Model], object]] = {
    "an attribute": lambda m: setattr(m, "rate", 3.0),
    "a flag by which it decides": lambda m: setattr(m, "extra", True),
    "an attribute of an object that is gone": lambda m: delattr(m.config, "depth"),
    "an attribute that was not there": lambda m: setattr(m.config, "more", 1.5),
    "an attribute of a class": lambda m: setattr(type(m.config), "scale", 0.5),
    "the class of an object": lambda m: setattr(m.config, "__class__", type("Other", (Config,), {"scale": 0.25})),
    "a global": lambda _: setattr(THIS, "RATE", 0.5),
    "a function": lambda _: setattr(THIS, "double", lambda x: x * 7),
    "a default argument": lambda _: setattr(double, "__defaults__", (9.0,)),
    "a closure": lambda m: m.put(4.0),
    "an entry": lambda m: m.table.update(a=4.0),
    "a new entry": lambda m: m.table.update(b=4.0),
    "an entry that is gone": lambda m: m.table.pop("a"),
    "an element": lambda m: m.items.append(3.0),
    "a member of a set": lambda m: m.names.add("y"),
    "a length": lambda m: m.counted.append(None),
    "a smaller length": lambda m: m.counted.clear(),
    "the mode": lambda m: m.eval(),
    "the mode of a module inside": lambda m: m.drop.eval(),
    "a module": lambda m: setattr(m, "norm", nn.BatchNorm1d(3, momentum=0.5)),
    "a longer list of modules": lambda m: m.layers.append(nn.Linear(3, 3)),
    "a parameter": lambda m: setattr(m, "scale", nn.Parameter(torch.tensor(2.5))),
    "a buffer": lambda m: setattr(m, "mean", torch.full((3,), 2.0)),
    "a buffer in place": lambda m: m.mean.add_(1),
    "a frozen parameter": lambda m: m.norm.weight.requires_grad_(False),
    "a hook": lambda m: m.layers[0].register_forward_hook(lambda *given: given[2] * 2),
    "a forward": lambda m: setattr(m.layers[0], "forward", lambda x: x * 5),
    "a method": lambda m: setattr(m, "facts", types.MethodType(lambda self, x: x * self.rate, m)),
    "all entries": lambda m: m.table.clear(),
    "grad mode": _no_grad,
}


@pytest.fixture
def put_back() -> Iterator[Callable[[], None]]:
    kept = RATE, double, double.__defaults__
    yield lambda: _put_back(kept)
    _put_back(kept)


def _put_back(kept: tuple[Any, ...]) -> None:
    THIS.RATE, THIS.double = kept[:2]  # type: ignore[attr-defined]
    double.__defaults__ = kept[2]
    Config.scale = 1.0
    ARMED.clear()
    torch.set_grad_enabled(True)


def _steps(way: str, changes: Sequence[str], *, original: bool) -> Iterator[list[Any]]:
    """Run two steps, in the first of which the program's code changes something, and yield what each did."""
    torch.manual_seed(0)
    model = Model(way)
    module: CapturedModule = fxlib.capture(model, leaf_modules=(Leaf,), contracts=CONTRACTS)
    if original:
        module._fxlib.changed_in_step = "it always runs"
    torch.manual_seed(1)
    for server in ("ps0", "ps1"):
        log(server)
    for index in range(2):
        if index == 0:
            ARMED.extend(functools.partial(CHANGES[each], model) for each in changes)
        result = module(ROWS, X, Meter())
        if result.requires_grad:
            result.sum().backward()
        fxlib.push_gradients(module)
        torch.set_grad_enabled(True)
        gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
        state = [each.clone() for each in model.state_dict().values()]
        yield [result.detach(), *gradients, *state, torch.get_rng_state(), log("ps0"), log("ps1")]


NAMES = list(CHANGES)
WAYS = ("a function", "an autograd function", "a module", "an argument", "a remote result")


PAIRS = list(zip(NAMES[::2], NAMES[1::2], strict=True))
CASES = [(WAYS[index % len(WAYS)], pair) for index, pair in enumerate(PAIRS)]


@pytest.mark.parametrize("way, changes", CASES, ids=[" ".join((way, *both)) for way, both in CASES])
def test_a_step_in_which_the_programs_code_changes_what_the_forward_reads_is_the_originals(
    way: str, changes: tuple[str, str], put_back: Callable[[], None]
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        expected = list(_steps(way, changes, original=True))
        put_back()
        told.clear()
        found = list(_steps(way, changes, original=False))
    assert not [each for each in told if "could not be made" in str(each.message)], told[0].message
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for index, (now, was) in enumerate(zip(one, other, strict=True)):
            same = torch.equal(now, was) if isinstance(now, torch.Tensor) else now == was
            assert same, (number, index, now, was)


def test_the_checks_of_a_step_in_which_nothing_is_written_to_compare_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    holds = dict_entries._Comparison.holds

    def counted(comparison: Any) -> bool:
        compared.append(comparison)
        return holds(comparison)

    monkeypatch.setattr(dict_entries._Comparison, "holds", counted)
    module: CapturedModule = fxlib.capture(Model("a module"), leaf_modules=(Leaf,), contracts=CONTRACTS)
    for step in range(3):
        compared.clear()
        module(ROWS, X, Meter())
        assert bool(compared) == (step == 0)
    assert module._fxlib.graphs.usage().original == {}
