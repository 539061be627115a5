"""Remote functions that only a job has: no operator allows this module."""

from __future__ import annotations

import time

import torch

from fxlib import remote


@remote(reads="rows", gradient="tests.loop.own_functions:learn")
def rows(ids: torch.Tensor) -> torch.Tensor:
    """Read state, slowly."""
    time.sleep(0.01)
    return ids.float().unsqueeze(1).expand(-1, 4) / 8


_LEARNT: list[torch.Tensor] = []


@remote(writes="rows")
def learn(ids: torch.Tensor, gradient: torch.Tensor) -> None:
    """Take a gradient, slowly."""
    time.sleep(0.005)
    _LEARNT.append(gradient)


def learnt() -> list[torch.Tensor]:
    """Return the gradients since this was last asked."""
    found = list(_LEARNT)
    _LEARNT.clear()
    return found
