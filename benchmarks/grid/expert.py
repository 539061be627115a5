"""As an expert writes the step by hand: coalesced per server, issued first, waited for last, pushed at once.

There are three ways to ask one server for many tables, and which of them is fast depends on the server. The expert
knows the server: `python -m benchmarks.overlap` tries all three in each cell, and takes the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final, Literal

import torch
from torch import Tensor
from torch.distributed.rpc import rpc_async
from torch.futures import Future, wait_all
from typing_extensions import override

from benchmarks.grid.cells import Cell
from benchmarks.grid.recommender import Towers, server_name
from fxlib import batch, ps
from fxlib.runtime.tracking.autograd_node import Backward, Slot, tracked

Way = Literal["single", "serial", "pooled"]

SINGLE: Final = "single"
"""One call for each table, all in flight together."""
SERIAL: Final = "serial"
"""One call for each server, which reads its tables one after another."""
POOLED: Final = "pooled"
"""One call for each server, which reads its tables side by side."""


Column = tuple[str, str | tuple[str, ...], Tensor]
"""A server, the table or tables that it is asked for, and their indices."""


def ways(cell: Cell) -> tuple[Way, ...]:
    """Which of them work in a cell: an autograd context belongs to a thread, so pooled reads would have no gradient."""
    return (SINGLE, SERIAL) if cell.mode == "distributed" else (SINGLE, SERIAL, POOLED)


def lookup_serial(tables: Sequence[str], indices: Tensor) -> Tensor:
    """On the server: rows of several tables, indices [tables, batch] to [tables, batch, dim]."""
    return torch.stack(ps.lookup_many([(each, {}) for each in zip(tables, indices, strict=True)]))


def lookup_pooled(tables: Sequence[str], indices: Tensor) -> Tensor:
    """On the server: as `lookup_serial`, with a thread for each table."""
    return torch.stack(list(_threads().map(ps.lookup, tables, indices)))


def lookup_attached(tables: Sequence[str], indices: Tensor) -> Tensor:
    """On the server: as `lookup_serial`, under distributed autograd."""
    return torch.stack([ps.lookup_attached(*each) for each in zip(tables, indices, strict=True)])


def push_serial(tables: Sequence[str], indices: Tensor, gradient: Tensor) -> None:
    """On the server: take the gradient [tables, batch, dim] of `lookup_serial`."""
    for outcome in batch.run_in_order([(ps.push, each, {}) for each in zip(tables, indices, gradient, strict=True)]):
        batch.result(outcome)


def push_pooled(tables: Sequence[str], indices: Tensor, gradient: Tensor) -> None:
    """On the server: as `push_serial`, with a thread for each table."""
    list(_threads().map(ps.push, tables, indices, gradient))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(16)


def push_then_look_up(
    way: Way, what: str | Sequence[str], indices: Tensor, gradient: Tensor, following: Tensor
) -> Tensor:
    """On the server: take a gradient, then read the rows of the next step."""
    PUSH[way](what, indices, gradient)
    return LOOK_UP[way](what, following)


def look_up_apart(tables: Sequence[str], indices: Sequence[Tensor]) -> list[Tensor]:
    """On the server: rows of several tables, a tensor for each table."""
    return ps.lookup_many([(each, {}) for each in zip(tables, indices, strict=True)])


def push_then_look_up_apart(
    tables: Sequence[str], indices: Sequence[Tensor], gradients: Sequence[Tensor], following: Sequence[Tensor]
) -> list[Tensor]:
    """On the server: take the gradients of several tables, then read the rows of the next step, if there is one."""
    for each in zip(tables, indices, gradients, strict=True):
        ps.push(*each)
    return look_up_apart(tables, following) if following else []


PUSH: Final[Mapping[Way, Callable[..., None]]] = {SINGLE: ps.push, SERIAL: push_serial, POOLED: push_pooled}
LOOK_UP: Final[Mapping[Way, Callable[..., Tensor]]] = {SINGLE: ps.lookup, SERIAL: lookup_serial, POOLED: lookup_pooled}


def gradient_of(answer: Tensor | Slot) -> Tensor | None:
    """Return the gradient that has arrived for an answer."""
    return answer.gradient if isinstance(answer, Slot) else answer.grad


class Expert:
    """The program: `predict` issues first and waits last, `send` sends the gradients to all servers and waits."""

    def __init__(self, towers: Towers, cell: Cell, way: Way) -> None:
        self.towers, self.cell, self.way = towers, cell, way
        servers = range(min(cell.servers, cell.lookups))
        self._tables = [tuple(f"table{i}" for i in range(cell.lookups)[rank :: cell.servers]) for rank in servers]
        self._due: list[tuple[Tensor | Slot, *Column]] = []
        """Whose gradients are to go: what has the gradient, server, table or tables, and indices."""

    def predict(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return the logits [batch, 1]."""
        columns = self._columns(sparse)
        futures = self._issued(columns)
        features = self.towers.bottom(dense)
        answers = self._answers(futures)
        if self.cell.mode == "push":
            answers = self._tracked(answers, columns)
        return self.towers.interact(features, self._vectors(answers))

    def _tracked(self, answers: list[Tensor], columns: Sequence[Column]) -> list[Tensor]:
        """Return answers that take gradients, and note where these are to go."""
        self._due = [(answer.requires_grad_(), *column) for column, answer in zip(columns, answers, strict=True)]
        return answers

    def send(self) -> None:
        """Send the gradients of the last step, and wait until all have arrived."""
        push = PUSH[self.way]
        wait_all([rpc_async(to, push, args=(what, each, gradient_of(answer))) for answer, to, what, each in self._due])
        self._due.clear()

    def _issued(self, columns: Sequence[Column]) -> list[Future[Tensor]]:
        """Return the lookups of a step in flight."""
        return self._ask(columns)

    def _ask(self, columns: Sequence[Column]) -> list[Future[Tensor]]:
        return [rpc_async(to, self._lookup(), args=(what, each)) for to, what, each in columns]

    def _answers(self, futures: list[Future[Tensor]]) -> list[Tensor]:
        """Return the answers of lookups in flight."""
        return wait_all(futures)

    def _columns(self, sparse: Tensor) -> list[Column]:
        """Return what is asked of whom: server, table or tables, and indices."""
        columns = sparse.t().contiguous()
        if self.way == SINGLE:
            return [(server_name(i, self.cell.servers), f"table{i}", each) for i, each in enumerate(columns)]
        return [
            (server_name(rank, self.cell.servers), tables, columns[rank :: self.cell.servers])
            for rank, tables in enumerate(self._tables)
        ]

    def _lookup(self) -> Callable[..., Tensor]:
        if self.cell.mode == "distributed":
            return ps.lookup_attached if self.way == SINGLE else lookup_attached
        return LOOK_UP[self.way]

    def _vectors(self, answers: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the vectors [batch, dim] in the order of the tables."""
        if self.way == SINGLE:
            return answers
        return self._in_order([answer.unbind(0) for answer in answers])

    def _in_order(self, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the rows of all servers in the order of the tables."""
        return [rows[i % self.cell.servers][i // self.cell.servers] for i in range(self.cell.lookups)]


class ExpertAcross(Expert):
    """The program of an expert who knows the next batch: its rows are asked for during this step.

    Where the step pushes, they come with the answer to the push, which the server takes first; otherwise they are asked
    for before anything else of the step is done. Pushes are waited for as in `Expert`.
    """

    def __init__(self, towers: Towers, cell: Cell, way: Way) -> None:
        super().__init__(towers, cell, way)
        self.following: Tensor | None = None
        """The indices of the next step; None where this is the last."""
        self._ahead: list[Future[Tensor]] = []

    @override
    def send(self) -> None:
        if self.following is None or self.cell.mode != "push":
            super().send()
            return
        columns = self._columns(self.following)
        self._ahead = [
            rpc_async(to, push_then_look_up, args=(self.way, what, each, gradient_of(answer), following))
            for (answer, to, what, each), (_, _, following) in zip(self._due, columns, strict=True)
        ]
        wait_all(self._ahead)
        self._due.clear()

    @override
    def _issued(self, columns: Sequence[Column]) -> list[Future[Tensor]]:
        futures = self._ahead or self._ask(columns)
        if self.following is not None and self.cell.mode != "push":
            self._ahead = self._ask(self._columns(self.following))
        else:
            self._ahead = []
        return futures


class ExpertApart(ExpertAcross):
    """The same program, with a tensor for each call's keys, rows and gradient, as the blocking program has them.

    It sends one message to each server, as fxlib does, and its server functions take the calls one after another.
    """

    def __init__(self, towers: Towers, cell: Cell) -> None:
        super().__init__(towers, cell, SINGLE)

    @override
    def send(self) -> None:
        following = None if self.following is None else self._columns(self.following)
        sent = []
        for rank in range(len(self._tables)) if self._due else ():
            answers, (to, *_), tables, indices = zip(*self._due[rank :: self.cell.servers], strict=True)
            gradients = [gradient_of(answer) for answer in answers]
            nexts = [] if following is None else [keys for _, _, keys in following[rank :: self.cell.servers]]
            sent.append(rpc_async(to, push_then_look_up_apart, args=(tables, indices, gradients, nexts)))
        wait_all(sent)
        if self._due:
            self._ahead = sent if following else []
        self._due.clear()

    @override
    def _ask(self, columns: Sequence[Column]) -> list[Future[Tensor]]:
        sent = []
        for rank in range(len(self._tables)):
            (to, *_), tables, indices = zip(*columns[rank :: self.cell.servers], strict=True)
            sent.append(rpc_async(to, look_up_apart, args=(tables, indices)))
        return sent

    @override
    def _answers(self, futures: list[Future[Tensor]]) -> list[Tensor]:
        return self._in_order([list(rows) for rows in wait_all(futures)])


class ExpertExact(ExpertApart):
    """The same program, with gradients as fxlib takes them so that pushes are exact whatever the program does.

    They come by one autograd node for each message, at the end of backward, in memory of their own; and keys are pushed
    as they were sent. Without pushes it is no other program.
    """

    @override
    def _tracked(self, answers: list[Tensor], columns: Sequence[Column]) -> list[Tensor]:
        backward = Backward()
        made: dict[int, tuple[Tensor, Slot]] = {}
        for rank in range(len(self._tables)):
            places = range(rank, self.cell.lookups, self.cell.servers)
            together = tracked([answers[place] for place in places], backward, in_distributed_autograd=False)
            made.update(zip(places, together, strict=True))
        self._due = [(made[place][1], to, table, keys.clone()) for place, (to, table, keys) in enumerate(columns)]
        return [made[place][0] for place in range(self.cell.lookups)]
