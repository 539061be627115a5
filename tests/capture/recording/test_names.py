"""The names of classes and functions, and the text made of them: noticed when they change."""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import fxlib

X = torch.ones(2)


class Kind:
    pass


def function(x: torch.Tensor) -> torch.Tensor:
    return x


class Asks(nn.Module):
    """A model whose forward, given by each test, asks for a name."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = Kind

    def helper(self) -> None:
        """Explain itself."""


def model(forward: Callable[..., Any]) -> nn.Module:
    """Return a model of a class of its own, so that a test may rename it, and its forward too."""
    copied = FunctionType(forward.__code__, globals(), "forward")
    kind: type[nn.Module] = type("Model", (Asks,), {"forward": copied})
    return kind()


CLASS: dict[str, Callable[..., Any]] = {
    "repr": lambda self, x: x * len(repr(type(self))),
    "str": lambda self, x: x * len(str(type(self))),
    "f-string": lambda self, x: x * len(f"{type(self)}"),
    "conversion": lambda self, x: x * len(f"{type(self)!r}"),
    "percent": lambda self, x: x * len("%r %s" % (type(self), 1)),  # noqa: UP031 - one way to write text
    "format": lambda self, x: x * len("{}".format(type(self))),  # noqa: UP032 - another one
    "in a list": lambda self, x: x * len(str([type(self)])),
}


@pytest.mark.parametrize("attribute", ["__qualname__", "__module__"])
@pytest.mark.parametrize("forward", CLASS.values(), ids=CLASS)
def test_text_of_a_class_under_another_name_is_noticed(forward: Callable[..., Any], attribute: str) -> None:
    asks = model(forward)
    captured = fxlib.capture(asks)
    before = captured(X)
    assert torch.equal(before, asks(X))
    setattr(type(asks), attribute, "of.quite.another.length")
    assert torch.equal(captured(X), asks(X))
    assert not torch.equal(captured(X), before)


NAMES: dict[str, Callable[..., Any]] = {
    "the forward's": lambda self, x: x * len(self.forward.__name__),
    "a method's": lambda self, x: x * len(self.helper.__name__),
    "a method's, in full": lambda self, x: x * len(self.helper.__qualname__),
    "a method's text": lambda self, x: x * len(self.helper.__doc__),
    "a method's attribute": lambda self, x: x * getattr(self.helper, "scale", 2.0),
    "a function's": lambda self, x: x * len(function.__name__),
    "a function as text": lambda self, x: x * repr(function).count("o"),
    "a class held": lambda self, x: x * len(str(self.kind)),
}


@pytest.fixture
def rename() -> Iterator[Callable[[Any], None]]:
    """Give a class or a function other names, until the test ends."""
    before: list[tuple[Any, str, Any]] = []

    def rename(named: Any) -> None:
        for attribute in ("__name__", "__qualname__", "__doc__"):
            before.append((named, attribute, getattr(named, attribute)))
            setattr(named, attribute, "ooo_quite_another")

    yield rename
    for named, attribute, value in before:
        setattr(named, attribute, value)


@pytest.mark.parametrize("forward", NAMES.values(), ids=NAMES)
def test_names_of_functions_and_methods_that_change_are_noticed(
    forward: Callable[..., Any], rename: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks: Any = model(forward)
    captured = fxlib.capture(asks)
    before = captured(X)
    assert torch.equal(before, asks(X))
    for each in (type(asks).forward, Asks.helper, function, Kind):
        rename(each)
    monkeypatch.setattr(Asks.helper, "scale", 5.0, raising=False)
    assert torch.equal(captured(X), asks(X))
    assert not torch.equal(captured(X), before)
