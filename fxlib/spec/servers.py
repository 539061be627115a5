"""The parameter servers around a trainer: their state, and the objects that RRefs refer to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from fxlib.errors import WorkloadError

TableOptimizer = Literal["sgd", "adagrad"]
ServiceTimePer = Literal["call", "item"]

MAX_STATE_ELEMENTS = 1 << 36
"""Maximum number of elements in all tables and dense parameters of one server."""

MAX_SERVICE_TIME_S = 60.0
_WORKER_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding table of the reference server `fxlib.ps`: [rows, dim] float32, with its own sparse optimizer.

    Raises:
        WorkloadError: the table has no row or column, or its optimizer is unknown.
    """

    name: str
    rows: int
    dim: int
    optimizer: TableOptimizer = "sgd"
    lr: float = 0.01

    def __post_init__(self) -> None:
        """Check size and optimizer."""
        if self.rows < 1 or self.dim < 1:
            raise WorkloadError(f"[{self.rows}, {self.dim}] is not a valid table", where=f"Table({self.name!r})")
        _check_optimizer(self.optimizer, self.lr, f"Table({self.name!r})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A dense parameter of the reference server `fxlib.ps`.

    Raises:
        WorkloadError: a size is negative, or its optimizer is unknown.
    """

    name: str
    shape: tuple[int, ...]
    optimizer: TableOptimizer = "sgd"
    lr: float = 0.01

    def __post_init__(self) -> None:
        """Check shape and optimizer."""
        if any(size < 0 for size in self.shape):
            raise WorkloadError(f"negative size in {self.shape}", where=f"Dense({self.name!r}).shape")
        _check_optimizer(self.optimizer, self.lr, f"Dense({self.name!r})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One parameter-server process, called `name` on the RPC wire.

    Its state is that of the reference server (`tables`, `dense`), or is set up by `setup`, a function
    "pkg.mod:function" from a module that the operator allowed, called as `function(name, seed)` before each arm.
    `service_time_s` is added to each call that the reference server answers, in place of the network and load of the
    real server. It is added for each call in a message ("item"), or once for all of them ("call").

    Raises:
        WorkloadError: torch.distributed.rpc does not accept the name, the service time is not 0 to 60 s or is per
            something else, or there is too much state.
    """

    name: str
    tables: Sequence[Table] = ()
    dense: Sequence[Dense] = ()
    setup: str | None = None
    service_time_s: float = 0.0
    service_time_per: ServiceTimePer = "item"

    def __post_init__(self) -> None:
        """Check name and service time; normalize the rest."""
        object.__setattr__(self, "tables", tuple(self.tables))
        object.__setattr__(self, "dense", tuple(self.dense))
        if not is_worker_name(self.name):
            raise WorkloadError(
                f"a server needs the name that calls are sent to, and {self.name[:80]!r} is not one",
                where="Server.name",
                hint="torch.distributed.rpc accepts letters, digits, '-', '_' and ':', fewer than 128 of them.",
            )
        if not 0 <= self.service_time_s <= MAX_SERVICE_TIME_S:
            raise WorkloadError(f"must be 0 to {MAX_SERVICE_TIME_S:g} s", where=f"Server({self.name!r}).service_time_s")
        if self.service_time_per not in get_args(ServiceTimePer):
            where = f"Server({self.name!r}).service_time_per"
            raise WorkloadError(f"unknown {self.service_time_per!r}", where=where, hint='"call" or "item".')
        elements = sum(table.rows * table.dim for table in self.tables)
        elements += sum(math.prod(dense.shape) for dense in self.dense)
        if elements > MAX_STATE_ELEMENTS:
            raise WorkloadError(
                f"{elements} elements of state are more than {MAX_STATE_ELEMENTS}",
                where=f"Server({self.name!r}).tables",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObject:
    """The object behind an RRef that the graph reaches by name: its owner and the class "pkg.mod:Class" to build."""

    owner: str
    cls: str
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


def is_worker_name(text: str) -> bool:
    """Return whether `torch.distributed.rpc` accepts the text as the name of a worker."""
    return _WORKER_NAME.fullmatch(text) is not None


def _check_optimizer(name: str, lr: float, where: str) -> None:
    if name not in get_args(TableOptimizer):
        raise WorkloadError(f"unknown optimizer {name!r}", where=where, hint='"sgd" or "adagrad".')
    if not (math.isfinite(lr) and lr >= 0):
        raise WorkloadError("lr must be finite and not negative", where=where)
