"""Forwards that decide by sizes of their arguments are traced for the samples' sizes, which each run has to find."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc

import fxlib
from fxlib.errors import CaptureError, FxlibWarning
from tests.capture.checks import assert_same, targets
from tests.capture.servers import double

X = torch.randn(4, 5, 3)


def loops_over_a_dimension(x: Tensor) -> Tensor:
    state = torch.zeros(x.size(1), 3)
    for step in range(x.size(0)):
        state = state + x[step]
    return state


def branches_by_dimensions(x: Tensor) -> Tensor:
    if x.dim() == 2:
        x = x.unsqueeze(0)
    assert x.shape[-1] == 3, f"{x.shape} does not end in 3"
    return x if x.ndim == 3 and not x.is_cuda else x + 1


def computes_with_lengths(x: Tensor) -> Tensor:
    half = x.size(0) // 2
    return x * half if 2 * half < len(x) else x + float(half) + int(x.shape[1] / 2)


def reads_a_shape(x: Tensor) -> Any:
    total = x
    for size in x.shape:
        total = total + size
    return total, list(x.shape) if len(x.shape) == 2 else [x.size(1)]


def loops_over_parts(x: Tensor) -> Any:
    total = x.new_zeros(3)
    for part in (*x.split(2), *torch.chunk(x, 3, dim=1)):
        total = total * 2 + part.sum((0, 1))
    return total if len(x.unbind(-1)) == 3 else -total


PROGRAMS: list[Callable[..., Any]] = [
    loops_over_a_dimension,
    branches_by_dimensions,
    computes_with_lengths,
    reads_a_shape,
    loops_over_parts,
]


@pytest.mark.parametrize("forward", PROGRAMS, ids=lambda forward: forward.__name__)
@pytest.mark.filterwarnings("ignore::fxlib.errors.FxlibWarning")
def test_a_program_that_decides_by_sizes_is_itself_at_any_size(forward: Callable[..., Any]) -> None:
    captured = fxlib.capture(forward, sample_inputs=[X], how="trace")
    assert_same(captured(X), forward(X))
    assert fxlib.usage(captured).graphs["main"] == 1
    for other in (torch.randn(5, 5, 3), torch.randn(4, 6, 3), torch.randn(4, 3)):
        assert_same(captured(other), forward(other))


def test_another_size_is_told_and_one_that_was_not_asked_for_may_differ() -> None:
    captured = fxlib.capture(loops_over_a_dimension, sample_inputs=[X], how="trace")
    captured(torch.randn(4, 9, 3))
    assert fxlib.usage(captured).original == {}
    with pytest.warns(FxlibWarning, match=r"the argument x\.shape\[0\] is 6, and was 4 at capture"):
        captured(torch.randn(6, 9, 3))


class AsksAtEachStep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        futures = [rpc.rpc_async("ps0", double, args=(x[step],)) for step in range(x.size(0))]
        asked = [rpc.rpc_sync("ps1", double, args=(each,)) for each in x.unbind(0)[: len(x)]] if len(x) > 9 else []
        return torch.stack([each.wait() for each in futures] + asked)


class DecidesByAnAnswer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = rpc.rpc_sync("ps0", double, args=(x,))
        return answer + 1 if answer.size(0) > 2 else answer


@pytest.mark.slow
def test_calls_in_a_loop_over_a_dimension_need_no_declared_answer() -> None:
    captured = fxlib.capture(AsksAtEachStep(), sample_inputs=[X])
    assert targets(captured) == ["start_call"] * 4 + ["wait"] * 4


def reshapes_in_place(x: Tensor) -> Tensor:
    x.unsqueeze_(0)
    return x + 1 if x.size(0) == 4 else x


def replaces_a_part(xs: list[Tensor]) -> Tensor:
    xs[0] = xs[0].sum(0)
    return xs[0] + 1 if xs[0].dim() == 3 else xs[0]


@pytest.mark.parametrize("forward, sample", [(reshapes_in_place, X.clone()), (replaces_a_part, [X])])
def test_sizes_that_the_forward_changes_are_not_taken_from_the_sample(forward: Callable[..., Any], sample: Any) -> None:
    with pytest.raises(CaptureError):
        fxlib.capture(forward, sample_inputs=[sample], how="trace")


def test_the_size_of_an_answer_is_nobodys_to_know() -> None:
    with pytest.raises(CaptureError, match="decides which way the program goes"):
        fxlib.capture(DecidesByAnAnswer(), sample_inputs=[X], how="trace")
