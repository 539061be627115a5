"""Programs that ask which tensor a value is, of which class it is, and what somebody has written on it."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from typing import Any, Literal, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxlib
from fxlib.errors import CaptureError
from tests.capture.recording.stateful_model import HOW, Run, X

Way: TypeAlias = Literal["trace", "export"]
SAME: dict[str, Run] = {
    "dropout": lambda _, x: x + 1 if F.dropout(x, training=False) is x else x * 2,
    "no_share": lambda _, x: x + 1 if F.dropout(x, p=0.0) is x else x * 2,
    "torch": lambda _, x: x + 1 if torch.dropout(input=x, p=0.5, train=False) is x else x * 2,
    "features": lambda _, x: x + 1 if F.dropout2d(y := x[None, None], training=False) is y else x * 2,
    "alpha": lambda _, x: x + 1 if F.alpha_dropout(x) is x else x * 2,
    "computed": lambda _, x: x + 1 if (y := x * 2) is F.dropout(y, training=False) else x * 2,
    "by_function": lambda _, x: x + 1 if operator.is_(F.dropout(x, training=False), x) else x * 2,
    "other": lambda _, x: x + 1 if F.relu(x) is x else x * 2,
}


@functools.singledispatch
def scaled(_: Any, x: torch.Tensor) -> torch.Tensor:
    return x


@scaled.register
def _(_: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x + 1


@scaled.register
def _(_: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    return x * 5


def matched(x: torch.Tensor) -> torch.Tensor:
    match x:
        case nn.Parameter():
            return x * 5
        case _:
            return x + 1


CHOOSES_BY_CLASS: dict[str, Run] = {
    "dispatch": lambda _, x: scaled(x, x),
    "type": lambda _, x: {torch.Tensor: x + 1, nn.Parameter: x * 5}[type(x)],
    "lambda": lambda _, x: x * 5 if any(map(lambda each: isinstance(each, nn.Parameter), [x])) else x + 1,  # noqa: C417
    "pattern": lambda _, x: matched(x),
}
ASKS_IN_C: dict[str, Run] = {
    "map": lambda _, x: x + 1 if any(map(operator.is_, [x], [F.dropout(x, training=False)])) else x * 2,
    "starmap": lambda _, x: x + 1 if any(itertools.starmap(operator.is_not, [(x, x.contiguous())])) else x * 2,
    "partial": lambda _, x: x + 1 if any(filter(functools.partial(operator.is_, x), [x.contiguous()])) else x * 2,
    "reduce": lambda _, x: x + 1 if functools.reduce(operator.is_, [x, x.contiguous()]) else x * 2,  # type: ignore[arg-type]
    "ids": lambda _, x: x + len(set(map(id, [x, x.contiguous()]))),
    "classes": lambda model, x: x + 1 if nn.Parameter in map(type, [x, model.weight]) else x * 2,
    "weak": lambda _, x: x + len(weakref.WeakSet([x, x.contiguous()])),
}


class Model(nn.Module):
    """A model with a parameter, a buffer and a plain tensor."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.full((4,), 2.0))
        self.plain = torch.full((4,), 3.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


class Special(nn.Parameter):
    """A parameter that is somebody's own."""


class Wrapped(torch.Tensor):
    """A tensor that is somebody's own."""


@pytest.mark.parametrize("name", SAME)
def test_an_export_knows_what_dropout_leaves_as_it_is(name: str) -> None:
    model = Model(SAME[name])
    module = fxlib.capture(model, sample_inputs=[X], how="export")
    assert torch.equal(module(X), model(X))
    with pytest.raises(CaptureError, match="by identity"):
        fxlib.capture(model, how="trace")


ONLY_A_RUN_KNOWS: dict[str, Run] = {
    "id": lambda _, x: x + 1 if id(F.dropout(x, training=False)) in {id(x), 0} else x * 2,
    "in_a_set": lambda _, x: x + 1 if x.view(3, 4) in {x, 0} else x * 2,
    "in_a_dict": lambda _, x: {x: 1.0}.get(x.view(3, 4), 2.0) * x,
}


@HOW
@pytest.mark.parametrize("name", ONLY_A_RUN_KNOWS)
def test_a_search_by_identity_is_refused_where_only_a_run_knows(name: str, how: Way) -> None:
    with pytest.raises(CaptureError, match="only a run knows"):
        fxlib.capture(Model(ONLY_A_RUN_KNOWS[name]), sample_inputs=[X], how=how)


CLASSES: dict[str, tuple[Run, str, torch.Tensor]] = {
    "type": (lambda m, x: x * m.weight if type(m.weight) is nn.Parameter else x, "weight", Special(torch.ones(4))),
    "isinstance": (lambda m, x: x * 2 if isinstance(m.weight, Special) else x, "weight", Special(torch.ones(4))),
    "listed": (
        lambda m, x: x * 2 if type(dict(m.named_parameters())["weight"]) is nn.Parameter else x + m.weight,
        "weight",
        Special(torch.ones(4)),
    ),
    "buffer": (lambda m, x: x * 2 if type(m.mean) is torch.Tensor else x, "mean", torch.ones(4).as_subclass(Wrapped)),
    "plain": (lambda m, x: x * 2 if type(m.plain) is torch.Tensor else x, "plain", torch.ones(4).as_subclass(Wrapped)),
}


@HOW
@pytest.mark.filterwarnings("ignore:the original forward")
@pytest.mark.parametrize("name", CLASSES)
def test_a_tensor_of_another_class_in_its_place_is_noticed(name: str, how: Way) -> None:
    run, place, other = CLASSES[name]
    model = Model(run)
    module = fxlib.capture(model, sample_inputs=[X], how=how)
    assert torch.equal(module(X), model(X))
    setattr(model, place, other)
    assert torch.equal(module(X), model(X))
    assert fxlib.usage(module).original


@pytest.mark.filterwarnings("ignore:the original forward")
def test_a_class_asked_by_attribute_is_noticed() -> None:
    model = Model(lambda m, x: x * 2 if m.weight.__class__ is nn.Parameter else x)
    module = fxlib.capture(model)
    model.weight = Special(torch.ones(4))
    assert torch.equal(module(X), model(X))
    with pytest.raises(CaptureError, match="__class__"):
        fxlib.capture(model, sample_inputs=[X], how="export")


@HOW
def test_what_is_written_on_a_parameter_later_is_noticed(how: Way) -> None:
    model = Model(lambda m, x: x * getattr(m.weight, "scale", 3.0))
    module = fxlib.capture(model, sample_inputs=[X], how=how)
    assert torch.equal(module(X), X * 3)
    model.weight.scale = 5.0  # type: ignore[attr-defined]
    assert torch.equal(module(X), X * 5)


def test_what_an_export_does_not_see_on_a_tensor_is_refused() -> None:
    model = Model(lambda m, x: x * getattr(m.weight, "scale", 3.0))
    model.weight.scale = 5.0  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="asks a tensor for 'scale'"):
        fxlib.capture(model, sample_inputs=[X], how="export")
    with pytest.raises(CaptureError, match="asks a tensor for 'scale'"):
        fxlib.capture(Model(lambda _, x: x[0] * getattr(x[0], "scale", 3.0)), sample_inputs=[[X]], how="export")


@HOW
@pytest.mark.filterwarnings("ignore:the original forward")
def test_what_is_written_on_an_argument_is_noticed(how: Way) -> None:
    model = Model(lambda _, x: x * getattr(x, "scale", 3.0))
    module = fxlib.capture(model, sample_inputs=[X], how=how)
    assert torch.equal(module(X), X * 3)
    scaled = X.clone()
    scaled.scale = 5.0  # type: ignore[attr-defined]
    assert torch.equal(module(scaled), X * 5)


@HOW
@pytest.mark.filterwarnings("ignore:.* was taken for a Tensor at capture:fxlib.errors.FxlibWarning")
@pytest.mark.parametrize("run", CHOOSES_BY_CLASS.values(), ids=CHOOSES_BY_CLASS)
def test_an_argument_that_chose_by_its_class_is_asked_for_it_at_each_call(run: Run, how: Way) -> None:
    model = Model(run)
    captured = fxlib.capture(model, sample_inputs=[X], how=how)

    for x in (X, nn.Parameter(X.clone()), X):
        assert torch.equal(captured(x), model(x))

    assert fxlib.usage(captured).graphs == {"main": 2}


@HOW
@pytest.mark.parametrize("holds", ["weight", "mean"])
def test_a_function_that_dispatches_on_a_tensor_of_the_model_runs_what_the_program_runs(how: Way, holds: str) -> None:
    model = Model(lambda model, x: scaled(getattr(model, holds), x))
    captured = fxlib.capture(model, sample_inputs=[X], how=how)

    assert torch.equal(captured(X), model(X))
    assert fxlib.usage(captured).graphs == {"main": 1}


@HOW
@pytest.mark.parametrize("run", ASKS_IN_C.values(), ids=ASKS_IN_C)
def test_a_function_in_c_that_tells_tensors_apart_is_refused_with_the_line(run: Run, how: Way) -> None:
    with pytest.raises(CaptureError, match=r"test_identity_and_class.py:\d+: the forward (hands|makes a Weak)"):
        fxlib.capture(Model(run), sample_inputs=[X], how=how)
