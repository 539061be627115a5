"""Which functions run from instrumented code: however a function is reached, what it reads is a fact."""

import gc
import importlib
import sys
import weakref
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torchs

import fxlib
from fxlib.capture import api
from fxlib.capture.recording.observers import ObservedFunctions
from fxlib.capture.recording.recorder import Recorder

X = torch.linspace(-2, 2, 12).view(3, 4)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


SCALE = {"scale": 2.0}


def hook(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * SCALE["scale"]


def hook_in(package: str) -> FunctionType:
    """Return a function as if it was made from a text, in a module of this name."""
    return FunctionType(hook.__code__.replace(co_filename="<string>"), {"__name__": package, "SCALE": dict(SCALE)})


@pytest.mark.slow
def test_a_function_is_found_whose_code_equals_that_of_others_which_are_not_the_users() -> None:
    hooks = [hook_in("mine"), *(hook_in("torch.made") for _ in range(7))]
    handles = [torchs.register_module_forward_hook(each) for each in hooks]
    try:
        model = Outer()
        captured = fxlib.capture(model)
        assert torch.equal(captured(X), model(X))

        hooks[0].__globals__["SCALE"]["scale"] = 3.0

        assert torch.equal(captured(X), model(X))
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.slow
def test_instrumented_code_keeps_no_model_and_no_function_alive() -> None:
    def define() -> tuple[nn.Module, Callable[..., Any]]:
        class Made(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return max((x * each for each in (1.0, 2.0)), key=lambda _: 0)

        return Made(), Made.forward

    model, forward = define()
    fxlib.capture(model)
    held = weakref.ref(model), weakref.ref(forward)

    del model, forward
    gc.collect()

    assert [each() for each in held] == [None, None]


class Finder:
    """What tools put where Python looks for modules; it knows none."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        self.asked.append(name)


class Imports(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        importlib.import_module("fxlib_tests_imported")
        return x + 1


def test_what_finds_a_module_is_none_of_the_forward_s_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fxlib_tests_imported.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, PathFinder])
    with mock.patch.object(api, "Recorder", wraps=Recorder) as attempts:
        captured = fxlib.capture(Imports())
    assert attempts.call_count == 1
    assert finder.asked == ["fxlib_tests_imported"]
    assert torch.equal(captured(X), X + 1)


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x) * type(self).helper.__code__.co_argcount

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def unused(self) -> None:
        """Never runs."""


def test_a_method_has_its_own_code_after_a_capture_that_has_looked_at_it() -> None:
    before = Asks.helper.__code__

    captured = fxlib.capture(Asks())

    assert Asks.helper.__code__ is before
    assert torch.equal(captured(X), Asks()(X))


def test_methods_that_nothing_looks_up_are_not_instrumented() -> None:
    helper: Any = Asks.helper
    functions, others = ObservedFunctions(), ObservedFunctions((helper,))
    try:
        functions.discover_class(Asks)
        assert Asks.forward in functions.swapped
        assert not {Asks.helper, Asks.unused} & functions.swapped.keys()

        others.discover_class(Asks)
        assert Asks.unused in others.swapped  # when something was met late, nobody knows what else will be
    finally:
        for function, code in (*functions.swapped.items(), *others.swapped.items()):
            function.__code__ = code
