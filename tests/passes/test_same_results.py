"""Programs that once differed from the model in a corner: gradients' last bits, objects of the user's own, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.nn import functional as F

import fxlib
from fxlib.errors import FxlibWarning
from fxlib.recipes import recipes
from fxlib.spec.contract import Contract
from tests.analysis.sketch import Sketch, names, schedule
from tests.random_programs.simulation import count, failing_read, simulated


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))


def gradients(model: Model, forward: Callable[..., Any], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    model.zero_grad()
    with simulated(0):
        result = forward(*(each.clone() for each in inputs))
    (result * torch.linspace(0.1, 1, result.numel()).view(result.shape)).sum().backward()
    return tuple(each.grad.clone() for each in model.parameters() if each.grad is not None)


def same_gradients(model: Model, scheduled: nn.Module, *inputs: torch.Tensor) -> bool:
    pairs = zip(gradients(model, model, *inputs), gradients(model, scheduled, *inputs), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


class UsesAParameterOften(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = rpc.rpc_sync("ps0", count, args=(x,))
        ways = (x * self.scale).sin() + (x.cos() * self.scale).exp() + (x.tanh() * self.scale).sigmoid()
        return found * self.scale + ways


def test_a_parameter_that_is_frozen_at_capture_may_be_trained_later() -> None:
    model = UsesAParameterOften()
    model.scale.requires_grad_(False)
    scheduled = fxlib.optimize(fxlib.capture(model))
    model.scale.requires_grad_(True)
    assert same_gradients(model, scheduled, torch.randn(2, 4))


class UsesAWeightByItsModuleAndByItsName(Model):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        z.mul_(2)
        found = self.dense(rpc.rpc_sync("ps0", count, args=(x,)))
        weight = self.dense.weight
        ways = F.linear(x.sin(), weight).sin() + F.linear(x.cos(), weight).exp() + F.linear(x.tanh(), weight).sigmoid()
        return found + ways


def test_a_weight_is_one_whether_its_module_or_a_node_uses_it() -> None:
    model = UsesAWeightByItsModuleAndByItsName()
    scheduled = fxlib.optimize(fxlib.capture(model))
    assert same_gradients(model, scheduled, torch.randn(2, 4), torch.ones(3))


class FailsBeforeItWritesAnInput(Model):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        found = rpc.rpc_sync("ps0", failing_read, args=(x.clone(),))
        z.mul_(3)
        return self.dense(x) + found + z


def test_an_input_is_written_only_after_earlier_calls_have_succeeded() -> None:
    scheduled, z = fxlib.optimize(fxlib.capture(FailsBeforeItWritesAnInput())), torch.ones(4)
    with simulated(0), pytest.raises(RuntimeError, match="no row"):
        scheduled(torch.ones(2, 4), z)
    assert torch.equal(z, torch.ones(4))


class Meter:
    def __init__(self) -> None:
        self.total = torch.zeros(2, 4)

    def add(self, value: torch.Tensor) -> torch.Tensor:
        self.total = self.total + value
        return self.total

    def mean(self) -> torch.Tensor:
        return self.total / 2


class AddsToAMeter(Model):
    def forward(self, x: torch.Tensor, meter: Meter) -> torch.Tensor:
        meter.add(x)
        unused = meter.add(x)
        unused * 2
        found = rpc.rpc_sync("ps0", count, args=(x,))
        return self.dense(x) + meter.mean() + found


def test_methods_of_the_users_own_objects_are_called_though_a_tensor_has_the_same_name() -> None:
    scheduled, meter = fxlib.optimize(fxlib.capture(AddsToAMeter())), Meter()
    with simulated(0):
        scheduled(torch.ones(2, 4), meter)
    assert torch.equal(meter.total, torch.full((2, 4), 2.0))


def test_an_unused_copy_that_checks_its_index_outlives_dead_code() -> None:
    program = Sketch("x", "ids")
    x, ids = program.inputs
    program.work("copied", torch.index_copy, x, 0, ids, x)
    assert names(recipes.apply(program.returns(x)).module) == ["copied"]


def test_work_on_the_models_state_stays_after_unknown_code_that_may_run_in_this_process() -> None:
    program = Sketch("x", root=Model())
    (x,) = program.inputs
    unknown = program.call("unknown", x, contract=None)
    scaled = program.work("scaled", torch.mul, program.state("scale"), 2)
    found = program.call("found", program.work("plain", "detach", scaled))
    assert schedule(program.returns(unknown, found))[:2] == ["unknown_issue", "scaled"]


def test_a_contract_takes_one_name_for_the_state_it_touches() -> None:
    assert Contract(reads="table") == Contract(reads=frozenset({"table"}))  # type: ignore[arg-type]


def test_a_contract_that_is_given_in_vain_is_warned_of() -> None:
    program = Sketch("x")
    module = program.returns(program.call("found", program.inputs[0], contract=None))
    with pytest.warns(FxlibWarning, match="not used"):
        recipes.apply(module, contracts={"shop:typo": Contract(reads=frozenset({"table"}))})
    with pytest.warns(FxlibWarning, match="only capture can track"):
        recipes.apply(module, contracts={"shop:found": Contract(gradient="shop:nowhere")})
