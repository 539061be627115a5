"""A loader that may be pulled early, and uses the memory of a batch again for another one, is told of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import fxlib
from fxlib.errors import FxlibError
from tests.pipeline.clicks import batches


def in_one_tensor() -> Iterator[torch.Tensor]:
    buffer = torch.empty(2, 4)
    for batch in batches():
        yield buffer.copy_(batch)


def in_one_large_tensor() -> Iterator[torch.Tensor]:
    buffer = torch.empty(1 << 19)
    for place in range(4):
        yield buffer.fill_(place)


def in_one_array() -> Iterator[torch.Tensor]:
    buffer = np.empty((2, 4), dtype=np.float32)
    for batch in batches():
        buffer[:] = batch.numpy()
        yield torch.from_numpy(buffer)


def in_one_list() -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    for each in batches():
        batch[:] = [each]
        yield batch


@dataclass
class Record:
    x: torch.Tensor


class Held:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def in_one_record() -> Iterator[Record]:
    buffer = torch.empty(2, 4)
    for batch in batches():
        yield Record(buffer.copy_(batch))


def in_one_object() -> Iterator[Held]:
    buffer = torch.empty(2, 4)
    held = Held(buffer)
    for batch in batches():
        buffer.copy_(batch)
        yield held


def in_one_target() -> Iterator[fxlib.Batch]:
    buffer = torch.empty(2, 4)
    for batch in batches():
        yield fxlib.Batch(inputs=(batch,), target=buffer.copy_(batch))


def in_two_tensors() -> Iterator[torch.Tensor]:
    buffers = torch.empty(2, 4), torch.empty(2, 4)
    for place, batch in enumerate(batches()):
        yield buffers[place % 2].copy_(batch)


@pytest.mark.parametrize(
    "loader",
    [
        *(in_one_tensor, in_one_large_tensor, in_one_array, in_one_list),
        *(in_one_record, in_one_object, in_one_target),
    ],
)
def test_a_loader_that_writes_over_a_batch_before_its_step_is_told_of(
    loader: Callable[[], Iterator[Any]],
) -> None:
    assert len(list(fxlib.pipeline(loader(), nn.Identity()))) == 4
    with pytest.raises(FxlibError, match=r"changed a batch .* yield copies"):
        next(iter(fxlib.pipeline(loader(), nn.Identity(), ahead=True)))


class Fresh:
    """A batch whose leaves are made whenever somebody asks for them."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


pytree.register_pytree_node(
    Fresh, lambda each: ([each.x[:1], float(each.x.sum())], None), lambda leaves, _: Fresh(next(iter(leaves)))
)


@pytest.mark.parametrize(
    "target",
    [torch.ones(2, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2)), Fresh(torch.ones(2, 4))],
    ids=["conjugate", "negative", "made anew"],
)
def test_what_else_a_batch_holds_is_no_reason_to_stop(target: object) -> None:
    loader = ((each, target) for each in batches())
    assert len(list(fxlib.pipeline(loader, nn.Identity(), inputs=lambda batch: batch[0], ahead=True))) == 4


def test_a_loader_may_have_as_many_buffers_as_batches_are_held() -> None:
    found = [float(each[0, 0]) for each in fxlib.pipeline(in_two_tensors(), nn.Identity(), depth=1, ahead=True)]
    assert found == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(FxlibError, match="changed a batch"):
        list(fxlib.pipeline(in_two_tensors(), nn.Identity(), depth=2, ahead=True))


def test_memory_that_is_used_again_with_the_same_contents_is_no_change() -> None:
    def loader() -> Iterator[fxlib.Batch]:
        ones, large = torch.empty(2, 4), torch.ones(1 << 19)
        for _ in range(4):
            yield fxlib.Batch(inputs=(ones.fill_(1), large), kwargs={"place": 0})

    assert len(list(fxlib.pipeline(loader(), nn.Identity(), depth=2, ahead=True))) == 4
