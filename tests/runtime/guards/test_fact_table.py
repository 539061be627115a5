"""Facts that few programs give rise to hold as long as what they are about, whichever way they are compared."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.jit import is_tracing

from fxlib.runtime.guards.capture_facts import Fact, Kind
from fxlib.runtime.guards.dict_entries import Mark
from fxlib.runtime.guards.fact_table import Facts


class Base(ABC):  # noqa: B024 - classes are registered with it
    pass


class Other:
    pass


class Text(str):
    __slots__ = ()


class Watched:
    """All places that the facts are about."""

    def __init__(self) -> None:
        def function() -> None: ...

        self.names = {"a", "b"}
        self.function: Any = function
        self.kind: Any = type("Kind", (Base,), {})
        self.facts = Facts(
            [
                Fact(Kind.CONTENTS, self.names, None, frozenset(self.names)),
                Fact(Kind.GETTER, function, "__qualname__", function.__qualname__),
                Fact(Kind.GETTER, self.kind, "__qualname__", self.kind.__qualname__),
                Fact(Kind.QUESTION, issubclass, (self.kind, Base), True),
                Fact(Kind.QUESTION, isinstance, (self.kind(), Base), True),
                Fact(Kind.QUESTION, issubclass, (Other, Base), False),
                Fact(Kind.QUESTION, is_tracing, (), False),
            ]
        )

    @property
    def broken(self) -> str:
        return self.facts.broken(nn.Module())


def _named_alike(watched: Watched) -> None:
    watched.function.__qualname__ = "".join(watched.function.__qualname__)  # equal, and perhaps another object
    watched.kind.__qualname__ = f"{'Kin'}d"


def _other_element(watched: Watched) -> None:
    watched.names.remove("a")
    watched.names.add("c")


def _equal_element(watched: Watched) -> None:
    watched.names.remove("a")
    watched.names.add(Text("a"))


def _other_name(watched: Watched) -> None:
    watched.function.__qualname__ = "another"


def test_facts_hold_until_something_changes_and_equal_names_are_the_same() -> None:
    watched = Watched()
    assert not watched.broken
    _named_alike(watched)
    assert not watched.broken
    assert not watched.broken
    laid_out = watched.facts._columns
    assert laid_out is not None
    assert not watched.broken
    assert watched.facts._columns is laid_out, "what is equal is compared in the slow way once"


@pytest.mark.parametrize(
    "change, where",
    [
        (lambda watched: watched.names.add("c"), "set"),
        (_other_element, "set"),
        (_equal_element, "set"),
        (_other_name, "__qualname__"),
    ],
)
def test_each_change_is_found_again_and_again(change: Callable[[Watched], object], where: str) -> None:
    watched = Watched()
    assert not watched.broken
    change(watched)
    assert where in watched.broken
    assert where in watched.broken


def test_what_is_put_back_holds_again() -> None:
    watched = Watched()
    assert not watched.broken
    watched.names.add("c")
    assert watched.broken
    watched.names.remove("c")
    assert not watched.broken


def _laid_out_anew(facts: Facts) -> bool:
    """Whether a check that holds lays the columns out once more, when they were a moment ago."""
    assert not facts.broken(nn.Module())
    assert not facts.broken(nn.Module())
    before = facts._columns
    assert not facts.broken(nn.Module())
    return facts._columns is not before


@pytest.mark.parametrize(
    "fact",
    [
        Fact(Kind.GETTER, Base, "bias", Mark.ABSENT),
        Fact(Kind.GETTER, Base, "__code__", Mark.ABSENT),
        Fact(Kind.CONTENTS, numbers := {1, 2}, None, frozenset(numbers)),
        Fact(Kind.QUESTION, isinstance, (1, (int, Base)), True),
    ],
    ids=["absent", "absent_code", "numbers", "tuple"],
)
def test_what_stands_in_no_column_holds_without_columns_made_anew(fact: Fact) -> None:
    assert not _laid_out_anew(Facts([fact]))


def test_numbers_that_are_equal_are_others() -> None:
    numbers: set[Any] = {1, 2}
    facts = Facts([Fact(Kind.CONTENTS, numbers, None, frozenset(numbers))])
    assert not facts.broken(nn.Module())
    numbers.remove(1)
    numbers.add(1.0)
    assert "set" in facts.broken(nn.Module())


class Hooked(ABC):  # noqa: B024 - its hook is what is tried
    error: type[Exception] | None = None

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        if cls.error is not None:
            raise cls.error
        return NotImplemented


@pytest.fixture(params=[TypeError, StopIteration, AttributeError])
def raising(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    def begin() -> None:
        Hooked.register(type("Unrelated", (), {}))  # so that Python asks anew
        Hooked.error = request.param

    yield begin
    Hooked.error = None


def test_a_hook_that_raises_hides_no_fact_before_or_behind_it(raising: Callable[[], None]) -> None:
    names = {"a"}
    question = Fact(Kind.QUESTION, issubclass, (Other, Hooked), False)

    class Late(ABC):  # noqa: B024 - as above
        pass

    behind = Fact(Kind.QUESTION, issubclass, (Other, Late), False)
    before = Fact(Kind.CONTENTS, names, None, frozenset(names))
    facts, others = Facts([before, question]), Facts([question, behind])
    assert not facts.broken(nn.Module())
    assert not others.broken(nn.Module())
    Late.register(Other)
    raising()
    names.add("b")
    assert "set" in facts.broken(nn.Module())
    with pytest.raises(Exception):  # noqa: B017, PT011 - as the fact itself does, in its turn
        others.broken(nn.Module())


def test_tracing_is_another_answer() -> None:
    facts = Facts([Fact(Kind.QUESTION, is_tracing, (), False)])
    assert not facts.broken(nn.Module())
    found: list[str] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        found.append(facts.broken(nn.Module()))
        return x + 1

    torch.jit.trace(traced, torch.ones(1))
    assert "is_tracing" in found[0], found
    assert not facts.broken(nn.Module())


def test_a_class_that_is_registered_later_gets_another_answer() -> None:
    class Late(ABC):  # noqa: B024 - as above
        pass

    class Stranger:
        pass

    facts = Facts([Fact(Kind.QUESTION, issubclass, (Stranger, Late), False)])
    assert not facts.broken(nn.Module())
    Late.register(Stranger)
    assert "issubclass" in facts.broken(nn.Module())
