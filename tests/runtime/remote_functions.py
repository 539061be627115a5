"""Functions that test servers run."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fxlib import batch
from fxlib.runtime import functions
from fxlib.spec.contract import remote

_LOG: list[str] = []
_GATE, _OVER = threading.Semaphore(0), threading.Semaphore(0)


def add(a: torch.Tensor, b: torch.Tensor | float = 1, *, scale: float = 1.0) -> torch.Tensor:
    return (a + b) * scale


def slow(value: object, seconds: float) -> object:
    time.sleep(seconds)
    return value


def held(value: object = None) -> object:
    """Return the value when `release` is called, or after a long time, and write that down."""
    _GATE.acquire(timeout=25)
    _LOG.append("held")
    _OVER.release()
    return value


def release() -> None:
    """Let one call of `held` go, and wait until it is over: what it writes must not reach the log of another test."""
    _GATE.release()
    _OVER.acquire(timeout=25)


def fail(message: str, seconds: float = 0.0) -> object:
    time.sleep(seconds)
    raise ValueError(message)


def write(entry: str) -> None:
    _LOG.append(entry)


def living() -> tuple[int, int]:
    """Return how many tensors and threads there are in this process."""
    gc.collect()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    return tensors, len(list(Path("/proc/self/task").iterdir()))


def start_threads() -> None:
    """Start the threads that batches start when one of their calls takes long, which it may at any time."""
    batch._helpers()


@dataclass
class Reply:
    """An object of a class of the program's own."""

    rows: torch.Tensor
    count: int


@remote(reads="tables")
def reply(rows: torch.Tensor) -> Reply:
    return Reply(rows + 1.0, 3)


@remote(writes="log")
def write_sum(rows: torch.Tensor) -> None:
    _LOG.append(f"sum {rows.sum().item()}")


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


@remote(writes="tables", batchable=False)
def take_alone(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    time.sleep(0.01 if name == "a" else 0.0)
    _LOG.append(f"{name} {gradient.tolist()}")


@remote(writes="tables")
def take_slowly(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    time.sleep(0.1)
    _LOG.append(f"{name} {gradient.tolist()}")


@remote(writes="tables")
def take_when_released(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    held()


@remote(writes="tables")
def take_very_slowly(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    time.sleep(2.0)
    _LOG.append(f"{name} {gradient.tolist()}")


@remote(writes="tables", part="name")
def take_parts_slowly(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    time.sleep(0.1)
    _LOG.append(f"{name} {gradient.tolist()}")


@remote(writes="tables", part="name")
def take_part(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    if name == "refused":
        raise ValueError(f"{name} at {gradient.tolist()[0]}")
    _LOG.append(f"{name} {gradient.tolist()}")


@remote(writes=["tables", "dense"], part="name")
def take_part_of_all(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    _LOG.append(f"{name} {gradient.tolist()}")


def take_unknown(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    _LOG.append(f"{name} {gradient.tolist()}")


@remote(writes="tables")
def fail_to_take(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    raise ValueError(f"{name} is refused")


@remote(writes="tables", batchable=False)
def fail_to_take_alone(name: str, rows: torch.Tensor, gradient: torch.Tensor) -> None:
    raise ValueError(f"{name} is refused")


@remote(reads="tables", gradient="tests.runtime.remote_functions:take_several")
def read_several(name: str, rows: torch.Tensor) -> dict[str, object]:
    return {"rows": rows, "pair": (rows.float() + 1.0, rows.double() + 2.0)}


@remote(reads="tables", gradient="tests.runtime.remote_functions:take_several")
def read_shared(name: str, x: torch.Tensor) -> dict[str, object]:
    rows = x.clone()
    return {"one": rows, "several": [rows]}


@remote(writes="tables")
def take_several(name: str, rows: torch.Tensor, gradient: dict[str, object]) -> None:
    _LOG.append(f"{name} {gradient}")


class Older:
    """What `fxlib.batch` was before its calls had limits."""

    @staticmethod
    def run_in_order(calls: object) -> None:
        raise AssertionError(f"nobody sends {calls} alone")


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
for _function in (add, slow, held, release, fail, write, read_log, read, take_gradient, take_rows, take_unknown, Adder):
    functions.register(_function)
