"""That `fxlib.profile` leaves everything as it was, whatever happens."""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import rpc

import fxlib
from fxlib import Workload, ps
from fxlib.runtime import CapturedModule
from tests.profiling import remote_functions as far
from tests.profiling.clicks import Clicks, batch, digests, workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_servers")]


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_nothing_is_changed() -> None:
    module = fxlib.capture(Clicks())
    module(*batch().inputs).sum().backward()
    before, servers = state_of(module), digests()
    gradients = {
        name: (each.grad, each.grad.clone()) for name, each in module.named_parameters() if each.grad is not None
    }
    inputs = batch()
    given = [value.clone() for value in inputs.named.values()]
    drawn, drawn_by_python = torch.get_rng_state(), random.getstate()
    fxlib.profile(module, Workload(batches=[inputs], loss="mse", optimizer="adam"), steps=2)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == drawn_by_python
    after = state_of(module)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert gradients
    for name, parameter in module.named_parameters():
        assert parameter.grad is gradients[name][0]
        assert torch.equal(parameter.grad, gradients[name][1])
    assert all(map(torch.equal, given, inputs.named.values()))
    assert module.training
    assert digests() == servers


class LearnedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4)

    def forward(self, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, (self.norm(output) * self.scale).square().mean())


def test_nothing_of_a_loss_is_changed() -> None:
    loss = torch.fx.symbolic_trace(LearnedLoss())
    before = state_of(loss)
    fxlib.profile(fxlib.capture(nn.Linear(4, 4)), Workload(batches=[torch.randn(8, 4)], loss=loss), steps=1)
    assert all(torch.equal(before[name], value) for name, value in loss.state_dict().items())
    assert all(each.grad is None for each in loss.parameters())


def test_no_hook_of_a_parameter_runs() -> None:
    ran: list[str] = []
    model = nn.Linear(4, 4)
    accumulates = get_gradient_edge(model.bias).node
    model.weight.register_hook(lambda _: ran.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda _: ran.append("step"))
    accumulates.register_prehook(lambda _: ran.append("before"))
    accumulates.register_hook(lambda *_: ran.append("after"))
    found = fxlib.profile(model, Workload(batches=[torch.randn(8, 4)]), steps=1)
    assert ran == []
    assert "hooks of 2 parameters were left out, and what they take is not in the figures" in found.notes
    model(torch.randn(8, 4)).sum().backward()
    assert sorted(ran) == ["after", "before", "gradient", "step"]


def test_what_the_steps_tracked_is_not_pushed_later() -> None:
    module = fxlib.capture(Clicks())
    servers = digests()
    fxlib.profile(module, workload(), steps=2)
    fxlib.push_gradients(module)
    assert digests() == servers


def test_a_step_that_fails_changes_nothing_either() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            rpc.rpc_sync("ps0", far.fail)
            return x

    module = fxlib.capture(Failing())
    inputs = torch.randn(8, 4)
    before, drawn = state_of(module), torch.get_rng_state()
    with pytest.raises(ValueError, match="not today"):
        fxlib.profile(module, [inputs])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_buffer_that_repeats_one_element_is_put_back() -> None:
    class Repeating(Clicks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", torch.ones(1, 4).expand(256, 4))

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.get_buffer("bias"), ids)

    model = Repeating()
    before = state_of(model)
    fxlib.profile(fxlib.capture(model), workload(), steps=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_that_writes_does_so_once_for_each_step() -> None:
    class Pushing(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = rpc.rpc_sync("ps0", ps.pull, args=("counter",))
            rpc.rpc_sync("ps0", ps.push_dense, args=("counter", torch.ones(1)))
            return cast(torch.Tensor, rows + ids)

    described = fxlib.Server(name="ps0", dense=(fxlib.Dense(name="counter", shape=(1,), lr=1.0),))
    rpc.rpc_sync("ps0", ps.setup, args=(described, 0))
    before = rpc.rpc_sync("ps0", ps.pull, args=("counter",))
    found = fxlib.profile(fxlib.capture(Pushing()), [torch.ones(1)])
    assert torch.equal(before - rpc.rpc_sync("ps0", ps.pull, args=("counter",)), torch.tensor([2.0]))
    assert found.steps == 1
    assert any("push_dense may write, and did so in each of 2 steps" in note for note in found.notes)


def test_a_profiled_module_is_still_itself() -> None:
    module = fxlib.capture(Clicks())
    assert isinstance(module, CapturedModule)
    code = module.code
    fxlib.profile(module, [batch()], steps=1)
    assert module.code == code
    assert module(*batch().inputs).shape == (256, 4)
