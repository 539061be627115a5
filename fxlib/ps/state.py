"""What a reference server holds: embedding tables and dense parameters, with their optimizers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch.nn import functional as F

from fxlib.errors import WorkloadError
from fxlib.ps.optimizers import RowOptimizer
from fxlib.workload import Dense, Server, Table

Held = TypeVar("Held")


class ServerState:
    """The parameters of one server, drawn from a seed."""

    def __init__(self, server: Server, seed: int) -> None:
        """Draw every parameter by its own generator, so that none depends on which others the server has."""
        self.server = server
        self.service_time_s = server.service_time_s
        self.service_time_per = server.service_time_per
        self.tables = {table.name: EmbeddingTable(table, seed) for table in server.tables}
        self.dense = {dense.name: DenseParameter(dense, seed) for dense in server.dense}

    def table(self, name: str) -> EmbeddingTable:
        """Return the table called `name`."""
        return self._find("tables", self.tables, name)

    def parameter(self, name: str) -> DenseParameter:
        """Return the dense parameter called `name`."""
        return self._find("dense", self.dense, name)

    def digest(self) -> str:
        """SHA-256 over names and bits of all parameters and optimizer state."""
        total = hashlib.sha256()
        held: dict[str, EmbeddingTable | DenseParameter] = {f"table {name}": each for name, each in self.tables.items()}
        held |= {f"dense {name}": each for name, each in self.dense.items()}
        for name in sorted(held):
            total.update(name.encode())
            for tensor in held[name].tensors():
                total.update(tensor.numpy().tobytes())
        return total.hexdigest()

    def _find(self, kind: str, held: Mapping[str, Held], name: str) -> Held:
        if name not in held:
            known = ", ".join(sorted(held)) or "none"
            raise WorkloadError(f"no {name!r} among its {kind} ({known})", where=f"server {self.server.name!r}")
        return held[name]


_INDICES = frozenset({torch.int64, torch.int32})
"""What rows can be read by as it is."""


class EmbeddingTable:
    """A table of rows, [rows, dim] float32, and its sparse optimizer."""

    def __init__(self, table: Table, seed: int) -> None:
        """Draw rows as DLRM does, uniformly within 1/sqrt(rows)."""
        self.name = table.name
        bound = table.rows**-0.5
        rows = torch.empty(table.rows, table.dim).uniform_(-bound, bound, generator=_generator(seed, table.name))
        self.weight = rows.requires_grad_()
        self._optimizer = RowOptimizer(table.optimizer, table.lr, rows.detach())
        self._lock = threading.Lock()

    def tensors(self) -> list[torch.Tensor]:
        """The table and its optimizer's state."""
        return [self.weight.detach(), *self._optimizer.tensors()]

    @torch.no_grad()
    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return a copy of rows."""
        if indices.dtype not in _INDICES:
            indices = self._flat(indices).view(indices.shape)
        with self._lock:
            try:
                return torch.embedding(self.weight, indices)
            except IndexError:  # it does not say which
                self._check(self._flat(indices))
                raise

    def attached_rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows that belong to the autograd graph of this table."""
        flat = self._checked(indices)
        with self._lock:
            return F.embedding(flat.view(indices.shape), self.weight, sparse=True)

    @torch.no_grad()
    def pooled(self, indices: torch.Tensor, offsets: torch.Tensor, mode: str = "sum") -> torch.Tensor:
        """Return the sum or the mean of each bag's rows; an empty bag gives zeros."""
        flat, offsets = self._checked(indices), _checked_offsets(indices, offsets, mode)
        with self._lock:
            return F.embedding_bag(flat, self.weight, offsets, mode=mode)

    @torch.no_grad()
    def update(self, indices: torch.Tensor, gradient: torch.Tensor) -> None:
        """Apply a gradient of rows; those named twice are summed first, in the order given."""
        flat = self._checked(indices)
        _check_shape(self.name, gradient, (*indices.shape, self.weight.shape[1]))
        rows, places = torch.unique(flat, return_inverse=True)
        total = self.weight.new_zeros(len(rows), self.weight.shape[1])
        # One row after another on the CPU, whatever the number of threads.
        total.index_add_(0, places, gradient.reshape(len(flat), total.shape[1]).to(total.dtype))
        with self._lock:
            self._optimizer.update(rows, total)

    @torch.no_grad()
    def update_pooled(self, indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor, mode: str) -> None:
        """Apply a gradient of bags: each row of a bag takes its bag's gradient, divided by its size for a mean."""
        offsets = _checked_offsets(indices, offsets, mode)
        _check_shape(self.name, gradient, (len(offsets), self.weight.shape[1]))
        sizes = torch.diff(offsets, append=offsets.new_tensor([len(indices)]))
        if mode == "mean":
            gradient = gradient / sizes.clamp(min=1).unsqueeze(1)
        self.update(indices, gradient.repeat_interleave(sizes, dim=0))

    @torch.no_grad()
    def update_attached(self, gradient: torch.Tensor) -> None:
        """Apply a gradient that distributed autograd accumulated, sparse as `attached_rows` makes it."""
        gradient = gradient.coalesce()
        with self._lock:
            self._optimizer.update(gradient.indices()[0], gradient.values())

    def _checked(self, indices: torch.Tensor) -> torch.Tensor:
        flat = self._flat(indices)
        self._check(flat)
        return flat

    def _flat(self, indices: torch.Tensor) -> torch.Tensor:
        if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
            raise IndexError(f"table {self.name!r}: indices are {indices.dtype}, and must be integers")
        return indices.reshape(-1).long()

    def _check(self, flat: torch.Tensor) -> None:
        rows = self.weight.shape[0]
        if not len(flat):
            return
        lowest, highest = torch.aminmax(flat)
        if lowest.item() < 0 or highest.item() >= rows:
            outside = (flat < 0) | (flat >= rows)
            raise IndexError(f"table {self.name!r} has {rows} rows, and no row {int(flat[outside][0])}")


class DenseParameter:
    """A dense float32 parameter and its optimizer."""

    def __init__(self, dense: Dense, seed: int) -> None:
        """Draw from N(0, 0.01 squared)."""
        self.name = dense.name
        self._shape = dense.shape
        self._value = torch.empty(dense.shape).normal_(0.0, 0.01, generator=_generator(seed, dense.name))
        self._optimizer = RowOptimizer(dense.optimizer, dense.lr, self._value.view(1, -1))
        self._lock = threading.Lock()

    def tensors(self) -> list[torch.Tensor]:
        """The parameter and its optimizer's state."""
        return [self._value, *self._optimizer.tensors()]

    def value(self) -> torch.Tensor:
        """Return a copy."""
        with self._lock:
            return self._value.clone()

    @torch.no_grad()
    def update(self, gradient: torch.Tensor) -> None:
        """Apply a gradient."""
        _check_shape(self.name, gradient, self._shape)
        with self._lock:
            self._optimizer.update(torch.tensor([0]), gradient.reshape(1, -1).to(self._value.dtype))


def _generator(seed: int, name: str) -> torch.Generator:
    drawn = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(drawn[:8], "big") >> 1)


def _check_shape(name: str, gradient: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(gradient.shape) != shape:
        raise ValueError(f"{name!r}: the gradient has shape {tuple(gradient.shape)}, and should have {shape}")


def _checked_offsets(indices: torch.Tensor, offsets: torch.Tensor, mode: str) -> torch.Tensor:
    if mode not in {"sum", "mean"}:
        raise ValueError(f'mode is {mode!r}, and should be "sum" or "mean"')
    offsets = offsets.long()
    if indices.dim() != 1 or offsets.dim() != 1:
        raise ValueError(f"indices and offsets have {indices.dim()} and {offsets.dim()} dimensions, and should have 1")
    bounds = torch.cat([offsets, offsets.new_tensor([len(indices)])])
    if len(offsets) and (int(offsets[0]) != 0 or bool((bounds.diff() < 0).any())):
        raise ValueError(f"offsets should rise from 0 to at most {len(indices)}")
    return offsets
