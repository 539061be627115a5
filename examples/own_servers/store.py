"""The code that the parameter servers run. Of fxlib it has two decorators, which say what a call does to the server."""

from __future__ import annotations

import time

import torch
from torch import Tensor

import fxlib

ROWS, DIM = 1000, 16
SERVICE_S = 0.003
"""Time that a server takes for a read, in seconds; it stands for the network, and for the load of a real server."""

_items = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


@fxlib.remote(reads="items", gradient="examples.own_servers.store:update_items")
def look_up_items(ids: Tensor) -> Tensor:
    """Return rows [n, 16] of the embedding table that this server holds."""
    time.sleep(SERVICE_S)
    return _items[ids]


@fxlib.remote(writes="items")
def update_items(ids: Tensor, gradient: Tensor) -> None:
    """Make one step of SGD on the rows that were looked up."""
    _items.index_add_(0, ids, gradient, alpha=-0.01)


class UserFeatures:
    """Features of users, which no training step changes; a server holds it, and trainers reach it through an RRef."""

    def __init__(self, users: int) -> None:
        """Make up features for so many users."""
        self._rows = torch.randn(users, DIM, generator=torch.Generator().manual_seed(1))

    @fxlib.remote(reads="features")
    def of(self, ids: Tensor) -> Tensor:
        """Return the features [n, 16] of users."""
        time.sleep(SERVICE_S)
        return self._rows[ids]
