"""Programs that torch's own pass gets wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.passes.reinplace import reinplace as stock_reinplace

from tests.passes.aten_graphs import X, aten, built, reinplaced

Builder = Callable[..., Any]
WRONG_IN_STOCK: dict[str, Builder] = {
    "an argument that is a view of the one written": lambda do, x: do(
        aten.add.Tensor, y := do(aten.sin.default, x), do(aten.t.default, y)
    ),
    "a scatter of something else than what was written": lambda do, x: (
        y := do(aten.sin.default, x),
        row := do(aten.select.int, y, 0, 0),
        do(aten.mul.Tensor, row, 2),
        do(aten.select_scatter.default, y, do(aten.full.default, [4], 0.5), 0, 0),
    )[2:],
    "windows that overlap": lambda do, x: do(
        aten.mul.Tensor, do(aten.as_strided.default, do(aten.sin.default, x), [3, 2], [1, 1]), 2
    ),
    "a result of as many elements in another shape": lambda do, x: do(
        aten.add.Tensor, do(aten.select.int, do(aten.sin.default, x), 0, 0), do(aten.full.default, [1, 4], 1.0)
    ),
    "a place in the storage that is counted from its beginning": lambda do, x: do(
        aten.as_strided.default,
        do(aten.mul.Tensor, do(aten.select.int, do(aten.sin.default, x), 0, 1), 2),
        [2],
        [1],
        0,
    ),
    "a result and its part, both returned": lambda do, x: (
        y := do(aten.sin.default, x),
        part := do(aten.mul.Tensor, do(aten.select.int, y, 0, 0), 2),
        do(aten.select_scatter.default, y, part, 0, 0),
    )[1:],
}


def outcome(module: GraphModule) -> tuple[list[list[float]], list[tuple[int, ...]], bool]:
    """Values and strides of the outputs, and whether any two share memory."""
    with torch.no_grad():
        results = torch.utils._pytree.tree_leaves(module(X.clone()))
    memory = {each.untyped_storage().data_ptr() for each in results}
    return (
        [each.flatten().tolist() for each in results],
        [each.stride() for each in results],
        len(memory) < len(results),
    )


@pytest.mark.parametrize("case", WRONG_IN_STOCK)
def test_what_stock_gets_wrong_is_right(case: str) -> None:
    module = built(WRONG_IN_STOCK[case], X)
    expected = outcome(module)
    assert outcome(reinplaced(module).module) == expected
    with torch.no_grad():
        try:
            wrong = outcome(stock_reinplace(copy.deepcopy(module), X.clone())) != expected
        except RuntimeError:
            wrong = True
    assert wrong, "torch's own pass has learned this: the case may go"
