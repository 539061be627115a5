"""Remote functions that are captured, and never called."""

from __future__ import annotations

import torch


def lookup_rows(indices: torch.Tensor) -> torch.Tensor:
    raise AssertionError(indices)


def row_like(indices: torch.Tensor) -> torch.Tensor:
    return torch.empty(indices.shape[0], 8)
