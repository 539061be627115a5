"""Errors that a context manager of the user's swallows or replaces, where a graph would pass them on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import CaptureError
from tests.capture.recording.stateful_model import HOW

Way: TypeAlias = Literal["trace", "export"]
X = torch.eye(4) + 0.1


class Swallows:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> bool:
        return kind is not None


class Passes:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        self.kind = kind


class Delegates:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __enter__(self) -> None:
        self.inner.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self.inner.__exit__(*error)


@contextlib.contextmanager
def swallows() -> Iterator[None]:
    with contextlib.suppress(RuntimeError):
        yield


@contextlib.contextmanager
def catches() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        torch.ones(1)


@contextlib.contextmanager
def replaces() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ValueError("not a matrix of this kind") from error


@contextlib.contextmanager
def passes() -> Iterator[None]:
    try:
        yield
    finally:
        torch.ones(1)


@contextlib.contextmanager
def of_its_own() -> Iterator[None]:
    try:
        yield
    except KeyError:
        torch.ones(1)


def stacked(manager: Callable[[], Any]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(manager())
    return stack


class Roots(nn.Module):
    def __init__(self, around: Callable[[], Any]) -> None:
        super().__init__()
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.around():
            x = torch.linalg.cholesky(x)
        return x.T


class StackedInside(Roots):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.around())
            x = torch.linalg.cholesky(x)
        return x.T


@HOW
@pytest.mark.parametrize(
    "model",
    [
        *(Roots(each) for each in (Swallows, swallows, catches, replaces, lambda: stacked(Swallows))),
        *(Roots(lambda: Delegates(Swallows())), StackedInside(Swallows), StackedInside(catches)),
    ],
)
def test_a_context_manager_that_swallows_or_replaces_errors_is_refused(model: nn.Module, how: Way) -> None:
    with pytest.raises(CaptureError, match=r"test_context_managers\.py:\d+: errors are suppressed or replaced"):
        fxlib.capture(model, sample_inputs=[X], how=how)


@HOW
@pytest.mark.parametrize(
    "model",
    [
        *(Roots(each) for each in (Passes, passes, of_its_own, torch.no_grad, lambda: stacked(Passes))),
        *(Roots(lambda: Delegates(Passes())), StackedInside(Passes), StackedInside(passes)),
    ],
)
def test_a_context_manager_that_passes_errors_on_is_captured(model: nn.Module, how: Way) -> None:
    module = fxlib.capture(model, sample_inputs=[X], how=how)
    assert torch.equal(module(X), model(X))
    for each in (module, model):
        with pytest.raises(RuntimeError):
            each(-X)


@catches()
def decorated(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(x)


@HOW
def test_a_decorator_that_swallows_errors_is_refused(how: Way) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return decorated(x).T

    with pytest.raises(CaptureError, match="errors are suppressed or replaced"):
        fxlib.capture(run, sample_inputs=[X], how=how)


@HOW
def test_work_whose_errors_are_caught_is_refused(how: Way) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return x

    with pytest.raises(CaptureError, match="an except guards what is computed here"):
        fxlib.capture(run, sample_inputs=[X], how=how)
