"""Operators that rely on values in tensors are checked in front of their kernels, in a process that asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared.forked import printed

PROGRAM = """
import torch, warnings
from torch import nn
from torch.nn import functional as F
from fxlib.runtime import bounds

warnings.simplefilter("ignore")  # of projections, which oneDNN does not have
weight, indices = torch.rand(10, 3, requires_grad=True), torch.tensor([1, 2, 3, 4])
scores, targets = torch.rand(8, 2, 5).log_softmax(2), torch.randint(1, 5, (2, 3))
image, ones = torch.rand(2, 3, 4), torch.ones(3)
steps, lstm, gru = torch.rand(4, 2, 3, requires_grad=True), nn.LSTM(3, 5, proj_size=2), nn.GRU(3, 5, bidirectional=True)
before = lstm(steps)[0], gru(steps)[0]
plain = F.embedding_bag(indices, weight, torch.tensor([0, 2])), F.ctc_loss(scores, targets, (8, 8), (3, 3))
bounds.install()
bounds.install()
checked = F.embedding_bag(indices, weight, torch.tensor([0, 2])), F.ctc_loss(scores, targets, (8, 8), (3, 3))
assert all(map(torch.equal, plain, checked))
after = lstm(steps)[0], gru(steps)[0]
assert all(map(torch.equal, before, after))
grads = [torch.autograd.grad(sum(each.sum() for each in found), steps)[0] for found in (before, after)]
assert torch.equal(*grads)
assert torch._weight_norm(torch.ones(4, 3), torch.ones(4, 1), 0).shape == (4, 3)
assert torch.arange(6.0).view(2, 3).median(1).values.tolist() == [1.0, 4.0]
state, weights = torch.zeros(2, 2, 5), [each.detach() for each in gru.parameters()]
rest = True, 1, 0.0, False, True, False
checked[0].sum().backward()
assert weight.grad.count_nonzero() == 12

wrong = [
    lambda: F.embedding_bag(indices, weight, torch.tensor([0, -1000])),
    lambda: F.embedding_bag(indices, weight, torch.tensor([0, 2]), include_last_offset=True),
    lambda: F.ctc_loss(scores, targets + (1 << 20), (8, 8), (3, 3)),
    lambda: F.ctc_loss(scores, targets, torch.tensor([8, 8]), torch.tensor([3, 300])),
    lambda: torch.ops.aten._native_batch_norm_legit(image, ones, ones, ones[:1], ones, True, 0.1, 1e-5),
    lambda: torch._weight_norm(torch.rand(4, 3), torch.rand(1, 1), 0),
    lambda: torch.rand(1).expand(1 << 20).median(0),
    lambda: torch.gru(steps, state, [*weights[:2], weights[2][:1], *weights[3:]], *rest),
    lambda: torch.ops.aten.gru.input(steps, state, [weights[0][:, :1], *weights[1:]], *rest),
    lambda: torch.ops.aten._native_batch_norm_legit.no_stats(image, ones, ones, False, 0.1, 1e-5),
]
for call in wrong:
    try:
        call()
    except (IndexError, RuntimeError) as error:
        print(type(error).__name__)
"""


@pytest.mark.slow
def test_checked_operators_give_the_same_and_refuse_what_leads_outside(tmp_path: Path) -> None:
    said = printed(PROGRAM, tmp_path).split()
    assert said.count("IndexError") >= 8
    assert len(said) == 10
