"""What an operator might allow: functions and classes that trials in tests call on their servers."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time

import torch
from torch import nn

from fxlib import remote
from fxlib_workers.trial.frames import framed

_calls = {"count": 0}
_lock = threading.Lock()


def prepare(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Set a server up, and return the state that is to be compared."""
    state["weight"] = torch.full((4,), float(seed))
    return state


state: dict[str, torch.Tensor] = {}


def keep_quiet(name: str, seed: int) -> None:
    """Set a server up, and keep its state to itself."""
    prepare(name, seed)


@remote(reads="weights", gradient="tests.workers.remote_code:learn")
def weigh(x: torch.Tensor) -> torch.Tensor:
    """Read state, slowly."""
    time.sleep(0.004)
    return x * state["weight"]


@remote(writes="weights")
def learn(x: torch.Tensor, gradient: torch.Tensor) -> None:
    """Write state."""
    state["weight"] -= 0.01 * gradient.sum(0)


@remote(reads="rows", keys="ids", concurrent=True, gradient="tests.workers.remote_code:change")
def rows(ids: torch.Tensor) -> torch.Tensor:
    """Read a row of state for each key, where anybody has such."""
    raise NotImplementedError


@remote(writes="rows", keys="ids")
def change(ids: torch.Tensor, gradient: torch.Tensor) -> None:
    """Write the rows of these keys."""
    raise NotImplementedError


@remote(pure=True)
def double(x: torch.Tensor) -> torch.Tensor:
    """Compute, slowly."""
    time.sleep(0.004)
    return x * 2


@remote(pure=True)
def hang(x: torch.Tensor) -> torch.Tensor:
    """Never answer."""
    time.sleep(3600)
    return x


@remote(pure=True)
def die(x: torch.Tensor) -> torch.Tensor:
    """End the server's process, at the tenth call."""
    _calls["count"] += 1
    if _calls["count"] >= 10:
        os._exit(7)
    return x


_hoard: dict[str, torch.Tensor] = {}


@remote(pure=True)
def hoard(x: torch.Tensor) -> torch.Tensor:
    """Hold 600 MiB from the first call on."""
    _hoard.setdefault("held", torch.ones(150 << 20))
    return x


@remote(pure=True)
def lie(x: torch.Tensor) -> torch.Tensor:
    """Send the host of this process a pickle, in place of the answer to whatever it asks next."""
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
            if each.family == socket.AF_UNIX:
                each.sendall(framed(pickle.dumps(print)))
    return x


@remote(pure=True)
def once(x: torch.Tensor) -> torch.Tensor:
    """Answer the first caller alone."""
    with _lock:
        _calls["count"] += 1
        if _calls["count"] > 1:
            raise RuntimeError("only once")
    return x


@remote(pure=True)
def count(x: torch.Tensor) -> torch.Tensor:
    """Return something else each time: its contract is a lie."""
    with _lock:
        _calls["count"] += 1
        return x + _calls["count"]


class Scale(nn.Module):
    """A module for a server to hold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by the parameter."""
        return x * self.weight


class Rows(nn.Module):
    """An embedding whose rows are made when they are first asked for."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.rows: dict[int, torch.Tensor] = {}
        self.row = self.rows.get
        self.lock = threading.Lock()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return torch.stack([self.rows.setdefault(int(each), torch.zeros(self.dim)) for each in ids])

    def push(self, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        for each, row in zip(ids, gradient, strict=True):
            self.rows[int(each)] = self.rows.setdefault(int(each), torch.zeros(self.dim)) - row
