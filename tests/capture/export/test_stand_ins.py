"""What the exporter's stand-ins hide from a program is found out, and no stand-in is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import fxlib
from fxlib.errors import CaptureError
from fxlib.runtime import CapturedModule
from fxlib.runtime.preserve_state import state_kept

pytestmark = pytest.mark.slow

X = torch.linspace(-2, 2, 12).view(3, 4)
KEPT: Any = threading.local()  # whose attributes the recorder does not see
NOTED: list[Any] = []


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.mean = nn.Buffer(torch.full((4,), 2.0))
        self.weights, self.means, self.hidden = [self.weight], [self.mean], [nn.Linear(4, 4)]
        self.threshold, self.table, self.drop = torch.tensor(1.0), torch.tensor([1.0, 2.0]), nn.Dropout(0.5)
        self._run = [run]

    def forward(self, x: Tensor) -> Any:
        return self._run[0](self, x if x.shape[0] > 1 else -x)


def exported(run: Callable[[Any, Tensor], Any]) -> tuple[Model, CapturedModule]:
    model = Model(run)
    return model, fxlib.capture(model, sample_inputs=[X], how="export")


ELEMENTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "item": lambda m, x: x * 2 if m.threshold.item() > 0 else -x,
    "a sum's": lambda m, x: x * 2 if (m.threshold + 1).item() > 0 else -x,
    "float": lambda m, x: x * float(m.threshold),
    "a list's": lambda m, x: x * m.table.tolist()[1],
    "an index": lambda m, x: x[int(m.threshold) :],
}


@pytest.mark.parametrize("which", ELEMENTS)
def test_elements_of_a_plain_tensor_that_the_forward_asked_for_are_watched(which: str) -> None:
    model, module = exported(ELEMENTS[which])
    assert torch.equal(module(X), model(X))
    assert not module._fxlib.broken(grad_enabled=True)
    model.threshold.fill_(-2.0)
    model.table.fill_(-2.0)
    assert torch.equal(module(X), model(X))
    assert module._fxlib.broken(grad_enabled=True)


def test_a_tensor_that_the_graph_reads_may_change() -> None:
    model, module = exported(lambda m, x: x * m.table.sum())
    model.table.fill_(-2.0)
    assert torch.equal(module(X), model(X))
    assert not module._fxlib.broken(grad_enabled=True)


def test_a_parameter_that_is_found_in_a_list_has_its_gradient_and_is_no_other() -> None:
    model, module = exported(lambda m, x: x * m.weights[0] + m.weight + m.means[0])
    same = fxlib.verify(model, module, [X])
    assert same, same
    assert module.state_dict().keys() == model.state_dict().keys()
    model.weight = nn.Parameter(torch.full((4,), 3.0))
    assert torch.equal(module(X), model(X))


def test_a_module_that_is_hidden_in_a_list_is_refused_as_its_gradients_would_be_lost() -> None:
    with pytest.raises(CaptureError, match=r"neither an argument nor a parameter.*nn\.ModuleList"):
        exported(lambda m, x: m.hidden[0](x))


CLASSES: dict[str, Callable[[Any, Tensor], bool]] = {
    "of an argument": lambda _, x: type(x) is Tensor,
    "of a parameter": lambda m, _: type(m.weight) is nn.Parameter,
    "of a buffer": lambda m, _: type(m.mean) is Tensor,
    "of a result": lambda _, x: type(x + 1) is Tensor,
    "by isinstance": lambda m, x: isinstance(m.weight, nn.Parameter) and not isinstance(x, nn.Parameter),
}


@pytest.mark.parametrize("which", CLASSES)
def test_a_stand_in_has_the_class_of_the_tensor_in_a_run(which: str) -> None:
    asked = CLASSES[which]
    model, module = exported(lambda m, x: x * 2 if asked(m, x) else -x)
    assert torch.equal(module(X), X * 2)
    assert torch.equal(model(X), X * 2)


UNKNOWN: dict[str, Callable[[Any, Tensor], bool]] = {
    "a class by attribute": lambda _, x: x.__class__ is Tensor,
    "a result that may be the argument": lambda _, x: x.view(3, 4) is x,
    "a parameter in two places": lambda m, _: m.weight is m.weights[0],
}


@pytest.mark.parametrize("which", UNKNOWN)
def test_what_a_stand_in_cannot_tell_is_refused_with_its_line(which: str) -> None:
    asked = UNKNOWN[which]
    with pytest.raises(CaptureError, match=r"test_stand_ins\.py:\d+"):
        exported(lambda m, x: x * 2 if asked(m, x) else -x)


def test_a_stand_in_that_is_kept_where_nobody_looks_is_refused_with_its_line() -> None:
    def keep(_: Any, x: Tensor) -> Tensor:
        KEPT.mask = x + 1
        return x

    try:
        with pytest.raises(CaptureError, match=r"test_stand_ins\.py:\d+.*without values.*outlives it"):
            exported(keep)
    finally:
        del KEPT.mask


def test_what_a_forward_has_changed_before_it_raised_is_put_back() -> None:
    def fail(_: Any, x: Tensor) -> Tensor:
        NOTED.append(x)
        raise ValueError("no")

    with pytest.raises(CaptureError, match="ValueError: no"):
        exported(fail)
    assert NOTED == []


def test_no_stand_in_is_left_by_an_export_that_succeeds() -> None:
    _, module = exported(lambda m, x: m.drop(x) * m.weight)
    held = [each for node in module.graph.nodes for each in node.meta.values()]
    assert not any(isinstance(each, FakeTensor) for each in held)


def test_keeping_the_state_of_a_captured_module_leaves_alone_what_its_conditions_know() -> None:
    _, module = exported(lambda _, x: x * len(KNOWN))
    with state_kept(module):
        KNOWN["b"] = 2.0
    assert KNOWN.pop("b", None) == 2.0


KNOWN = {"a": 1.0}
