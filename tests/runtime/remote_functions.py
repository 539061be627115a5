"""Functions that test servers run."""

from __future__ import annotations

import time

import torch

from fxlib.contracts import remote
from fxlib.runtime import functions

_LOG: list[str] = []


def add(a: torch.Tensor, b: torch.Tensor | float = 1, *, scale: float = 1.0) -> torch.Tensor:
    return (a + b) * scale


def slow(value: object, seconds: float) -> object:
    time.sleep(seconds)
    return value


def fail(message: str, seconds: float = 0.0) -> object:
    time.sleep(seconds)
    raise ValueError(message)


def write(entry: str) -> None:
    _LOG.append(entry)


def read_log() -> list[str]:
    log = list(_LOG)
    _LOG.clear()
    return log


@remote(reads="tables", gradient="tests.runtime.remote_functions:take_gradient")
def read(name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows.float() + 1.0


@remote(writes="tables")
def take_gradient(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    _LOG.append(f"{name} {gradient.tolist()}")


@remote(writes="tables")
def take_rows(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    _LOG.append(f"{name} {rows.tolist()}")


class Adder:
    """An object that lives on a server."""

    def __init__(self, amount: float) -> None:
        self.weight = torch.full((2,), amount, requires_grad=True)

    def add(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.weight * scale

    def fail(self) -> None:
        raise KeyError("no such thing")

    def gradient(self, context_id: int) -> torch.Tensor:
        return torch.distributed.autograd.get_gradients(context_id)[self.weight]


NAME = "tests.runtime.remote_functions"
for _function in (add, slow, fail, write, read_log, read, take_gradient, take_rows, Adder):
    functions.register(_function)
