"""What a module holds is put back, bit for bit, before each arm of a trial."""

import torch
from torch import nn

from fxlib_workers.trial.digests import ModuleSnapshot


class Repeating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("bias", torch.ones(1, 4).expand(8, 4))


def test_a_buffer_that_repeats_one_element_is_put_back() -> None:
    module = Repeating()
    state = ModuleSnapshot(module)
    digest = state.digest()
    with torch.no_grad():
        module.weight.add_(1)
        module.get_buffer("bias")[:1].add_(1)
    assert state.digest() != digest
    state.restore()
    assert state.digest() == digest
    assert module.get_buffer("bias").stride() == (0, 1)
