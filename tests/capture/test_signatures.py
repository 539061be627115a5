"""A captured module takes its arguments as the forward does: starred, keyword-only, positional-only and by default."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Interpreter

import fxlib
from fxlib.errors import CaptureError, FxlibWarning
from tests.wire.support import round_trip

X = torch.linspace(-1, 1, 12).view(3, 4)
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X,), {}),
    ((X, X), {}),
    ((X, X, X), {}),
    ((X,), {"flag": X}),
    ((X, X), {"scale": 3.0, "flag": X}),
    ((), {"x": X}),
    ((), {"x": X, "scale": 2.0}),
    ((X,), {"x": X}),
    ((X,), {"scale": X}),
    ((X, X), {"scale": X}),
]


class Starred(nn.Module):
    def forward(self, x: Any, *more: Any, flag: Any = None, **rest: Any) -> Any:
        return x * 2 if flag is None else x * 3


class AllStarred(nn.Module):
    def forward(self, *xs: Any, scale: Any = 2.0) -> Any:
        return xs[0] * scale


class Needed(nn.Module):
    def forward(self, x: Any, *more: Any, scale: Any, flag: Any = None) -> Any:
        return x * scale


class NeededBehindADefault(nn.Module):
    def forward(self, x: Any = None, *, flag: Any = None, scale: Any) -> Any:
        return x * scale


class KeywordOnly(nn.Module):
    def forward(self, x: Any, *, scale: Any = 2.0) -> Any:
        return x * scale


class PositionalOnly(nn.Module):
    def forward(self, x: Any, /, scale: Any = 2.0, **rest: Any) -> Any:
        return x * scale


MODELS = [Starred, AllStarred, Needed, NeededBehindADefault, KeywordOnly, PositionalOnly]


def outcome(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return run(*args, **kwargs)
    except TypeError:
        return "TypeError"


def alike(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other)) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_a_call_gives_what_it_gives_uncaptured_or_the_same_error(kind: type[nn.Module]) -> None:
    model = kind()
    captured = fxlib.capture(model)
    for args, kwargs in CALLS:
        assert alike(outcome(captured, args, kwargs), outcome(model, args, kwargs)), (len(args), kwargs.keys())


@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("kind", [Starred, AllStarred, KeywordOnly, PositionalOnly])
def test_so_does_an_exported_one(kind: type[nn.Module]) -> None:
    model = kind()
    captured = fxlib.capture(model, sample_inputs=[X], how="export")
    for args, kwargs in CALLS:
        assert alike(outcome(captured, args, kwargs), outcome(model, args, kwargs)), (len(args), kwargs.keys())


@pytest.mark.parametrize("kind", [AllStarred, Needed])
def test_the_graph_takes_them_so_behind_the_wire_and_node_by_node(kind: type[nn.Module]) -> None:
    model = kind()
    captured = fxlib.capture(model)
    received = round_trip(captured)
    for args, kwargs in CALLS:
        expected = outcome(model, args, kwargs)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(received(*args, **kwargs), expected)
    if kind is not Needed:
        assert torch.equal(Interpreter(captured).run(X, X), model(X, X))


def test_a_keyword_only_argument_behind_starred_ones_can_be_fixed() -> None:
    model = Starred()
    captured = fxlib.capture(model, concrete_args={"flag": True})
    assert torch.equal(captured(X, X, flag=True), X * 3)
    with pytest.warns(FxlibWarning, match="flag"):
        assert torch.equal(captured(X, X, flag=None), X * 2)


def test_a_decorator_that_takes_other_arguments_than_it_says_is_refused() -> None:
    def decorated(forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(self: Any, x: Any, scale: Any = 1.0, *, flag: Any = None) -> Any:
            return forward(self, x, flag=flag, scale=scale)

        return wrapper

    class Model(nn.Module):
        @decorated
        def forward(self, x: Any, *, flag: Any = None, scale: Any = 1.0) -> Any:
            return x * scale

    with pytest.raises(CaptureError, match=r"test_signatures.py:\d+: a decorator of the forward"):
        fxlib.capture(Model())


class AsksStarred(nn.Module):
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        doubled = [each * 2 for each in inputs if type(each) is torch.Tensor and not hasattr(each, "jax")]
        return torch.stack(doubled).sum(0)


@pytest.mark.parametrize("count", [1, 2])
def test_what_an_exported_forward_asks_of_starred_arguments_is_asked_of_each(count: int) -> None:
    given = [torch.randn(3) for _ in range(count)]
    graph = fxlib.capture(AsksStarred(), sample_inputs=given, how="export")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxlibWarning)  # that the original runs
        assert torch.equal(graph(*given), AsksStarred()(*given))
