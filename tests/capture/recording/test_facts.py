"""Each fact of Python's that a capture has used is checked before each run: what changes one makes the original run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torchs

import fxlib
from fxlib.capture import api
from fxlib.capture.recording.recorder import Recorder
from fxlib.errors import CaptureError, FxlibWarning
from tests.capture.recording.stateful_model import (
    HOW,
    Base,
    Block,
    Config,
    Derived,
    Heir,
    Mode,
    Model,
    Plain,
    Run,
    Tripled,
    X,
    captured,
)

SCALE = 2.0
SETTINGS: dict[str, Any] = {"scale": 2.0, "names": ["a", "b"]}
OPTIONS = types.SimpleNamespace(scale=2.0)


def defaulted(x: torch.Tensor, factor: float = 2.0, *, more: float = 1.0) -> torch.Tensor:
    return x * factor + more


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) * SETTINGS["scale"]

    return wrapper


@wrapped
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x + SCALE


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: globals().__setitem__(name, value)


def by_default(m: Any, x: torch.Tensor) -> Any:
    return x if getattr(m, "extra", None) is None else x * m.extra


def caught(m: Any, x: torch.Tensor) -> Any:
    try:
        return x * m.extra
    except AttributeError:
        return x


def joined(m: Any, x: torch.Tensor) -> Any:
    for layer in m.layers:
        x = layer(x)
    return x


def matched(m: Any, x: torch.Tensor) -> Any:
    match m.config:
        case Config(scale=2.0):
            return x
        case _:
            return -x


def entered(m: Any, x: torch.Tensor) -> Any:
    with contextlib.nullcontext(m.table["a"]) as factor:
        return x * factor


def generated(m: Any, x: torch.Tensor) -> Any:
    return x * sum(value for value in m.sizes)


Change: TypeAlias = Callable[[Any], object]
FACTS: dict[str, tuple[Run, Change]] = {
    "a number": (lambda m, x: x * m.scale, put("scale", 3.0)),
    "the type of a number": (lambda m, x: x * (2 if isinstance(m.scale, float) else 3), put("scale", 2)),
    "a number by a computed name": (lambda m, x: x * getattr(m, m.name), put("scale", 3.0)),
    "the name itself": (lambda m, x: x * getattr(m, m.name), put("name", "level")),
    "a number behind a default": (by_default, put("extra", 3.0)),
    "an attribute that was absent": (lambda m, x: x * 2 if hasattr(m, "extra") else x, put("extra", 3.0)),
    "an attribute whose absence was caught": (caught, put("extra", 3.0)),
    "an attribute in vars()": (lambda m, x: x * vars(m)["scale"], put("scale", 3.0)),
    "an attribute in __dict__": (lambda m, x: x * m.__dict__.get("scale"), put("scale", 3.0)),
    "an attribute of the class": (lambda m, x: x * m.level, lambda _: setattr(Model, "level", 3.0)),
    "one that hides that of the class": (lambda m, x: x * m.level, put("level", 3.0)),
    "a descriptor's": (lambda m, x: x * m.described, put("_kept", 3.0)),
    "a plain object's": (lambda m, x: x * m.plain.value, lambda m: setattr(m.plain, "value", 3.0)),
    "a property's": (lambda m, x: x * m.plain.twice, lambda m: setattr(m.plain, "value", 3.0)),
    "one made by __getattr__": (lambda m, x: x * m.plain.computed, lambda m: setattr(m.plain, "hidden", 4.0)),
    "a plain class's": (lambda m, x: x * m.plain.shared, lambda _: setattr(Plain, "shared", 3.0)),
    "one of the class above": (lambda m, x: x * super(Heir, m.heir).shared, lambda _: setattr(Plain, "shared", 3.0)),
    "one made by __getattribute__": (lambda m, x: x * m.asked.factor, lambda m: setattr(m.asked, "value", 3.0)),
    "one that a class may compute": (
        lambda m, x: x * getattr(m.options, "rate", 1.0),
        lambda m: setattr(type(m.options), "__getattr__", lambda *_: 3.0),
    ),
    "another plain object": (lambda m, x: m.plain(x), put("plain", lambda x: x)),
    "the truth of an object": (lambda m, x: x if m.plain else -x, lambda m: m.plain.parts["a"].clear()),
    "the class of an object": (lambda m, x: x * m.plain.twice, lambda m: setattr(m.plain, "__class__", Tripled)),
    "the class of a part": (lambda m, x: m.block(x), lambda m: setattr(m.block, "__class__", nn.Identity)),
    "a method by super": (lambda _, x: Derived().scaled(x), lambda _: setattr(Base, "scaled", lambda _, x: x)),
    "a slot": (lambda m, x: x * m.slots.value, lambda m: setattr(m.slots, "value", 3.0)),
    "a config's": (lambda m, x: x * m.config.scale, lambda m: setattr(m.config, "scale", 3.0)),
    "a config's None": (
        lambda m, x: x if m.config.mask is None else x * m.config.mask,
        lambda m: setattr(m.config, "mask", 3.0),
    ),
    "an enum": (
        lambda m, x: x if m.config.mode is Mode.PLAIN else -x,
        lambda m: setattr(m.config, "mode", Mode.DOUBLE),
    ),
    "a dtype": (lambda m, x: x.to(m.config.dtype), lambda m: setattr(m.config, "dtype", torch.float64)),
    "a config as a dict": (
        lambda m, x: x * dataclasses.asdict(m.config)["scale"],
        lambda m: put("scale", 3.0)(m.config),
    ),
    "a pattern": (matched, lambda m: setattr(m.config, "scale", 3.0)),
    "an element": (lambda m, x: x * m.sizes[1], lambda m: m.sizes.__setitem__(1, 3.0)),
    "a length": (lambda m, x: x * len(m.sizes), lambda m: m.sizes.append(3.0)),
    "a sum": (lambda m, x: x * sum(m.sizes), lambda m: m.sizes.append(3.0)),
    "a generator's sum": (generated, lambda m: m.sizes.append(3.0)),
    "a star": (lambda m, x: x * max(*m.sizes), lambda m: m.sizes.append(3.0)),
    "unpacking": (lambda m, x: next(x * a + b for a, b in [m.sizes]), lambda m: m.sizes.reverse()),
    "an order": (lambda m, x: x * next(reversed(m.sizes)), lambda m: m.sizes.reverse()),
    "an entry": (lambda m, x: x * m.table["a"], lambda m: m.table.update(a=3.0)),
    "an entry by get": (lambda m, x: x * m.table.get("b", 2.0), lambda m: m.table.update(b=3.0)),
    "a key": (lambda m, x: -x if "b" in m.table else x, lambda m: m.table.update(b=3.0)),
    "keys": (lambda m, x: x * len(list(m.table)), lambda m: m.table.update(b=3.0)),
    "items": (lambda m, x: [x * v for _, v in m.table.items()][-1], lambda m: m.table.update(b=3.0)),
    "a set": (lambda m, x: -x if "b" in m.names else x, lambda m: m.names.add("b")),
    "a truth": (lambda m, x: -x if m.table else x, lambda m: m.table.clear()),
    "a comparison": (lambda m, x: -x if m.sizes == [1.0, 2.0] else x, lambda m: m.sizes.append(3.0)),
    "a nest": (
        lambda m, x: x * m.nested["outer"][0]["inner"],
        lambda m: m.nested["outer"][0].update(inner=3.0),
    ),
    "an array": (lambda m, x: x * float(m.array.sum()), lambda m: m.array.__setitem__(0, 7.0)),
    "a tensor's element": (lambda m, x: x if m.threshold.item() > 0 else -x, lambda m: m.threshold.fill_(-1)),
    "a module added to a list": (joined, lambda m: m.layers.append(nn.Linear(4, 4))),
    "modules in another order": (joined, lambda m: m.layers.insert(0, m.layers.pop(1))),
    "the number of modules": (lambda m, x: x * len(m.layers), lambda m: m.layers.append(nn.Linear(4, 4))),
    "a module by slice": (lambda m, x: m.layers[-1:][0](x), lambda m: m.layers.append(nn.Linear(4, 4))),
    "children": (lambda m, x: x * len(list(m.children())), lambda m: m.add_module("more", nn.Linear(4, 4))),
    "a parameter that was None": (lambda m, x: x if m.gain is None else x * m.gain, put("gain", nn.Parameter(X[0]))),
    "a buffer made None": (lambda m, x: x if m.mean is None else x * m.mean, put("mean", None)),
    "a plain tensor made None": (lambda m, x: x if m.offset is None else x * m.offset, put("offset", None)),
    "which parameters are trained": (
        lambda m, x: x * sum(1 for p in m.parameters() if p.requires_grad),
        lambda m: m.linear.weight.requires_grad_(False),
    ),
    "a gradient that was there": (
        lambda m, x: x if m.graded.grad is None else -x,
        lambda m: setattr(m.graded, "grad", None),
    ),
    "a function": (lambda m, x: m.activation(x), put("activation", torch.sigmoid)),
    "a partial function": (lambda m, x: m.partial(x), put("partial", functools.partial(torch.mul, 3.0))),
    "a closure": (lambda m, x: m.closed(x), lambda m: m.closed.change(3.0)),
    "a method replaced": (lambda m, x: x * len(m.plain), lambda _: setattr(Plain, "__len__", lambda _: 5)),
    "a method on an instance": (lambda m, x: x * len(m.extra_repr()), put("extra_repr", lambda: "x")),
    "a global": (lambda _, x: x * SCALE, set_global("SCALE", 3.0)),
    "a global dict": (lambda _, x: x * SETTINGS["scale"], lambda _: SETTINGS.update(scale=3.0)),
    "a global list": (lambda _, x: x * len(SETTINGS["names"]), lambda _: SETTINGS["names"].append("c")),
    "a global namespace": (lambda _, x: x * OPTIONS.scale, lambda _: setattr(OPTIONS, "scale", 3.0)),
    "a global function": (lambda _, x: decorated(x), set_global("decorated", torch.neg)),
    "a global of a helper's": (lambda _, x: decorated(x), set_global("SCALE", 3.0)),
    "a global of a wrapper's": (lambda _, x: decorated(x), lambda _: SETTINGS.update(scale=3.0)),
    "a default": (lambda _, x: defaulted(x), lambda _: setattr(defaulted, "__defaults__", (3.0,))),
    "a keyword's default": (lambda _, x: defaulted(x), lambda _: defaulted.__kwdefaults__.update(more=3.0)),  # type: ignore[union-attr]
    "a function of another module's": (
        lambda _, x: nn.functional.relu(x),
        lambda _: setattr(nn.functional, "relu", torch.neg),
    ),
    "the default dtype": (
        lambda _, x: x if torch.get_default_dtype() is torch.float32 else -x,
        lambda _: torch.set_default_dtype(torch.float64),
    ),
    "a hook for all modules": (joined, lambda _: torchs.register_module_forward_hook(lambda *a: a[2] * 2)),
    "a part's forward": (lambda m, x: m.block(x), lambda _: setattr(Block, "forward", lambda _, x: x)),
    "a mapped function": (
        lambda m, x: [*map(lambda layer: layer(x) * SCALE, m.layers)][-1],  # noqa: C417 - a function that C calls
        set_global("SCALE", 3.0),
    ),
    "a sorting key": (
        lambda m, x: x * min(m.sizes, key=lambda v: v * SCALE),
        set_global("SCALE", -1.0),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    state = {name: globals()[name] for name in ("SCALE", "decorated")}
    settings, hooks = {**SETTINGS, "names": ["a", "b"]}, dict(torchs._global_forward_hooks)
    forward, length, relu, scaled = Block.forward, Plain.__len__, nn.functional.relu, Base.scaled
    yield
    globals().update(state)
    SETTINGS.update(settings)
    OPTIONS.scale, Plain.shared, Model.level, nn.functional.relu = 2.0, 2.0, 5.0, relu
    Block.forward, Base.scaled = forward, scaled  # type: ignore[method-assign]
    Plain.__len__ = length  # type: ignore[method-assign]
    defaulted.__defaults__, defaulted.__kwdefaults__ = (2.0,), {"more": 1.0}
    torchs._global_forward_hooks.clear()
    torchs._global_forward_hooks.update(hooks)
    torch.set_default_dtype(torch.float32)


NOT_EXPORTED = {"a gradient that was there"}


@pytest.mark.slow
@HOW
@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_that_changes_after_the_capture_makes_the_original_run(fact: str, how: str) -> None:
    run, change = FACTS[fact]
    if how == "export" and fact in NOT_EXPORTED:
        with pytest.raises(CaptureError, match=r"test_facts.py:\d+"):
            captured(run, how)
        return
    model, module = captured(run, how)
    before = model(X)
    assert torch.equal(module(X), before)
    assert not module._fxlib.broken(grad_enabled=True)
    change(model)
    after = model(X)
    assert torch.equal(module(X), after)
    assert before.dtype != after.dtype or not torch.equal(before, after)
    assert module._fxlib.broken(grad_enabled=True)


def test_a_capture_asks_no_object_for_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def counted(*args: Any) -> Recorder:
        attempts.append(args)
        return Recorder(*args)

    monkeypatch.setattr(api, "Recorder", counted)
    fxlib.capture(Model(FACTS["one made by __getattribute__"][0]))
    assert len(attempts) == 1


COUNTED: dict[str, Run] = {
    "a list": lambda m, x: x * len(m.sizes),
    "a dict": lambda m, x: x * len(m.table),
    "a truth": lambda m, x: x if m.table and m.sizes else -x,
}


@pytest.mark.parametrize("kind", COUNTED)
def test_what_is_only_counted_may_hold_other_things(kind: str) -> None:
    module = fxlib.capture(model := Model(COUNTED[kind]))

    model.sizes[0], model.table["a"] = 5.0, 5.0

    assert not module._fxlib.broken(grad_enabled=True)
    assert torch.equal(module(X), model(X))


@pytest.mark.slow
def test_a_large_container_that_each_run_would_compare_is_warned_of_with_its_line() -> None:
    model: Any = Model(lambda m, x: x * sum(m.large))
    model.large = [1.0] * 30_000

    with pytest.warns(FxlibWarning, match=r"test_facts.py:\d+: .* a list of 30,000 entries.* keep them in a tuple"):
        fxlib.capture(model)
    model.large = tuple(model.large)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxlib.capture(model)
    model.large = list(model.large)
    model._run = [lambda m, x: x * m.large[0] if len(m.large) > 3 else x]
    with pytest.warns(FxlibWarning, match="30,000"):
        fxlib.capture(model)


def test_a_list_of_equal_numbers_is_what_it_was_and_is_compared_by_identity_from_then_on() -> None:
    module = fxlib.capture(model := Model(lambda m, x: x * sum(m.sizes)))
    facts = module._fxlib.conditions.python

    model.sizes[:] = [float("1"), float("2")]

    assert not module._fxlib.broken(grad_enabled=True)
    assert not module._fxlib.broken(grad_enabled=True)
    assert facts._columns is not None


class Beside(nn.Dropout):
    factor = 1.0


class Doubles(nn.Dropout):
    factor = 2.0


BESIDE: dict[str, tuple[Callable[[Any], float], Callable[[Any], object]]] = {
    "flag": (lambda m: 2.0 if m.training else 1.0, lambda m: m.eval()),
    "class": (lambda m: 2.0 if isinstance(m, Doubles) else 1.0, lambda m: setattr(m, "__class__", Doubles)),
    "attribute of its class": (lambda m: m.factor, lambda m: setattr(m, "__class__", Doubles)),
    "weights of its own": (
        lambda m: float(len(m._flat_weights)) if isinstance(m, nn.RNNBase) else 1.0,
        lambda m: m._flat_weights.pop(),
    ),
}


@pytest.mark.filterwarnings("ignore:the original forward")
@pytest.mark.parametrize("asked", BESIDE)
@pytest.mark.parametrize("held", ["global", "list"])
def test_what_is_asked_of_a_module_that_the_model_does_not_have_is_a_fact(asked: str, held: str) -> None:
    answer, change = BESIDE[asked]
    beside: Any = nn.GRU(4, 4) if asked == "weights of its own" else Beside()
    model: Any = Model(lambda m, x: x * answer(m.beside[0]))
    model.beside = [beside]
    program: Any = model if held == "list" else lambda x: x * answer(beside)
    captured = fxlib.capture(program)
    before = captured(X)
    change(beside)
    assert torch.equal(captured(X), program(X))
    assert not torch.equal(captured(X), before)


@pytest.mark.filterwarnings("ignore:the original forward")
@pytest.mark.parametrize("found, other", [([1.0, 0.0], [1.0, -0.0]), (complex(1.0, 0.0), complex(1.0, -0.0))])
def test_a_zero_of_the_other_sign_is_another_element_of_a_tensor_that_was_asked_for_its_own(
    found: Any, other: Any
) -> None:
    model: Any = Model(lambda m, x: x * (2.0 if "-" in str(m.asked.tolist()) else 1.0))
    model.asked = torch.tensor(found)
    captured = fxlib.capture(model)
    for elements in (found, other, found):
        model.asked.copy_(torch.tensor(elements))
        assert torch.equal(captured(X), model(X))
    assert fxlib.usage(captured).graphs == {"main": 2}


def test_what_a_forward_hears_of_its_own_code_is_no_change_of_it() -> None:
    def count(_: Any, x: torch.Tensor) -> Any:
        return x * defaulted.__code__.co_argcount

    code = defaulted.__code__
    model = Model(count)
    module = fxlib.capture(model)
    assert torch.equal(module(X), model(X))
    assert defaulted.__code__ is code
    assert not module._fxlib.broken(grad_enabled=True)


def test_the_order_that_an_ordered_dict_keeps_by_itself_is_watched() -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = OrderedDict(first=2.0, second=3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x * factor**place for place, factor in enumerate(self.factors.values())]).sum(0)

    model = Ordered()
    module = fxlib.capture(model)
    assert torch.equal(module(X), X * 4)
    model.factors.move_to_end("first")
    assert torch.equal(module(X), X * 3)


def test_a_graph_of_torch_fx_watches_what_its_modules_read() -> None:
    class Keeps(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, _: str) -> bool:
            return isinstance(m, Scaled)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(x)

    model = Outer()
    module = fxlib.capture(torch.fx.GraphModule(model, Keeps().trace(model)))
    model.scaled.factor = 3.0
    assert torch.equal(module(X), X * 3)


class Scaled(nn.Module):
    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor
