"""A model that FSDP shards as a whole is captured; one with sharded parts is refused, and steps as it did before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

import fxlib
from fxlib.errors import CaptureError
from tests.shared.process_group import process_group


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(tmp_path_factory.mktemp("group")):
        yield


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Scaled(Layers):
    """Has a parameter at its root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def sharded(model: Layers, *, within: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    if within:
        fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).sum()
    loss.backward()
    gradients = [each.grad for each in model.parameters()]
    return [
        loss,
        *(each.full_tensor() if isinstance(each, DTensor) else each for each in gradients if each is not None),
    ]


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("within", [False, True])
def test_a_sharded_model_steps_as_it_does_by_itself(*, within: bool, steps_before: int) -> None:
    plain, x = Layers(), torch.randn(4, 3)
    model = sharded(copy.deepcopy(plain), within=within)
    for _ in range(steps_before):
        step(model, x)
        model.zero_grad()
    captured = model
    if within:
        with pytest.raises(CaptureError, match=r"FSDP gathers the weights of FSDPLinear.*root alone"):
            fxlib.capture(model)
        with pytest.raises(CaptureError, match="FSDP gathers"):
            fxlib.capture(model, sample_inputs=[x])
    else:
        captured = fxlib.capture(model)
    found, expected = step(captured, x), step(plain, x)
    assert len(found) == len(expected) == 5
    assert all(map(torch.equal, found, expected))


def sharded_first(model: nn.Module) -> nn.Module:
    return fxlib.capture(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))


def sharded_last(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(fxlib.capture(model), device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.parametrize("wrapped", [sharded_first, sharded_last])
@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning", "ignore:FSDP:UserWarning")
def test_a_sharded_model_with_a_parameter_at_its_root_trains_as_it_does_by_itself(
    wrapped: Callable[[nn.Module], nn.Module],
) -> None:
    plain, x = Scaled(), torch.randn(4, 3)
    model = wrapped(copy.deepcopy(plain))
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            each.zero_grad()
            each(x).square().mean().backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.05)
            optimizer.step()
    found = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    assert all(map(torch.allclose, found, plain.parameters()))
