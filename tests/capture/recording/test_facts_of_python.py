"""Facts wherever Python keeps them: containers of its library, classes, objects in C, settings, what functions see."""

from __future__ import annotations

import abc
import array
import builtins
import collections
import contextlib
import contextvars
import copy
import dataclasses
import decimal
import functools
import logging
import math
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.fx
from torch import nn

import fxlib
from fxlib.errors import CaptureError, FxlibWarning
from fxlib.runtime.guards.capture_facts import same

X = torch.linspace(-2, 2, 12).view(3, 4)
SETTING: contextvars.ContextVar[float] = contextvars.ContextVar("SETTING", default=2.0)
LOGGER = logging.getLogger("a model's")


class Kept:
    scale = 2.0
    name = "kept"

    def __init__(self, value: float = 2.0) -> None:
        self.value = value

    def get(self) -> float:
        return self.value


class Named(Kept):
    name = "another"


class Other(Kept):
    scale = 5.0

    def get(self) -> float:
        return self.value * 3


class Text(str):
    __slots__ = ()


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


@dataclasses.dataclass(slots=True)
class Part:
    rate: float = 2.0


@dataclasses.dataclass
class Whole:
    part: Part = dataclasses.field(default_factory=Part)


class Abstract(abc.ABC):  # noqa: B024 - others are registered with it
    pass


class Base(nn.Module):
    level = 2.0

    def part(self, x: Any) -> Any:
        return x * 2


def doubled(x: Any) -> Any:
    return x * 2


def tripled(x: Any) -> Any:
    return x * 3


class Model(Base):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.linear = [run], nn.Linear(4, 4)
        self.raw = {"a": 2.0}
        self.user_dict, self.user_list = collections.UserDict(self.raw), collections.UserList([1.0, 2.0])
        self.chain = collections.ChainMap({"a": 2.0}, {"b": 3.0})
        self.proxy, self.array = types.MappingProxyType(self.raw), array.array("d", [1.0, 2.0])
        self.keys, self.values, self.items = self.raw.keys(), self.raw.values(), self.raw.items()
        self.bytes = bytearray(b"\x01\x02")
        self.memory = memoryview(self.bytes)
        self.objects = np.array([Kept(), Kept(3.0)], dtype=object)
        self.frozen, self.set, self.kept, self.slots = frozenset([Kept()]), {Kept()}, Kept(), Slots()
        self.nest, self.flags, self.whole = [[1.0, 2.0], [3.0, 4.0]], [[True], [False]], Whole()
        self.get = self.raw.get
        self.partial = functools.partial(lambda x, table: x * table["a"], table=self.raw)
        self.event, self.numbers, self.modes = threading.Event(), [2.0], {"a"}

    def forward(self, x: torch.Tensor, options: Any = {"a": 2.0}) -> Any:  # noqa: B006 - as a program may
        return self.run[0](self, self.linear(x) * options["a"])

    def part(self, x: Any) -> Any:
        return super().part(x) * 3


Run: TypeAlias = Callable[[Any, Any], Any]
Change: TypeAlias = Callable[[Any], object]
CHANGES: dict[str, tuple[Run, Change]] = {
    "super's attribute": (lambda m, x: x * super(Model, m).level, lambda _: setattr(Base, "level", 3.0)),
    "super's method": (lambda m, x: m.part(x), lambda _: setattr(Base, "part", lambda _, x: x * 7)),
    "a class replaced": (lambda m, x: x * m.kept.scale, lambda m: setattr(m.kept, "__class__", Other)),
    "a class replaced, for a method": (lambda m, x: x * m.kept.get(), lambda m: setattr(m.kept, "__class__", Other)),
    "a class replaced, for isinstance": (
        lambda m, x: x * 2 if isinstance(m.kept, Other) else x,
        lambda m: setattr(m.kept, "__class__", Other),
    ),
    "a class replaced, for type": (
        lambda m, x: x * 2 if type(m.kept) is Other else x,
        lambda m: setattr(m.kept, "__class__", Other),
    ),
    "bases": (lambda _, x: x * len(Other.name), lambda _: setattr(Other, "__bases__", (Named,))),
    "the root's forward": (lambda _, x: x, lambda _: setattr(Model, "forward", lambda _, x: x * 9)),
    "a default of the root's": (lambda _, x: x, lambda _: Model.forward.__defaults__[0].update(a=3.0)),  # type: ignore[index]
    "the code of a function": (lambda _, x: doubled(x), lambda _: setattr(doubled, "__code__", tripled.__code__)),
    "a builtin": (lambda m, x: x * abs(m.numbers[0]), lambda _: setattr(builtins, "abs", lambda _: 7)),
    "a user's dict": (lambda m, x: x * m.user_dict["a"], lambda m: m.user_dict.update(a=3.0)),
    "a user's dict, by get": (lambda m, x: x * m.user_dict.get("a"), lambda m: m.user_dict.update(a=3.0)),
    "a key of a user's dict": (lambda m, x: -x if "b" in m.user_dict else x, lambda m: m.user_dict.update(b=3.0)),
    "the truth of a user's dict": (lambda m, x: x if m.user_dict else -x, lambda m: m.user_dict.clear()),
    "a user's list": (lambda m, x: x * m.user_list[1], lambda m: m.user_list.__setitem__(1, 3.0)),
    "elements of a user's list": (lambda m, x: [x * v for v in m.user_list][-1], lambda m: m.user_list.append(3.0)),
    "a chain": (lambda m, x: x * m.chain["b"], lambda m: m.chain.maps[1].update(b=7.0)),
    "the environment": (lambda _, x: x * float(os.environ["FACT"]), lambda _: os.environ.update(FACT="3")),
    "the environment, by get": (lambda _, x: x * float(os.environ.get("FACT", "1")), lambda _: os.environ.pop("FACT")),
    "the environment, by getenv": (lambda _, x: x * float(os.getenv("FACT", "1")), lambda _: os.environ.pop("FACT")),
    "a view of a dict": (lambda m, x: x * m.proxy["a"], lambda m: m.raw.update(a=3.0)),
    "a view of a dict, by get": (lambda m, x: x * m.proxy.get("a"), lambda m: m.raw.update(a=3.0)),
    "keys": (lambda m, x: -x if "b" in m.keys else x, lambda m: m.raw.update(b=3.0)),
    "values": (lambda m, x: x * sum(m.values), lambda m: m.raw.update(a=3.0)),
    "items": (lambda m, x: x * dict(m.items)["a"], lambda m: m.raw.update(a=3.0)),
    "an array": (lambda m, x: x * m.array[0], lambda m: m.array.__setitem__(0, 3.0)),
    "an array's method": (lambda m, x: x * m.array.tolist()[0], lambda m: m.array.__setitem__(0, 3.0)),
    "memory": (lambda m, x: x * m.memory[0], lambda m: m.bytes.__setitem__(0, 3)),
    "memory, as bytes": (lambda m, x: x * bytes(m.memory)[0], lambda m: m.bytes.__setitem__(0, 3)),
    "an object in an array": (lambda m, x: x * m.objects[0].value, lambda m: setattr(m.objects[0], "value", 3.0)),
    "another object in an array": (
        lambda m, x: x * sum(each.value for each in m.objects),
        lambda m: m.objects.__setitem__(0, Kept(7.0)),
    ),
    "an object in a frozenset": (
        lambda m, x: next(x * each.value for each in m.frozen),
        lambda m: setattr(next(iter(m.frozen)), "value", 3.0),
    ),
    "an object in a set": (
        lambda m, x: next(x * each.value for each in m.set),
        lambda m: setattr(next(iter(m.set)), "value", 3.0),
    ),
    "texts in a set": (
        lambda m, x: x * sum(2.0 if type(each) is str else 3.0 for each in m.modes),
        lambda m: (m.modes.clear(), m.modes.add(Text("a"))),
    ),
    "lists in a star": (lambda m, x: x * next(zip(*m.nest, strict=True))[1], lambda m: m.nest[1].__setitem__(0, 9.0)),
    "lists that any looks at": (lambda m, x: -x if any(m.nest) else x, lambda m: [each.clear() for each in m.nest]),
    "lists that map looks at": (lambda m, x: x * next(map(sum, m.nest)), lambda m: m.nest[0].append(9.0)),
    "lists that are mapped twice": (
        lambda m, x: -x if any(map(any, m.flags)) else x,
        lambda m: m.flags[0].__setitem__(0, False),
    ),
    "lists that are compared": (lambda m, x: -x if [3.0, 4.0] in m.nest else x, lambda m: m.nest[1].append(9.0)),
    "lists that are counted": (lambda m, x: x * (1 + m.nest.count([3.0, 4.0])), lambda m: m.nest[1].append(9.0)),
    "slots": (lambda m, x: x * copy.deepcopy(m.slots).value, lambda m: setattr(m.slots, "value", 3.0)),
    "slots, copied": (lambda m, x: x * copy.copy(m.slots).value, lambda m: setattr(m.slots, "value", 3.0)),
    "slots, as a dict": (
        lambda m, x: x * dataclasses.asdict(m.whole)["part"]["rate"],
        lambda m: setattr(m.whole.part, "rate", 3.0),
    ),
    "slots, replaced": (
        lambda m, x: x * dataclasses.replace(m.whole.part).rate,
        lambda m: setattr(m.whole.part, "rate", 3.0),
    ),
    "a method in C": (lambda m, x: x * m.get("a"), lambda m: m.raw.update(a=3.0)),
    "a keyword of a partial function": (lambda m, x: m.partial(x), lambda m: m.partial.keywords.update(table={"a": 9})),
    "a context variable": (lambda _, x: x * SETTING.get(), lambda _: SETTING.set(3.0)),
    "an event": (lambda m, x: -x if m.event.is_set() else x, lambda m: m.event.set()),
    "decimals": (
        lambda _, x: x * float(decimal.Decimal(1) / decimal.Decimal(3)),
        lambda _: setattr(decimal.getcontext(), "prec", 2),
    ),
    "a setting of Python's": (lambda _, x: x * sys.getrecursionlimit(), lambda _: sys.setrecursionlimit(1234)),
    "a logger's level": (lambda _, x: -x if LOGGER.isEnabledFor(10) else x, lambda _: LOGGER.setLevel(10)),
    "a class that is registered": (
        lambda m, x: -x if isinstance(m.kept, Abstract) else x,
        lambda _: Abstract.register(Kept),
    ),
    "a class that may be called": (
        lambda m, x: -x if callable(m.kept) else x,
        lambda _: setattr(Kept, "__call__", lambda _: 1),
    ),
}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FACT", "2")
    for owner, name in ((Base, "level"), (Base, "part"), (Kept, "scale"), (Other, "scale"), (Model, "forward")):
        monkeypatch.setattr(owner, name, owner.__dict__[name])
    for function, name in ((doubled, "__code__"), (builtins, "abs")):
        monkeypatch.setattr(function, name, getattr(function, name))
    precision, limit, token = decimal.getcontext().prec, sys.getrecursionlimit(), SETTING.set(2.0)
    defaults = Model.forward.__defaults__[0]  # type: ignore[index]
    yield
    defaults["a"] = 2.0
    if "__call__" in vars(Kept):
        del Kept.__call__
    Other.__bases__ = (Kept,)
    decimal.getcontext().prec = precision
    sys.setrecursionlimit(limit)
    SETTING.reset(token)
    LOGGER.setLevel(0)


@pytest.mark.parametrize("fact", CHANGES)
def test_a_fact_that_changes_after_the_capture_makes_the_original_run(fact: str) -> None:
    run, change = CHANGES[fact]
    torch.manual_seed(0)
    model = Model(run)
    captured = fxlib.capture(model)
    before = model(X)
    assert torch.equal(captured(X), before)
    assert not captured._fxlib.broken(grad_enabled=True)
    change(model)
    after = model(X)
    assert torch.equal(captured(X), after)
    assert not torch.equal(before, after)


SAME = [
    (1.0, 1.0),
    ((1, "a"), (1, "a")),
    (frozenset({1}), frozenset({1})),
    (np.float64(2), np.float64(2)),
    (range(3), range(3)),
]
OTHERS: list[tuple[Any, Any]] = [
    (0.0, -0.0), (complex(0, 0), complex(-0.0, 0)), (1, True), ((1, 0.0), (1, -0.0)),
    (frozenset({True}), frozenset({1})), (frozenset({1, 2.0}), frozenset({1.0, 2})), (range(0), range(1, 1)),
    (slice(1), slice(True)), (np.float32(1), np.float64(1)), (np.ones(2), np.ones(2)), ([1], [1]),
]  # fmt: skip


@pytest.mark.parametrize("one, other", SAME, ids=str)
def test_equal_values_are_the_same(one: Any, other: Any) -> None:
    assert same(one, other)


@pytest.mark.parametrize("one, other", OTHERS, ids=str)
def test_values_that_a_program_can_tell_apart_are_not_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)


def evaluated(m: Any, x: Any) -> Any:
    return x * eval("m.numbers[0]")  # noqa: S307 - as a program may


def own_list(m: Any, x: Any) -> Any:
    return x, m.numbers


def own_dict(m: Any, x: Any) -> Any:
    return {"x": x, "raw": m.raw}


def one_list_twice(_: Any, x: Any) -> Any:
    found = [x]
    return found, found


def local_work_in_try(m: Any, x: Any) -> Any:
    try:
        return x.view(4, 3)
    except RuntimeError:
        return x


def work_in_suppress(m: Any, x: Any) -> Any:
    with contextlib.suppress(RuntimeError):
        x = x @ x
    return x


def an_entry_in_try(_: Any, x: Any) -> Any:
    try:
        return x["key"]
    except KeyError:
        return x


@pytest.mark.parametrize(
    "run",
    [evaluated, own_list, own_dict, one_list_twice, local_work_in_try, work_in_suppress, an_entry_in_try],
    ids=lambda run: run.__name__,
)
def test_what_a_graph_cannot_keep_is_refused_with_its_line(run: Run) -> None:
    with pytest.raises(CaptureError, match=r"test_facts_of_python.py:\d+"):
        fxlib.capture(Model(run))


def without(m: Any, x: Any) -> Any:
    try:
        return x * m.missing
    except AttributeError:
        return x * 2


def test_an_except_that_no_operation_on_tensors_reaches_is_no_reason_to_refuse() -> None:
    model = Model(without)
    captured = fxlib.capture(model)
    assert torch.equal(captured(X), model(X))
    model.missing = 3.0  # type: ignore[assignment]
    assert torch.equal(captured(X), model(X))
    fxlib.capture(model)


class Asks(nn.Module):
    def __init__(self, ask: Callable[[Any], bool]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor) -> Any:
        return x * 2 if self.ask(x) else x + 1


class Marked(torch.Tensor):
    pass


def marked() -> torch.Tensor:
    made = X.clone()
    made.mark = 1  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    "ask, other",
    [
        (lambda x: isinstance(x, nn.Parameter), nn.Parameter(X)),
        (lambda x: isinstance(x, (nn.Parameter, Marked)), X.as_subclass(Marked)),
        (lambda x: hasattr(x, "mark"), marked()),
        (lambda x: getattr(x, "mark", None) is not None, marked()),
    ],
)
def test_an_argument_that_answers_otherwise_makes_the_original_run(ask: Callable[[Any], bool], other: Any) -> None:
    model = Asks(ask)
    captured = fxlib.capture(model)
    assert torch.equal(captured(X), X + 1)
    with pytest.warns(FxlibWarning, match="the argument x"):
        assert torch.equal(captured(other), X * 2)


def test_a_tensor_cannot_be_called() -> None:
    model = Asks(callable)
    assert torch.equal(fxlib.capture(model)(X), model(X))


def test_a_forward_that_prints_is_captured_with_a_warning_that_names_the_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prints(_: Any, x: Any) -> Any:
        print("a step")
        return x

    model = Model(prints)
    with pytest.warns(FxlibWarning, match=r"test_facts_of_python.py:\d+: the forward prints or logs"):
        captured = fxlib.capture(model)
    assert torch.equal(captured(X), model(X))
    assert capsys.readouterr().out.count("a step") == 2


def test_a_forward_that_logs_what_nobody_hears_is_captured_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    def logs(_: Any, x: Any) -> Any:
        logging.getLogger("quiet").debug("a step")
        return x

    model = Model(logs)
    assert torch.equal(fxlib.capture(model)(X), model(X))
    assert not recwarn.list


def test_a_captured_module_within_a_model_keeps_its_conditions() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.parts = 2.0, [1.0]

        def forward(self, x: Any) -> Any:
            return x * self.factor + len(self.parts)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x) + 1

    inner = Inner()
    captured = fxlib.capture(Outer(fxlib.capture(inner)))
    assert torch.equal(captured(X), X * 2 + 2)
    inner.parts.append(1.0)
    assert torch.equal(captured(X), X * 2 + 3)
    inner.factor = 3.0
    assert torch.equal(captured(X), X * 3 + 3)


def test_what_another_thread_writes_meanwhile_is_neither_undone_nor_a_reason_to_refuse() -> None:
    begin, wrote = threading.Event(), threading.Event()

    def write(model: Model) -> None:
        assert begin.wait(30)
        model.whole.part.rate = 5.0
        wrote.set()

    def run(m: Any, x: Any) -> Any:
        x = x * m.whole.part.rate
        begin.set()
        assert wrote.wait(30)
        return x

    model = Model(run)
    thread = threading.Thread(target=write, args=(model,))
    thread.start()
    captured = fxlib.capture(model)
    thread.join()
    assert model.whole.part.rate == 5.0
    assert torch.equal(captured(X), model(X))
    assert not captured._fxlib.broken(grad_enabled=True)


def test_a_function_of_pythons_library_in_anothers_place_and_a_class_of_another_name_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * math.sqrt(4.0) * len(type(self).__name__)

    model = Scaled()
    captured = fxlib.capture(model)
    assert torch.equal(captured(X), 12 * X)
    with monkeypatch.context() as patched:
        patched.setattr(math, "sqrt", lambda _: 7.0)
        assert torch.equal(captured(X), 42 * X)
    assert torch.equal(captured(X), 12 * X)
    Scaled.__name__ = "Named"
    assert torch.equal(captured(X), 10 * X)
    assert fxlib.usage(captured).graphs == {"main": 2}


def test_a_look_through_a_scope_leaves_its_leaves_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Searches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * vars(math)["pi"]

    before, captured = dict(vars(math)), fxlib.capture(Searches())
    assert vars(math) == before
    assert torch.equal(captured(X), math.pi * X)
    monkeypatch.setattr(math, "pi", 3.0)
    assert torch.equal(captured(X), 3 * X)
    assert fxlib.usage(captured).graphs == {"main": 1}


@torch.fx.wrap
def raised(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize("name", ["sqrt", "raised", "doubled"])
def test_another_function_under_the_name_of_a_leaf_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * sqrt(4.0) * raised(doubled(x))

    model = Leaves()
    captured = fxlib.capture(model, wrap=[doubled])
    first = captured(X)
    with monkeypatch.context() as patched:
        patched.setitem(globals(), name, lambda _: 7.0)
        assert torch.equal(captured(X), model(X))
    assert torch.equal(captured(X), first)
    assert fxlib.usage(captured).graphs == {"main": 2}
