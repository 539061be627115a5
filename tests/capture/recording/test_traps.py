"""Facts of Python that a program reads in roundabout ways: each step is the original's, or the capture is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pathlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import CaptureError

X = torch.linspace(-1, 1, 12).view(3, 4)
OF = "tests.module_of_traps"


class Held:
    shared = 2.0

    def __init__(self) -> None:
        self.value = 2.0


def scaled(x: Any, by: float = 2.0, *, plus: float = 1.0) -> Any:
    return x * by + plus


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.run, self.kind, self.function = run, type("Own", (Held,), {"a": 1.0}), copy.copy(scaled)
        self.numbers = np.ones(4, dtype=np.float32)
        self.linear = nn.Linear(4, 4)
        self.held, self.held_by = Held(), [Held()]
        self.reference, self.by_name = weakref.ref(self.held_by[0]), weakref.WeakValueDictionary(a=self.held_by[0])
        self.values: Any = weakref.WeakKeyDictionary({self.held: 2.0})
        self.method, self.above = weakref.WeakMethod(self.held.__init__), weakref.ref(self.linear)  # type: ignore[misc]

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


@pytest.fixture(autouse=True)
def a_module() -> Iterator[None]:
    put_module(2.0)
    methods = {name: torch.Tensor.__dict__.get(name) for name in ("exp", "__mul__")}
    yield
    del sys.modules[OF]
    for name, method in methods.items():
        if method is not None:
            setattr(torch.Tensor, name, method)
        elif name in torch.Tensor.__dict__:
            delattr(torch.Tensor, name)


def put_module(value: float) -> None:
    made: Any = types.ModuleType(OF)
    made.value = value
    sys.modules[OF] = made


def new_defaults(model: Any) -> None:
    scaled.__defaults__, scaled.__kwdefaults__ = (2.0,), {"plus": 1.0}
    model.function.__defaults__ = (7.0,)


READ: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], object]]] = {
    "a module by __import__": (lambda m, x: x * __import__(OF, fromlist=["value"]).value, lambda m: put_module(7.0)),
    "a module by importlib": (lambda m, x: x * importlib.import_module(OF).value, lambda m: put_module(7.0)),
    "a part of a package by importlib": (
        lambda m, x: x * importlib.import_module(".module_of_traps", "tests").value,
        lambda m: put_module(7.0),
    ),
    "a signature": (lambda m, x: x * inspect.signature(m.function).parameters["by"].default, new_defaults),
    "the names of a class": (
        lambda m, x: x * sum(value for name, value in vars(m.kind).items() if len(name) == 1),
        lambda m: setattr(m.kind, "b", 7.0),
    ),
    "the dict of a class": (
        lambda m, x: x * sum(m.kind.__dict__[name] for name in m.kind.__dict__ if len(name) == 1),
        lambda m: setattr(m.kind, "b", 7.0),
    ),
    "memory shared with a tensor": (lambda m, x: x * torch.from_numpy(m.numbers), lambda m: m.numbers.fill(7.0)),
    "an array in another's place": (
        lambda m, x: x * torch.from_numpy(m.numbers),
        lambda m: setattr(m, "numbers", np.full(4, 7.0, dtype=np.float32)),
    ),
    "a weak reference to a module of the model": (lambda m, x: m.above()(x), lambda m: m.linear.weight.data.add_(1)),
}


@pytest.mark.parametrize("what", READ)
def test_what_changed_since_the_capture_shows_in_the_next_step(what: str) -> None:
    run, change = READ[what]
    model = Model(run)
    captured = fxlib.capture(model)
    before = captured(X)
    assert torch.equal(before, model(X))
    change(model)
    assert torch.equal(captured(X), model(X))
    assert not torch.equal(model(X), before)


@pytest.mark.parametrize("name", ["exp", "__mul__"])
def test_a_method_of_tensors_in_anothers_place_is_what_an_exported_model_runs(name: str) -> None:
    model = Model(lambda m, x: x.exp() * 2)
    captured = fxlib.capture(model, sample_inputs=[X], how="export")
    assert torch.equal(captured(X), model(X))
    setattr(torch.Tensor, name, lambda tensor, *_: tensor + 5)
    assert torch.equal(captured(X), model(X))


def kept(x: Any, memo: Any) -> Any:
    before = memo.setdefault("n", 1.0)
    memo["n"] = x.sum()
    return x * before


class Remembering(nn.Module):
    def forward(self, x: Any, memo: Any = {}) -> Any:  # noqa: B006 - as programs do
        return kept(x, memo)


class Appending(nn.Module):
    def forward(self, x: Any, memo: Any = [[]]) -> Any:  # noqa: B006 - as programs do
        memo[0].append(x)
        return x * 2


@pytest.mark.parametrize("kind", [Remembering, Appending])
def test_a_default_that_the_forward_writes_to_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="writes to the default of its argument memo"):
        fxlib.capture(kind())


def written_array(m: Any, x: Any) -> Any:
    numbers = np.ones(4, dtype=np.float32)
    y = x * torch.from_numpy(numbers)
    numbers[0] = 5.0
    return y + torch.from_numpy(numbers)


def written_tensor(m: Any, x: Any) -> Any:
    tensor = torch.from_numpy(np.ones(4, dtype=np.float32))
    tensor += 1
    return x * tensor


def written_view(m: Any, x: Any) -> Any:
    torch.from_numpy(m.numbers)[:2].mul_(3)
    return x * float(m.numbers[0])


def written_out(m: Any, x: Any) -> Any:
    tensor = torch.frombuffer(bytearray(16), dtype=torch.float32)
    torch.add(tensor, 1.0, out=tensor)
    return x * tensor


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a weak reference": (lambda m, x: x * m.reference().value, "asks a weak reference"),
    "a table of weak values": (lambda m, x: x * m.by_name["a"].value, "asks a weak reference"),
    "whether there is a weak value": (lambda m, x: x * 2 if "a" in m.by_name else x, "asks a weak reference"),
    "how many weak values there are": (lambda m, x: x * len(m.by_name), "asks a weak reference"),
    "a table of weak keys": (lambda m, x: x * m.values[m.held], "asks a weak reference"),
    "a weak method": (lambda m, x: x if m.method() else -x, "asks a weak reference"),
    "a file by its path": (lambda m, x: x * len(pathlib.Path(__file__).read_text()), "may be another at each run"),
    "whether a file is there": (lambda m, x: x if pathlib.Path(__file__).exists() else -x, "may be another"),
    "whether a path leads to something": (lambda m, x: x if os.path.exists(__file__) else -x, "may be another"),  # noqa: PTH110
    "an array that changes": (written_array, "changes a ndarray after it was handed on here"),
    "a tensor that is written": (written_tensor, "shares its memory with an object of Python's"),
    "a view that is written": (written_view, "shares its memory with an object of Python's"),
    "a tensor that is written by out=": (written_out, "shares its memory with an object of Python's"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_graph_can_hold_is_refused_with_the_line(what: str) -> None:
    run, problem = REFUSED[what]
    with pytest.raises(CaptureError, match=rf"test_traps.py:\d+: .*{problem}"):
        fxlib.capture(Model(run))


def backward(m: Any, x: Any) -> Any:
    m.linear(x).sum().backward()
    return x * 2


def gradient(m: Any, x: Any) -> Any:
    return x * torch.autograd.grad(m.linear(x).sum(), m.linear.bias)[0]


@pytest.mark.parametrize("run", [backward, gradient])
def test_an_export_refuses_a_backward_in_the_forward(run: Any) -> None:
    with pytest.raises(CaptureError, match="a backward, which export would lose"):
        fxlib.capture(Model(run), sample_inputs=[X], how="export")


class Filling(nn.Module):
    def forward(self, x: Any, found: Any) -> Any:
        if isinstance(found, dict):
            found["x"] = x * 2
        else:
            found.append(x * 2)
        return x + 1


@pytest.mark.parametrize("found", [[X], {"y": X}])
def test_an_export_refuses_a_forward_that_changes_what_it_is_given(found: Any) -> None:
    with pytest.raises(CaptureError, match="that it is given, which export would lose"):
        fxlib.capture(Filling(), sample_inputs=[X, found], how="export")


def versions(m: Any, x: Any) -> Any:
    before = x._version
    x.add_(1)
    return x * (x._version - before)


def shapes(m: Any, x: Any) -> Any:
    shape, dims = x.shape, x.ndim
    x.unsqueeze_(0)
    return x * shape[0] + dims


@pytest.mark.parametrize("run", [versions, shapes])
def test_what_a_tensor_tells_is_read_before_it_is_written(run: Any) -> None:
    model = Model(run)
    captured = fxlib.capture(model)
    for _ in range(2):
        assert torch.equal(captured(X.clone()), model(X.clone()))


def test_a_setting_that_the_exporter_changes_for_itself_is_not_answered() -> None:
    model = Model(lambda m, x: x * 2 if torch.backends.mkldnn.enabled else x * 3)  # type: ignore[truthy-bool]
    assert torch.equal(fxlib.capture(model)(X), model(X))
    with pytest.raises(CaptureError, match=r"mkldnn\.enabled, which is another during a capture"):
        fxlib.capture(model, sample_inputs=[X], how="export")


def test_an_export_refuses_to_write_to_memory_of_pythons() -> None:
    model = Model(lambda m, x: x * torch.from_numpy(m.numbers).mul_(3))
    with pytest.raises(CaptureError, match="shares its memory with an object of Python's"):
        fxlib.capture(model, sample_inputs=[X], how="export")
