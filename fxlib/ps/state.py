"""The state of a reference server: tables and dense parameters with their optimizers; and how servers share tables."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar, cast
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from typing_extensions import override

from fxlib.batch.known_rows import KnownRows
from fxlib.errors import WorkloadError
from fxlib.spec.servers import Server, ServiceTimePer, Table
from fxlib.spec.workload import Dense

Held = TypeVar("Held")


class ServerState:
    """The parameters of one server, drawn from a seed."""

    def __init__(self, server: Server, seed: int) -> None:
        """Draw each parameter by a generator of its own, so that it does not depend on the server's other ones."""
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
        """Return the SHA-256 over names and bits of all parameters and optimizer state."""
        total = hashlib.sha256()
        held: dict[str, EmbeddingTable | DenseParameter] = {f"table {name}": each for name, each in self.tables.items()}
        held |= {f"dense {name}": each for name, each in self.dense.items()}
        for name in sorted(held):
            total.update(name.encode())
            for tensor in held[name].tensors():
                total.update(tensor.numpy().tobytes())
        return total.hexdigest()

    def save(self, folder: str) -> None:
        """Write each table and dense parameter, with its optimizer's state, as a file of its own.

        A file appears whole or not at all, and says which server wrote it. Updates of a table wait while it is copied.

        Raises:
            WorkloadError: another server wrote a file of that name.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for file, _ in self._files(target):
            self._refuse_anothers(file)
        for file, held in self._files(target):
            unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
            try:
                save_file(held.saved(), unfinished, metadata={_WRITER: self.server.name})
                self._name(unfinished, file)
            finally:
                unfinished.unlink(missing_ok=True)

    def load(self, folder: str) -> None:
        """Read what this server holds: all of it, or nothing.

        Raises:
            WorkloadError: a file is missing, cannot be read, or is of another size, dtype or optimizer.
        """
        found = []
        for file, held in self._files(Path(folder)):
            where = f"server {self.server.name!r}"
            if not file.is_file():
                raise WorkloadError(f"nothing was saved as {file}", where=where)
            try:
                saved, like = load_file(file), held.saved()
            except (SafetensorError, OSError) as error:
                raise WorkloadError(f"{file} cannot be read: {error}", where=where) from error
            if _forms(saved) != _forms(like):
                raise WorkloadError(f"{file} is of another size or dtype, or of another optimizer", where=where)
            found.append((held, saved))
        for held, saved in found:
            held.take(saved)

    def _files(self, folder: Path) -> Iterator[tuple[Path, EmbeddingTable | DenseParameter]]:
        for kind, held in (("table", self.tables), ("dense", self.dense)):
            for name, each in held.items():
                yield folder / f"{kind}.{quote(name, safe='')}.safetensors", each

    def _name(self, unfinished: Path, file: Path) -> None:
        with suppress(OSError):
            file.hardlink_to(unfinished)  # when two servers save at once, only one succeeds here
            return
        self._refuse_anothers(file)
        unfinished.replace(file)

    def _refuse_anothers(self, file: Path) -> None:
        writer = _writer(file)
        if writer not in (None, self.server.name):
            raise WorkloadError(
                f"{file} was saved by server {writer!r}, whose table or parameter of this name it holds",
                where=f"server {self.server.name!r}",
                hint="Save to a folder for each server, or to a new one, or give the servers' tables different names.",
            )

    def _find(self, kind: str, held: Mapping[str, Held], name: str) -> Held:
        if name not in held:
            known = ", ".join(sorted(held)) or "none"
            raise WorkloadError(f"no {name!r} among its {kind} ({known})", where=f"server {self.server.name!r}")
        return held[name]


_WRITER = "server"
"""Key of a file's metadata: the name of the server that wrote the file."""


def _writer(file: Path) -> str | None:
    """Return the server that wrote a file; None if there is no file, or it does not say."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            return (opened.metadata() or {}).get(_WRITER)
    except SafetensorError:
        return None


def _forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (each.shape, each.dtype) for name, each in tensors.items()}


_INDICES = frozenset({torch.int64, torch.int32})
"""Dtypes of indices by which rows can be read without a conversion."""


class _Parameter:
    """The common base of tables and dense parameters: values, their optimizer's state, and a lock for both."""

    _lock: threading.Lock

    def tensors(self) -> list[torch.Tensor]:
        """Return the values, then the optimizer's state."""
        raise NotImplementedError

    def saved(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors, by name."""
        with self._lock:
            return {f"{index}": each.clone() for index, each in enumerate(self.tensors())}

    @torch.no_grad()
    def take(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over the values of tensors as `saved` returns them."""
        with self._lock:
            for index, each in enumerate(self.tensors()):
                each.copy_(saved[f"{index}"])


class EmbeddingTable(_Parameter):
    """A table of rows, [rows, dim] float32, and its sparse optimizer."""

    def __init__(self, table: Table, seed: int) -> None:
        """Draw rows as DLRM does, uniformly within 1/sqrt(rows)."""
        self.name = table.name
        bound = table.rows**-0.5
        rows = torch.empty(table.rows, table.dim).uniform_(-bound, bound, generator=_generator(seed, table.name))
        self.weight = rows.requires_grad_()
        self._optimizer = RowOptimizer(table.optimizer, table.lr, rows.detach())
        self._lock = threading.Lock()

    @override
    def tensors(self) -> list[torch.Tensor]:
        """Return the table and its optimizer's state."""
        return [self.weight.detach(), *self._optimizer.tensors()]

    @torch.no_grad()
    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows at these indices."""
        (found,) = self._copied((self.weight,), indices)
        return found

    @torch.no_grad()
    def known_rows(self, indices: torch.Tensor) -> KnownRows:
        """Return a copy of the rows at these indices, with all that their next update needs besides its gradient."""
        rows, *state = self._copied((self.weight, *self._optimizer.tensors()), indices)
        return KnownRows(rows=rows, state=tuple(state), settings=(self._optimizer.lr,))

    def _copied(self, tensors: Sequence[torch.Tensor], indices: torch.Tensor) -> list[torch.Tensor]:
        if indices.dtype not in _INDICES:
            indices = self._flat(indices).view(indices.shape)
        with self._lock:
            try:
                return [torch.embedding(each, indices) for each in tensors]
            except IndexError:  # torch does not say which index is wrong
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
        """Apply gradients of rows; those of a row that is named twice are summed first, in the order given."""
        flat = self._checked(indices)
        _check_shape(self.name, gradient, (*indices.shape, self.weight.shape[1]))
        rows, _, total = _summed(flat, gradient, like=self.weight)
        with self._lock:
            self._optimizer.update(rows, total)

    @torch.no_grad()
    def update_pooled(self, indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor, mode: str) -> None:
        """Apply gradients of bags: each row takes its bag's gradient, divided by the bag's size for a mean."""
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


class DenseParameter(_Parameter):
    """A dense float32 parameter and its optimizer."""

    def __init__(self, dense: Dense, seed: int) -> None:
        """Draw values from N(0, 0.01 squared)."""
        self.name = dense.name
        self._shape = dense.shape
        self._value = torch.empty(dense.shape).normal_(0.0, 0.01, generator=_generator(seed, dense.name))
        self._optimizer = RowOptimizer(dense.optimizer, dense.lr, self._value.view(1, -1))
        self._lock = threading.Lock()

    @override
    def tensors(self) -> list[torch.Tensor]:
        """Return the parameter and its optimizer's state."""
        return [self._value, *self._optimizer.tensors()]

    def value(self) -> torch.Tensor:
        """Return a copy of the parameter."""
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


_EPSILON = 1e-10
"""The term that keeps Adagrad's division finite, as in `torch.optim.Adagrad`."""


class RowOptimizer:
    """Updates chosen rows of `parameter` in place. The rows of one update must be distinct.

    Adagrad (Duchi, Hazan and Singer, 2011) keeps the sum of squares of each element's gradients.
    """

    def __init__(self, name: Literal["sgd", "adagrad"], lr: float, parameter: torch.Tensor) -> None:
        self.lr = lr
        self._parameter = parameter
        self._squares = torch.zeros_like(parameter) if name == "adagrad" else None

    def tensors(self) -> list[torch.Tensor]:
        """Return the optimizer's own state."""
        return [] if self._squares is None else [self._squares]

    def update(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Apply `gradient` [len(rows), dim] to `rows`."""
        # `index_select` and `index_copy_` take rows alone; general indexing by brackets is slower by half.
        held = [self._parameter, *self.tensors()]
        taken = [each.index_select(0, rows) for each in held]
        _step(taken, gradient, self.lr)
        for each, changed in zip(held, taken, strict=True):
            each.index_copy_(0, rows, changed)


def _step(taken: Sequence[torch.Tensor], gradient: torch.Tensor, lr: float) -> None:
    """Change rows and their optimizer's state in place by the gradient of these rows."""
    rows, *state = taken
    if state:
        (squares,) = state
        squares.add_(gradient * gradient)
        gradient = gradient / squares.sqrt().add_(_EPSILON)
    rows.sub_(lr * gradient)


def _summed(
    flat: torch.Tensor, gradient: torch.Tensor, *, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distinct rows, the position of each index among them, and the sum of each row's gradients."""
    rows, positions = torch.unique(flat, return_inverse=True)
    total = like.new_zeros(len(rows), like.shape[-1])
    # On the CPU this adds one row after another, whatever the number of threads.
    total.index_add_(0, positions, gradient.reshape(len(flat), total.shape[1]).to(total.dtype))
    return rows, positions, total


@torch.no_grad()
def updated_rows(known: KnownRows, indices: torch.Tensor, gradient: torch.Tensor) -> KnownRows:
    """Return what `EmbeddingTable.update` makes of rows read by the same indices; it uses the same operators."""
    flat = indices.reshape(-1).long()
    _check_shape("rows", gradient, tuple(known.rows.shape))
    rows, positions, total = _summed(flat, gradient, like=known.rows)
    named = torch.empty_like(rows).scatter_(
        0, positions, torch.arange(len(flat), device="cpu")
    )  # any index that names the row will do
    taken = [each.reshape(len(flat), each.shape[-1]).index_select(0, named) for each in known.tensors]
    (lr,) = known.settings
    _step(taken, total, cast("float", lr))
    changed, *state = (each.index_select(0, positions).view(known.rows.shape) for each in taken)
    return KnownRows(rows=changed, state=tuple(state), settings=known.settings, made_by=known.made_by)


def place(
    tables: Sequence[Table],
    names: Sequence[str],
    *,
    service_time_s: float = 0.0,
    service_time_per: ServiceTimePer = "item",
) -> tuple[Server, ...]:
    """Spread tables over servers: the largest first, each to the server that holds the least (Graham's LPT rule, 1969).

    Args:
        tables: all tables of the job.
        names: the names of the servers, at least one.
        service_time_s: the service time of each server, in seconds.
        service_time_per: whether a call or each item of a batch takes this time.

    Raises:
        ValueError: there is no server.
    """
    if not names:
        raise ValueError("no server to place tables on")
    held: dict[str, list[Table]] = {name: [] for name in names}
    for table in sorted(tables, key=lambda table: -table.rows * table.dim):
        least = min(names, key=lambda name: sum(each.rows * each.dim for each in held[name]))
        held[least].append(table)
    return tuple(
        Server(
            name=name,
            tables=tuple(table for table in tables if table in held[name]),
            service_time_s=service_time_s,
            service_time_per=service_time_per,
        )
        for name in names
    )
