"""Facts that few programs give rise to hold as long as what they are about, whichever way they are compared."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.jit import is_tracing

from fxlib.runtime.guards.capture_facts import Fact, Kind
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


def test_a_class_that_is_registered_later_gets_another_answer() -> None:
    class Late(ABC):  # noqa: B024 - as above
        pass

    class Stranger:
        pass

    facts = Facts([Fact(Kind.QUESTION, issubclass, (Stranger, Late), False)])
    assert not facts.broken(nn.Module())
    Late.register(Stranger)
    assert "issubclass" in facts.broken(nn.Module())
