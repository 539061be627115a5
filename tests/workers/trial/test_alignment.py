"""Tensors that a step finds realigned in memory."""

import torch
from torch import nn

from fxlib_workers.trial.alignment import realigned


def test_a_block_finds_the_same_values_on_memory_that_is_aligned_otherwise() -> None:
    layer, x = nn.Linear(8, 4, dtype=torch.float64), torch.randn(3, 8)
    tensors = [*layer.parameters(), x]
    before, at = [each.detach().clone() for each in tensors], [each.data_ptr() for each in tensors]
    with realigned(tensors):
        assert [each.data_ptr() % 64 for each in tensors] == [16] * 3
        assert all(map(torch.equal, tensors, before))
    assert [each.data_ptr() for each in tensors] == at
    assert all(map(torch.equal, tensors, before))


def test_what_a_block_writes_returns_with_the_tensors() -> None:
    layer, whole = nn.Linear(2, 2), torch.zeros(4, 4, dtype=torch.bfloat16)
    tensors = [layer.weight, whole, whole[1:, 1:], whole.t()]
    with realigned(tensors):
        layer(torch.ones(2)).sum().backward()
        with torch.no_grad():
            layer.weight.fill_(7)
        tensors[2].fill_(1)
    assert layer.weight.eq(7).all()
    assert layer.weight.grad is not None
    assert whole.sum() == 9
    assert tensors[3].data_ptr() == whole.data_ptr()


def test_what_is_not_dense_stays_where_it_is() -> None:
    sparse, meta = torch.eye(3).to_sparse(), torch.empty(2, device="meta")
    with realigned([sparse, meta, torch.empty(0)]):
        assert torch.equal(sparse.to_dense(), torch.eye(3))
