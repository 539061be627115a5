"""Callbacks of training loops: they ask when training begins, push after each step of the optimizer, and tidy up.

The loops here are stand-ins with the interfaces of Lightning and transformers, so that each test is quick and runs
anywhere; the real ones are in `test_real_trainers`, where they are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxlib
from fxlib import integrations, wire
from fxlib.errors import WorkloadError
from fxlib.integrations import lightning, transformers
from tests.client.models import Clicks, workload
from tests.client.scripted import Scripted, serving


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"net": Clicks()})


class Loop:
    """Fits a model as both trainers do, and tells the callback under the names that each has for it."""

    def __init__(self, model: nn.Module, callback: Any) -> None:
        self.model, self.callback, self.global_step = model, callback, 0

    def lightning(self, batches: int, accumulate: int, *, begun: int = 0, fails: bool = False) -> None:
        self.callback.on_fit_start(self, self.model)
        self.global_step = begun
        self.callback.on_train_start(self, self.model)
        for index in range(batches):
            self.global_step += (index + 1) % accumulate == 0
            self.callback.on_train_batch_end(self, self.model, None, None, index)
        if fails:
            self.callback.on_exception(self, self.model, KeyboardInterrupt())
        else:
            self.callback.on_fit_end(self, self.model)

    def transformers(self, steps: int) -> None:
        told: Any = (SimpleNamespace(), SimpleNamespace(), SimpleNamespace())
        self.callback.on_train_begin(*told, model=self.model, optimizer=None)
        for _ in range(steps):
            self.callback.on_step_end(*told, model=self.model)
        self.callback.on_train_end(*told, model=self.model)


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that were pushed for."""
    found: list[nn.Module] = []
    monkeypatch.setattr(integrations, "push_gradients", found.append)
    return found


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, base in (("lightning.pytorch", "Callback"), ("transformers", "TrainerCallback")):
        package = ModuleType(name)
        setattr(package, base, type(base, (), {}))
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))


@pytest.fixture
def address() -> Iterator[str]:
    service = Scripted()
    service.adopt(wire.encode(fxlib.optimize(fxlib.capture(Clicks()))).graph.SerializeToString())
    with serving(service) as address:
        yield address


def test_lightning_s_fit_pushes_once_for_each_step_of_the_optimizer(address: str, pushed: list[nn.Module]) -> None:
    model = Whole()
    net = model.inner["net"]
    callback = lightning.callback("inner.net", workload(), address)
    Loop(model, callback).lightning(batches=6, accumulate=2)
    result = callback.training.result
    assert result.adopted
    assert pushed == [result.module] * 3
    assert model.inner["net"] is net


def test_a_fit_that_goes_on_from_a_checkpoint_pushes_at_its_first_step(address: str, pushed: list[nn.Module]) -> None:
    model = Whole()
    callback = lightning.callback("inner.net", workload(), address)
    Loop(model, callback).lightning(batches=3, accumulate=2, begun=10)
    assert pushed == [callback.training.result.module]


def test_a_part_that_stands_in_several_places_is_replaced_and_put_back_in_all(
    address: str, pushed: list[nn.Module]
) -> None:
    model = Whole()
    net = model.inner["net"]
    model.inner["other"] = model.same = net
    callback = transformers.callback("inner.net", workload(), address)
    callback.on_train_begin(None, None, None, model=model)
    assert model.inner["net"] is model.inner["other"] is model.same is callback.training.result.module
    callback.on_train_end(None, None, None, model=model)
    assert model.inner["net"] is model.inner["other"] is model.same is net


def test_a_fit_that_fails_drops_its_gradients_and_leaves_the_model_as_it_was(
    address: str, pushed: list[nn.Module]
) -> None:
    model = Whole()
    net = model.inner["net"]
    Loop(model, lightning.callback("inner.net", workload(), address)).lightning(1, 2, fails=True)
    assert (pushed, model.inner["net"]) == ([], net)


def test_the_trainer_of_transformers_pushes_after_each_step(address: str, pushed: list[nn.Module]) -> None:
    model = Whole()
    keys = list(model.state_dict())
    callback = transformers.callback("inner.net", workload(), address, name="clicks")
    callback.on_train_begin(None, None, None, model=model)
    assert model.inner["net"] is callback.training.result.module
    assert list(model.state_dict()) == keys
    callback.on_train_end(None, None, None, model=model)
    Loop(model, callback).transformers(steps=2)
    assert len(pushed) == 2


def test_a_training_after_one_that_failed_begins_and_ends_with_the_model_s_own_part(
    address: str, pushed: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[nn.Module] = []
    monkeypatch.setattr(integrations, "drop_gradients", dropped.append)
    model, other = Whole(), Whole()
    net, others = model.inner["net"], other.inner["net"]
    callback = transformers.callback("inner.net", workload(), address)
    callback.on_train_begin(None, None, None, model=model)  # and then the loop raises, of which no callback is told
    failed = callback.training.result.module
    Loop(other, callback).transformers(steps=1)
    assert dropped == [failed]
    assert pushed == [callback.training.result.module] != [failed]
    assert (model.inner["net"], other.inner["net"]) == (net, others)


def test_the_model_that_a_loop_holds_itself_cannot_be_replaced() -> None:
    with pytest.raises(WorkloadError, match="Name the submodule that calls servers"):
        transformers.callback("", workload())


def test_a_refused_part_without_remote_calls_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(x.sum()) > 0 else -x

    with fxlib.connect("localhost:1", patience_s=0.1) as client, pytest.warns(fxlib.errors.FxlibWarning):
        result = client.optimize(Refused(), fxlib.Workload(batches=[torch.ones(2)]), progress=False)
    fxlib.push_gradients(result.module)
