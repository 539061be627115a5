"""Optimizers of a server: SGD and Adagrad on some rows of a parameter, in place."""

from __future__ import annotations

from typing import Literal

import torch

_EPSILON = 1e-10
"""As `torch.optim.Adagrad`."""


class RowOptimizer:
    """Updates chosen rows of `parameter`, which is changed in place. Each row is to be named once.

    Adagrad (Duchi, Hazan and Singer, 2011) keeps the sum of squares of each element's gradients.
    """

    def __init__(self, name: Literal["sgd", "adagrad"], lr: float, parameter: torch.Tensor) -> None:
        self._lr = lr
        self._parameter = parameter
        self._squares = torch.zeros_like(parameter) if name == "adagrad" else None

    def tensors(self) -> list[torch.Tensor]:
        """The optimizer's own state."""
        return [] if self._squares is None else [self._squares]

    def update(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Apply `gradient` [len(rows), dim] to `rows`."""
        if self._squares is None:
            step = gradient
        else:
            squares = self._squares.index_select(0, rows).add_(gradient * gradient)
            self._squares.index_copy_(0, rows, squares)
            step = gradient / squares.sqrt_().add_(_EPSILON)
        # By what takes rows alone: indexing by brackets, which takes anything, is slower by half.
        self._parameter.index_copy_(0, rows, self._parameter.index_select(0, rows).sub_(self._lr * step))
