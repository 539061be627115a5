"""What a block changes in a module is put back, whatever tensors the module holds."""

from __future__ import annotations

import torch
from torch import nn

from fxlib.runtime.preserve_state import state_kept


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
