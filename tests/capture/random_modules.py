"""Small random modules: instructions on a pool of tensors, and sizes decide which of them apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

Step = tuple[str, int, int]
"""An instruction, and the places in the pool of what it works on."""


class Program(nn.Module):
    """Runs instructions one after another, and returns what lies in some places of the pool."""

    def __init__(self, steps: list[Step], outputs: list[int]) -> None:
        super().__init__()
        self.steps, self.outputs = tuple(steps), tuple(outputs)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.vector = nn.Parameter(torch.randn(4))
        self.count = nn.Buffer(torch.zeros(()))
        self.memory = nn.Buffer(torch.zeros(3, 4), persistent=False)
        self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    @override
    def forward(self, x: Tensor, y: Tensor) -> Any:
        pool = [x, y]
        for name, one, other in self.steps:
            made = _STEPS[name](self, pool[one % len(pool)], pool[other % len(pool)])
            if made is not None:
                pool.append(made)
        first, *rest = [pool[each % len(pool)] for each in self.outputs]
        return {"first": first, "rest": rest, "none": None}


def programs() -> st.SearchStrategy[tuple[list[Step], list[int]]]:
    """Return a strategy of instructions and places of outputs."""
    places = st.integers(0, 12)
    steps = st.lists(st.tuples(st.sampled_from(sorted(_STEPS)), places, places), min_size=1, max_size=12)
    return st.tuples(steps, st.lists(places, min_size=1, max_size=3))


def _fits(one: Tensor, other: Tensor) -> bool:
    """Whether `other` broadcasts to `one`."""
    pairs = zip(reversed(one.shape), reversed(other.shape), strict=False)
    return one.dim() >= other.dim() and all(b in (a, 1) for a, b in pairs)


def _is_batch(x: Tensor) -> bool:
    return x.dim() == 2 and x.shape[1] == 4 and x.shape[0] > 1 and x.dtype == torch.float32


def _write_count(module: Program, x: Tensor, _: Tensor) -> None:
    module.memory.add_(x.detach().float().sum())
    module.count += 1  # type: ignore[misc]


def _without_gradients(_: Program, x: Tensor, __: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def _in_half_precision(module: Program, x: Tensor, _: Tensor) -> Tensor | None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module.first(x).float() if _is_batch(x) else None


def _set_row(_: Program, x: Tensor, __: Tensor) -> None:
    if x.dim() and x.is_floating_point():
        x[0] = 1.5


def _add_in_place(_: Program, x: Tensor, y: Tensor) -> None:
    if x.is_floating_point():
        x += y if _fits(x, y) else 1


_STEPS: dict[str, Callable[[Program, Tensor, Tensor], Tensor | None]] = {
    "sin": lambda _, x, __: x.float().sin(),
    "clone": lambda _, x, __: x.clone(),
    "detach": lambda _, x, __: x.detach(),
    "double": lambda _, x, __: x.double(),
    "contiguous": lambda _, x, __: x.contiguous(),
    "row": lambda _, x, __: x[0] if x.dim() else x,
    "tail": lambda _, x, __: x[1:] if x.dim() and x.shape[0] > 1 else x[...],
    "every": lambda _, x, __: x[..., ::2] if x.dim() else None,
    "flat": lambda _, x, __: x.reshape(-1),
    "turned": lambda _, x, __: x.mT if x.dim() > 1 else x,
    "wide": lambda _, x, __: x.expand(2, *x.shape) if x.dim() < 3 else None,
    "diagonal": lambda _, x, __: x.diagonal() if x.dim() == 2 else None,
    "add": lambda _, x, y: x + y if _fits(x, y) else x - 1,
    "where": lambda _, x, y: torch.where(x > 0, x, y) if x.shape == y.shape else None,
    "cat": lambda _, x, y: torch.cat([x, y]) if x.dim() and x.shape == y.shape else None,
    "relu_": lambda _, x, __: x.relu_() if x.is_floating_point() else None,
    "turned_mul_": lambda _, x, __: x.t().mul_(1.5) if x.dim() == 2 and x.is_floating_point() else None,
    "copy_": lambda _, x, y: x.copy_(y) if _fits(x, y) else None,
    "add_in_place": _add_in_place,
    "set_row": _set_row,
    "linear": lambda module, x, _: module.first(x) if _is_batch(x) else None,
    "tied": lambda module, x, _: module.second(x) if _is_batch(x) else None,
    "norm": lambda module, x, _: module.norm(x) if _is_batch(x) else None,
    "dropout": lambda module, x, _: F.dropout(x.float(), 0.5, module.training),
    "random": lambda _, x, __: torch.rand_like(x.float()),
    "count": lambda module, *_: module.count,
    "memory": lambda module, *_: module.memory[1],
    "vector": lambda module, *_: module.vector,
    "constant": lambda *_: torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "write_count": _write_count,
    "without_gradients": _without_gradients,
    "in_half_precision": _in_half_precision,
}
