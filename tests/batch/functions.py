"""Functions that test servers run in batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxlib import batch
from fxlib.spec.contract import remote

NAME = "tests.batch.functions"
LOG: list[str] = []
_MEETING = threading.Barrier(3, timeout=20)


@remote(reads="table", batched_by=f"{NAME}:double_many")
def double(x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
    LOG.append(f"double {x.tolist()}")
    return x * 2 + plus


@remote(reads="table")
def double_many(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[torch.Tensor]:
    LOG.append(f"double_many of {len(calls)}")
    return [args[0] * 2 + kwargs.get("plus", 0.0) for args, kwargs in calls]


@remote(reads="table")
def too_few(calls: Sequence[object]) -> list[torch.Tensor]:
    return []


@remote(reads="table")
def meet() -> int:
    """Return once three calls are here at the same time."""
    return _MEETING.wait()


@remote(reads="table")
def slow(seconds: float) -> float:
    LOG.append(f"slow {seconds}")
    time.sleep(seconds)
    return seconds


@remote(reads="table")
def thread_after(seconds: float) -> tuple[int, bool]:
    """Return the thread that runs this, and whether it may run beside the others of its message."""
    time.sleep(seconds)
    return threading.get_ident(), batch.side_by_side()


@remote(reads="table")
def slow_in_turn(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[float]:
    LOG.append(f"slow_in_turn of {len(calls)}")
    return [slow(*args) for args, _ in calls]


@remote(reads="table")
def raised_by(x: torch.Tensor) -> torch.Tensor:
    """Write to the argument, which is the caller's own copy."""
    return x.add_(1)


@remote(reads="table")
def row(begin: int) -> torch.Tensor:
    """Return a view of what the server holds, and goes on holding."""
    return HELD[begin : begin + 2]


@remote(reads="table")
def same(value: Any) -> Any:
    return value


@remote(reads="table")
def take_out(entries: dict[str, int]) -> int | None:
    return entries.pop("key", None)


@remote(reads="table")
def leave(seconds: float) -> None:
    time.sleep(seconds)
    raise SystemExit(3)


@remote(reads="table")
def fail(message: str) -> None:
    LOG.append(f"fail {message}")
    raise LookupError(message)


@remote(reads="table")
def first() -> bool:
    return batch.is_first()


@remote(reads="table")
def attached(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * WEIGHT


@remote(reads="table")
def weight() -> torch.Tensor:
    """Return a leaf, as a server that returns its whole table does."""
    return WEIGHT


def attached_many(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> list[torch.Tensor]:
    return [attached(*args) for args, _ in calls]


def weight_many(calls: Sequence[object]) -> list[torch.Tensor]:
    return [WEIGHT for _ in calls]


class ParticularError(ValueError):
    """A server's own error."""


class UncommonError(Exception):
    """An error that cannot be made of a text."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(one, other)


@remote(reads="table")
def refuse(kind: str) -> None:
    if kind == "key":
        raise KeyError("x")
    if kind == "type":
        raise TypeError("x")
    if kind == "particular":
        raise ParticularError("é")
    if kind == "uncommon":
        raise UncommonError(1, 2)
    raise RuntimeError(kind)


@remote(writes="log")
def write(entry: str) -> None:
    if entry == "broken":
        raise ValueError(entry)
    LOG.append(entry)


def take_log() -> list[str]:
    entries = list(LOG)
    LOG.clear()
    return entries


def weight_gradient(context: int) -> torch.Tensor:
    return torch.distributed.autograd.get_gradients(context)[WEIGHT]


HELD = torch.arange(4.0)
WEIGHT = torch.tensor([1.5, -0.5], requires_grad=True)


_LIVE: dict[str, Any] = {"total": torch.zeros(2), "entries": []}


def add_to_total(x: torch.Tensor) -> torch.Tensor:
    """Return what the server goes on writing to."""
    return _LIVE["total"].add_(x)


def append(entry: int) -> list[int]:
    """Return what the server goes on writing to."""
    _LIVE["entries"].append(entry)
    return _LIVE["entries"]


def unsendable() -> object:
    return lambda: None
