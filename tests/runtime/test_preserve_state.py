"""What a block changes in a module is put back, whatever tensors the module holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from fxlib.runtime.preserve_state import state_kept
from tests.shared.process_group import process_group
from tests.shared.scaled import Scaled


class Gathered(nn.Module):
    """A layer beside a tensor whose memory comes and goes, as that of FSDP's gathered parameters does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.whole = torch.arange(6.0)[2:]

    def resize(self, size: int) -> None:
        self.whole.untyped_storage().resize_(size)


def test_memory_that_is_freed_is_left_alone() -> None:
    module = Gathered()
    module.resize(0)
    with state_kept(module):
        nn.init.zeros_(module.layer.bias)
    assert module.whole.untyped_storage().nbytes() == 0
    assert module.layer.bias.any()


def test_what_a_block_frees_has_its_memory_and_bits_again() -> None:
    module = Gathered()
    with state_kept(module):
        module.resize(0)
    assert module.whole.untyped_storage().nbytes() == 24
    assert module.whole.tolist() == [2.0, 3.0, 4.0, 5.0]


def spoil(module: Gathered) -> None:
    with state_kept(module):
        module.whole.set_(module.whole.untyped_storage(), 0, (3,), (1,))  # which has no room for its four elements
        nn.init.zeros_(module.layer.bias)
        module.eval().requires_grad_(False)


def test_whatever_can_be_put_back_is_where_something_cannot() -> None:
    module = Gathered()
    module.layer(torch.ones(3)).sum().backward()
    bias, gradient = module.layer.bias.tolist(), module.layer.bias.grad
    with pytest.raises(RuntimeError, match="must match"):
        spoil(module)
    assert module.layer.bias.tolist() == bias
    assert module.layer.bias.grad is gradient
    assert module.layer.bias.requires_grad
    assert module.layer.training


def test_a_tensor_spread_over_ranks_is_put_back(tmp_path: Path) -> None:
    with process_group(tmp_path):
        rows = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (1,)))
        module = nn.Module()
        module.register_buffer("rows", rows)
        with state_kept(module):
            rows.add_(1)
        assert rows.to_local().tolist() == [1.0] * 3


def test_what_a_wrapper_keeps_beside_its_tensors_is_put_back() -> None:
    weight = Scaled(torch.ones(3, dtype=torch.int8), 0.5)
    integers, module = weight.integers, nn.Module()
    module.register_buffer("weight", weight)
    with state_kept(module):
        weight.integers, weight.scale = torch.zeros(3, dtype=torch.int8), 2.0
    assert weight.integers is integers
    assert weight.scale == 0.5


def test_what_fsdp_sets_up_in_its_first_forward_stays(tmp_path: Path) -> None:
    with process_group(tmp_path):
        module = fully_shard(nn.Linear(3, 1), mesh=init_device_mesh("cpu", (1,)))
        for keeping in (True, False):
            with state_kept(module) if keeping else torch.enable_grad():
                module(torch.ones(2, 3)).sum().backward()
        assert all(isinstance(each.grad, DTensor) for each in module.parameters())
