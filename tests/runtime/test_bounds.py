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
assert torch.equal(F.group_norm(image, 1, ones[:1].expand(3)), F.group_norm(image, 1, ones))
assert torch._weight_norm(torch.ones(4, 3), torch.ones(4, 1), 0).shape == (4, 3)
assert torch.arange(6.0).view(2, 3).median(1).values.tolist() == [1.0, 4.0]
state, weights = torch.zeros(2, 2, 5), [each.detach() for each in gru.parameters()]
rest = True, 1, 0.0, False, True, False
checked[0].sum().backward()
assert weight.grad.count_nonzero() == 12

wrong = [
    lambda: F.embedding_bag(indices, weight, torch.tensor([0, -1000])),
    lambda: F.embedding_bag(indices, weight, torch.tensor([0, 2]), include_last_offset=True),
    lambda: F.embedding_bag(indices, weight, torch.zeros(0, dtype=torch.int64), mode="max"),
    lambda: F.ctc_loss(scores, targets + (1 << 20), (8, 8), (3, 3)),
    lambda: F.ctc_loss(scores, targets, torch.tensor([8, 8]), torch.tensor([3, 300])),
    lambda: torch.ops.aten._native_batch_norm_legit(image, ones, ones, ones[:1], ones, True, 0.1, 1e-5),
    lambda: torch.ops.aten.native_group_norm(image[:1], ones[:1].expand(3), ones, 1, 3, 4, 1, 1e-5),
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
    assert said.count("IndexError") >= 10
    assert len(said) == 12


WRITTEN_OVER = """
import torch
from torch.nn import functional as F
from fxlib.runtime import bounds

aten = torch.ops.aten
weight, image, rows = (torch.rand(shape, requires_grad=True) for shape in ((5, 3), (1, 1, 4, 4, 4), (3, 5)))
scores, offsets = torch.rand(8, 2, 5).log_softmax(2).requires_grad_(), torch.tensor([0, 2])


def bag(indices, **how):
    return F.embedding_bag(indices, weight, offsets, **how), indices


def found(indices):
    return [
        F.max_pool2d(image[0], 2, return_indices=True), F.max_pool3d(image, 2, return_indices=True),
        F.adaptive_max_pool2d(image[0], 2, return_indices=True), F.adaptive_max_pool3d(image, 2, return_indices=True),
        (F.embedding(each := indices.clone(), weight, scale_grad_by_freq=True), each),
        (F.embedding(each := indices.clone(), weight, sparse=True), each),
        bag(indices.clone(), mode="mean"), bag(indices.clone(), mode="sum", sparse=True),
        bag(indices.clone(), mode="sum", per_sample_weights=torch.ones(3, requires_grad=True)),
        (aten._embedding_bag.default(weight, indices, offsets, False, 1)[:2]),
        (weight.gather(0, each := indices.clone().view(1, 3), sparse_grad=True), each),
        (F.ctc_loss(scores, each := indices.repeat(2, 1) + 1, (8, 8), (3, 3)), each),
    ]


indices = torch.tensor([0, 1, 3])
plain = [torch.autograd.grad(out.sum(), (weight, image, scores), allow_unused=True) for out, _ in found(indices)]
bounds.install()
checked = [torch.autograd.grad(out.sum(), (weight, image, scores), allow_unused=True) for out, _ in found(indices)]
same = [a is b or torch.equal(a.to_dense(), b.to_dense()) for x, y in zip(plain, checked) for a, b in zip(x, y)]
assert all(same)
for out, written in found(indices):
    written.data.fill_(1 << 40)
    try:
        out.sum().backward()
    except IndexError:
        print("refused")
weights = [torch.ones(6, 5), torch.ones(6, 2)]
for lengths in (torch.ones(1, dtype=torch.int64).expand(3), torch.tensor([1, 3]), torch.tensor([2, -1, 1])):
    try:
        torch.gru(rows, lengths, torch.zeros(1, 1, 2), weights, False, 1, 0.0, False, False)
    except IndexError:
        print("refused")
sequence = torch.nn.utils.rnn.pack_padded_sequence(torch.rand(4, 2, 5), torch.tensor([4, 2]))
assert torch.nn.GRU(5, 2)(sequence)[0].data.shape == (6, 2)
try:
    aten.upsample_nearest1d.default(torch.ones(1, 1, 8, dtype=torch.uint8), [8], 1e-30)
except IndexError:
    print("refused")
assert F.interpolate(image[0], scale_factor=0.5).shape == (1, 4, 2, 2)
"""


@pytest.mark.slow
def test_what_was_written_over_since_the_forward_leads_no_backward_outside(tmp_path: Path) -> None:
    assert printed(WRITTEN_OVER, tmp_path).split() == ["refused"] * 16
