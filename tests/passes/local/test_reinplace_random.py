"""Random functional programs, as they are and reinplaced."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

from fxlib.recipes import recipes
from tests.passes.aten_programs import SHAPE, programs

Seen = tuple[list[tuple[torch.Tensor, tuple[int, ...]]], list[torch.Tensor], list[tuple[int, int]]]


def seen(module: GraphModule, *, together: bool) -> Seen:
    """Outputs with their strides, inputs afterwards, and which of all these share memory."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHAPE, generator=generator)
    y = x if together else torch.randn(SHAPE, generator=generator)
    outputs = list(module(x, y))
    memory = [each.untyped_storage().data_ptr() for each in (*outputs, x)]
    shared = [(i, j) for i, one in enumerate(memory) for j, other in enumerate(memory) if i < j and one == other]
    return [(each.clone(), each.stride()) for each in outputs], [x.clone(), y.clone()], shared


def bits(value: torch.Tensor) -> list[int]:
    return value.reshape(-1).view(torch.int32).tolist()


def check(module: GraphModule, *, distinct_inputs: bool, together: bool) -> None:
    with torch.no_grad():
        rewrite = recipes.apply(
            module, recipes.from_passes([("reinplace", {"distinct_inputs": distinct_inputs})])
        ).module
        note(module.code)
        note(rewrite.code)
        try:
            before = seen(module, together=together)
        except RuntimeError:  # it copies between places of one memory that overlap
            return
        after = seen(rewrite, together=together)
    assert [bits(each) for each, _ in before[0]] == [bits(each) for each, _ in after[0]]
    assert [strides for _, strides in before[0]] == [strides for _, strides in after[0]]
    assert [bits(each) for each in before[1]] == [bits(each) for each in after[1]]
    assert before[2] == after[2]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.booleans())
def test_a_reinplaced_program_gives_the_same_bits(module: GraphModule, together: bool) -> None:
    check(module, distinct_inputs=False, together=together)
    check(module, distinct_inputs=True, together=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(), st.booleans())
def test_many_reinplaced_programs_give_the_same_bits(module: GraphModule, together: bool) -> None:
    check(module, distinct_inputs=False, together=together)
    check(module, distinct_inputs=True, together=False)
