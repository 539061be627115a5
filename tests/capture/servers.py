"""What the servers of the capture tests run, and helpers in a module other than the model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import rpc_async, rpc_sync
from torch.distributed.rpc import rpc_sync as renamed

import fxlib

NAME = "tests.capture.servers"


def double(x: torch.Tensor, by: float = 2.0, *, plus: float = 0.0) -> torch.Tensor:
    return x * by + plus


@fxlib.remote(reads="tables")
def lookup(table: str, rows: torch.Tensor) -> torch.Tensor:
    return (rows + len(table)).float()


@fxlib.remote(pure=True, returns=(None, [None, None], {"last": None}))
def several(x: torch.Tensor) -> Any:
    return x + 1, [x + 2, x + 3], {"last": x + 4}


@fxlib.remote(pure=True, returns=(None, None))
def too_much(x: torch.Tensor) -> Any:
    return x + 1, x + 2, x + 3


@fxlib.remote(pure=True, returns={"a": None, "b": None})
def other_keys(x: torch.Tensor) -> Any:
    return {"a": x, "c": x, "b": x}


@fxlib.remote(pure=True, returns=[[None, None], {"a": None, "b": None}])
def rows_and_features(x: torch.Tensor) -> Any:
    return [[x + 1, x + 2], {"a": x + 3, "b": x + 4}]


def nothing(x: torch.Tensor) -> None:
    pass


def pair(x: torch.Tensor) -> Any:
    return x + 1, x * 3


@fxlib.remote(reads="tables", gradient=f"{NAME}:push")
def embed(x: torch.Tensor) -> torch.Tensor:
    return x.float() * 5


_PUSHED: list[torch.Tensor] = []


@fxlib.remote(writes="tables")
def push(x: torch.Tensor, gradient: torch.Tensor) -> None:
    _PUSHED.append(gradient)


def pushed() -> list[torch.Tensor]:
    taken = list(_PUSHED)
    _PUSHED.clear()
    return taken


class Arithmetic:
    """Static, class and bound methods as remote functions."""

    def __init__(self, by: int) -> None:
        self.by = by

    @staticmethod
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @classmethod
    def named(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Table(nn.Module):
    """A table that lives on a server."""

    def __init__(self, rows: int = 10, dim: int = 3) -> None:
        super().__init__()
        torch.manual_seed(rows)
        self.weight = nn.Parameter(torch.randn(rows, dim))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows]

    @fxlib.remote(reads="weight")
    def rows(self, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.weight[rows] * scale


class Stage(nn.Module):
    """A stage of a pipeline, which fetches what it is given RRefs to, wherever that is."""

    def __init__(self, features: int) -> None:
        super().__init__()
        torch.manual_seed(features)
        self.layer = nn.Linear(features, 4)

    def forward(self, x_rref: Any, *more: Any) -> torch.Tensor:
        found: torch.Tensor = self.layer(x_rref.to_here().float())
        for each in more:
            found = found + each.to_here()
        return found

    def gradients(self, context: int) -> torch.Tensor:
        return torch.distributed.autograd.get_gradients(context)[self.layer.weight]


class Decoder(nn.Module):
    """The output layer of a language model, on a server."""

    def __init__(self, hidden: int, words: int) -> None:
        super().__init__()
        torch.manual_seed(hidden)
        self.dropout = nn.Dropout(0.0)
        self.top = nn.Linear(hidden, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.dropout(x))


class Averager:
    """A parameter server that answers all trainers at once."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution
    def update(rref: Any, gradients: list[torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        self = rref.local_value()
        future, self.future = self.future, torch.futures.Future()
        future.set_result(torch.stack(gradients).mean(0))
        return future

    @rpc.functions.async_execution
    def later(self, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(x + 1)
        return future


class Sharded(nn.Module):
    """A model part that knows its own parameters by RRef, as the parameter-server tutorial's does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()

    def gradient(self, context: int) -> torch.Tensor:
        return torch.distributed.autograd.get_gradients(context)[self.layer.weight]


_SHARED: dict[str, Sharded] = {}


def shared(name: str) -> Sharded:
    return _SHARED.setdefault(name, Sharded())


# Helpers as PyTorch's parameter-server tutorials have them.


def call_method(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    return rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


def helped(x: torch.Tensor) -> torch.Tensor:
    return renamed("ps1", double, args=(x,), kwargs={"plus": 1.0}) + rpc_async("ps0", double, (x,)).wait()


def made_by_closure(to: str) -> Any:
    call = rpc.rpc_sync

    def through(x: torch.Tensor, send: Any = call) -> torch.Tensor:
        return call(to, double, (x,)) + send(to, double, (x, 7))

    return through


class Counted:
    """Something that is written and read on a server."""

    def __init__(self) -> None:
        self.calls = 0
        self.pushed: list[tuple[torch.Tensor, torch.Tensor]] = []

    @fxlib.remote(writes="count")
    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x[:, None].float() + self.calls

    @fxlib.remote(reads="count", gradient=".push")
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(x), 3) * self.calls

    @fxlib.remote(writes="count")
    def push(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        self.pushed.append((x, gradient))

    def taken(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self.pushed
