"""Dependencies are few, and cost time in proportion to the program."""

from __future__ import annotations

import pytest
import torch

from fxlib.analysis import Dependencies
from fxlib.runtime import CapturedModule
from tests.analysis.sketch import WRITE, Sketch


def everything(size: int) -> CapturedModule:
    """A program with all that asks for order: writes in place, random numbers, writes on servers, fences."""
    program = Sketch("x", "ids")
    x, ids = program.inputs
    value = program.work("start", torch.sin, x)
    for place in range(size):
        kind = place % 20
        if kind == 3:
            value = program.work(f"n{place}", "add_", value, 1)
        elif kind == 7:
            value = program.work(f"n{place}", torch.rand_like, value)
        elif kind in {9, 13}:
            program.call(f"n{place}", ids)
        elif kind == 15 and place % 100 == 15:
            program.call(f"n{place}", ids, contract=WRITE)
        elif kind == 17 and place % 100 == 17:
            program.work(f"n{place}", print, value)
        else:
            value = program.work(f"n{place}", torch.add, value, x)
    return program.returns(value)


def edges(size: int) -> int:
    return sum(len(each.sources) for each in Dependencies.of(everything(size)).edges)


@pytest.mark.slow
def test_edges_grow_in_proportion_to_nodes() -> None:
    small, large = edges(2_000), edges(8_000)
    assert large < 4.2 * small
    assert small < 8 * 2_000


@pytest.mark.slow
def test_what_must_come_before_stands_before() -> None:
    dependencies = Dependencies.of(everything(400))
    assert all(source < place for place in range(len(dependencies.edges)) for source in dependencies.sources(place))
