"""Code that was read and put together again is what it was; with observers in it, it does what it did."""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import dataclasses
import dis
import inspect
import tarfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxlib
from fxlib.capture.recording import bytecode, observers
from fxlib.capture.recording.instrument import ENTRY, instrumented
from fxlib.errors import CaptureError

NAMES = (
    "attribute", "attribute_of_super", "stored", "item", "item_stored", "contained", "identity", "operands", "truth",
    "none", "contents", "matched", "formatted", "entered", "global_stored", "cell_stored",
    "called", "unpacked",
)  # fmt: skip


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from codes_in(each)


def library() -> Iterator[types.CodeType]:
    for module in (argparse, contextlib, dataclasses, inspect, tarfile, nn.modules.module, nn.functional):
        for value in vars(module).values():
            for each in vars(value).values() if isinstance(value, type) else (value,):
                if isinstance(each, types.FunctionType):
                    yield from codes_in(each.__code__)


def table_of(code: types.CodeType) -> Any:
    return list(dis._parse_exception_table(code))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_code_that_is_read_and_assembled_again_is_what_it_was() -> None:
    codes = list(library())
    for code in codes:
        found, handled = bytecode.read(code)
        again = bytecode.assembled(
            code,
            found,
            handled,
            {each: each for each in found},
            constants=code.co_consts,
            stack=code.co_stacksize,
        )
        assert again.co_code == code.co_code
        assert table_of(again) == table_of(code)
        assert list(again.co_positions()) == list(code.co_positions())
    assert len(codes) > 500


class Base:
    factor = 2

    def scaled(self, value: int, *more: int, by: int = 1) -> int:
        return value * self.factor * by + sum(more)

    def __pos__(self) -> str:
        return "plus"


class Derived(Base):
    def scaled(self, value: int, *more: int, by: int = 1) -> int:
        return super().scaled(value, *more, by=by) + super(Derived, self).factor  # noqa: UP008 - both forms


def calls(values: list[int]) -> Any:
    each = Derived()
    pick = {"by": 3}
    return (
        each.scaled(1),
        each.scaled(*values),
        each.scaled(1, 2, by=2),
        each.scaled(1, **pick),
        sorted(values, key=abs),
    )


def slices(values: list[int]) -> Any:
    copy = list(values)
    copy[1:2] = [7, 8]
    copy[0] = 5
    del copy[-1]
    return copy[1:], copy[:2], copy[::2], values[0], 3 in values, 4 not in values


def comprehensions(values: list[int]) -> Any:
    table = {f"{each!r:>3}": [each + other for other in values if other > each] for each in values}
    return table, {each % 2 for each in values}, sum(each for each in values), [*values, *table]


def branches(values: list[int]) -> Any:
    first, *rest = values
    found: Any = [] if not rest else None
    while rest and (first < 3 or not found is None):  # noqa: E714 - another instruction
        first += rest.pop()
    return (first if found is None else -first), first == 3 or first, +first, +Base(), f"{first:0{3}d}{first!s}", -first


def handlers(values: list[int]) -> Any:
    seen: list[Any] = []
    for each in values:
        try:
            with contextlib.suppress(KeyError), contextlib.nullcontext(each) as held:
                seen.append({1: held}[each] / (2 - each))
        except ZeroDivisionError as error:
            seen.append(str(error))
        finally:
            seen.append(each)
    return seen


def generators(values: list[int]) -> Any:
    def again() -> Any:
        yield from values
        return len(values)

    def inner() -> Iterator[int]:
        got: Any = yield from again()
        yield got

    return list(inner()), next(each for each in inner() if each > 1)


def patterns(values: list[int]) -> Any:
    def of(value: Any) -> Any:
        match value:
            case [first, *_] if first > 1:
                return first
            case {"a": held, **rest}:
                return held, rest
            case complex(real=real):
                return real
            case _:
                return None

    return of(values), of(values[::-1]), of({"a": 1, "b": 2}), of(1j), of("")


def closures(values: list[int]) -> Any:
    total = 0

    @contextlib.contextmanager
    def adding(amount: int = 1, *, twice: bool = False) -> Iterator[int]:
        nonlocal total
        total += amount * (2 if twice else 1)
        yield total

    with adding(values[0]), adding(twice=True) as now:
        total -= now
    return total, now


def objects(values: list[int]) -> Any:
    global STORED

    class Inner(Base):
        def __init__(self) -> None:
            super().__init__()
            self.kept = values[0]

        def scaled(self, value: int, *more: int, by: int = 1) -> int:
            return super().scaled(value, *more, by=by) + super(Inner, self).factor  # noqa: UP008 - both forms

    made, STORED = Inner(), values[0]
    made.kept += STORED
    found = made.scaled(1, 2), made.kept, made.factor is None, made.scaled is not None
    del made.kept
    return found


STORED = 0
PROGRAMS: list[Callable[[list[int]], Any]] = [
    calls,
    slices,
    comprehensions,
    branches,
    handlers,
    generators,
    patterns,
    closures,
    objects,
]


def observed(function: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    """Return a copy of a function that notes its observations, and all functions inside of it with it."""

    def observer(name: str) -> Callable[..., Any]:
        def observe(*operands: Any) -> Any:
            seen.append(name)
            return operands[0] if name in ("called", "unpacked") else None

        return observe

    observers = {name: observer(name) for name in NAMES}

    def made(code: types.CodeType) -> types.CodeType:
        found = instrumented(code, observers, made)
        enter = observer("begun")
        return found.replace(co_consts=tuple(enter if each is ENTRY else each for each in found.co_consts))

    return types.FunctionType(made(function.__code__), function.__globals__)


@pytest.mark.parametrize("program", PROGRAMS)
def test_code_with_observers_does_what_it_did(program: Callable[[list[int]], Any]) -> None:
    seen: list[str] = []
    assert observed(program, seen)([1, 2, 3]) == program([1, 2, 3])
    assert seen[0] == "begun"
    assert "called" in seen


def test_all_that_is_to_be_observed_is() -> None:
    seen: list[str] = []
    for program in PROGRAMS:
        observed(program, seen)([1, 2, 3])
    in_one = {"attribute_of_super"} if "LOAD_SUPER_ATTR" in dis.opmap else set[str]()
    assert {*NAMES} - {"attribute_of_super"} | in_one <= {*seen}


def test_a_python_whose_bytecode_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "IS_KNOWN", False)
    with pytest.raises(CaptureError, match="bytecode of Python"):
        fxlib.capture(nn.Sequential(nn.ReLU()))


def test_what_runs_is_noted_beside_another_profiler() -> None:
    def runs() -> None:
        pass

    with cProfile.Profile() as outer:
        stop = observers.note_running()
        runs()
        ran = stop()
        torch.ones(1)

    assert any(each is runs.__code__ for each in ran)
    assert outer.getstats()
