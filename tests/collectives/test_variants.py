"""Ranks that are in different variants of a model at one step: their collectives meet, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import fxlib
from fxlib.client.variant_exchange import collectives_of
from fxlib.runtime import CapturedModule, is_wait
from fxlib.runtime.ops.calls import COLLECTIVE, kind_of
from tests.collectives.world import SIZE, on_all_ranks

STEPS = 6
world = dist.distributed_c10d._get_default_group


class Masked(nn.Module):
    """Collectives of equal shapes, which would take each other's values, with other local work under a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.middle, self.top = (nn.Linear(4, 4) for _ in range(3))
        self.dense = DistributedDataParallel(nn.Linear(4, 4))
        self.other = DistributedDataParallel(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        first = functional.all_reduce(self.bottom(x), "sum", world()).relu()
        second = functional.all_reduce(self.middle(x if mask is None else x * mask), "sum", world())
        for _ in range(3):
            first = torch.sin(first) if mask is None else torch.cos(first) * mask
        dense = self.dense(torch.tanh(x))
        third = functional.all_reduce(self.top(dense) * first, "sum", world())
        return self.other(second.relu() + third) * first


def trained() -> list[Any]:
    """Return how many waits moved, whether all graphs make equal collectives, and the bits of two trainings."""
    model = Masked()
    captured = fxlib.capture(model), fxlib.capture(model, concrete_args={"mask": None})
    rewritten, bare = (fxlib.optimize(each, recipe="schedule") for each in captured)
    equal = len({tuple(collectives_of(each)) for each in (*captured, rewritten, bare)}) == 1
    moved = sum(
        is_wait(node) and kind_of(node) is COLLECTIVE and node.prev is not node.args[0]
        for each in (rewritten, bare)
        for node in each.graph.nodes
    )
    assert isinstance(rewritten, CapturedModule)
    assert isinstance(bare, CapturedModule)
    rewritten._fxlib.graphs.add(rewritten, "no mask", bare)
    found = [_bits(model, model), _bits(model, rewritten)]
    used = fxlib.usage(rewritten)
    return [moved, equal, dict(used.graphs), dict(used.original), *found]


def _bits(model: nn.Module, module: nn.Module) -> list[bytes]:
    rank, found = dist.get_rank(), list[bytes]()
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        x, mask = torch.randn(3, 4), torch.rand(4)
        model.zero_grad()
        out = module(x, mask) if (step + rank) % 2 and step != STEPS - 1 else module(x)
        out.square().sum().backward()
        tensors = [out, *(each.grad for each in model.parameters())]
        found += [each.detach().numpy().tobytes() for each in tensors if each is not None]
    return found


@pytest.mark.slow
def test_ranks_in_different_variants_at_one_step_train_as_the_original_does() -> None:
    for rank, (moved, equal, ran, original, expected, found) in enumerate(on_all_ranks(trained)):
        assert moved >= 2
        assert equal
        assert not original
        assert ran == {"main": (STEPS - 1 + rank) // SIZE, "no mask": STEPS - (STEPS - 1 + rank) // SIZE}
        assert found == expected
        assert len(found) > STEPS
