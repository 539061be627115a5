"""A deep learning recommendation model (Naumov et al., arXiv:1906.00091) whose embedding tables live on servers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.rpc import rpc_sync

import fxlib
from fxlib import ps

DENSE_FEATURES = 13
SPARSE_FEATURES = 26


def tables(rows: int, dim: int) -> tuple[fxlib.Table, ...]:
    """One embedding table per categorical feature."""
    return tuple(fxlib.Table(name=f"C{i + 1}", rows=rows, dim=dim, lr=0.3) for i in range(SPARSE_FEATURES))


class DLRM(nn.Module):
    """Bottom tower over dense features, remote embeddings, pairwise dot products, top tower.

    Args:
        placement: servers and the tables they hold; each table is looked up where it lives.
        dim: width of the embeddings.
        hidden: width of the towers.
    """

    pairs: Tensor

    def __init__(self, placement: Sequence[fxlib.Server], *, dim: int, hidden: int) -> None:
        super().__init__()
        owners = {table.name: server.name for server in placement for table in server.tables}
        self.owners = [(owners[f"C{i + 1}"], f"C{i + 1}") for i in range(SPARSE_FEATURES)]
        self.bottom = tower(DENSE_FEATURES, hidden, hidden, dim)
        pairs = (SPARSE_FEATURES + 1) * SPARSE_FEATURES // 2
        self.top = tower(dim + pairs, hidden, hidden, 1)
        rows, columns = torch.tril_indices(SPARSE_FEATURES + 1, SPARSE_FEATURES + 1, offset=-1)
        self.register_buffer("pairs", rows * (SPARSE_FEATURES + 1) + columns, persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return a logit per sample: dense [batch, 13] floats, sparse [batch, 26] rows of the tables, to [batch]."""
        embedded = [
            rpc_sync(server, ps.lookup, args=(table, sparse[:, feature]))
            for feature, (server, table) in enumerate(self.owners)
        ]
        return self.interact(dense, embedded)

    def interact(self, dense: Tensor, embedded: Sequence[Tensor]) -> Tensor:
        """Return a logit per sample from dense features and one embedding [batch, dim] per categorical feature."""
        features = self.bottom(dense)
        stacked = torch.stack([features, *embedded], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([features, products], dim=1)).squeeze(1)


def tower(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
