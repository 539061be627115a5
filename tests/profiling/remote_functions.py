"""Functions that test servers run."""

from __future__ import annotations

import threading
import time

import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.spec.contract import remote
from fxlib.spec.profile import Profile

_TURN = threading.Lock()
_NAPS: list[float] = []


@remote(pure=True)
def nap(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x + 1


@remote(pure=True)
def nap_in_turn(x: torch.Tensor, seconds: float) -> torch.Tensor:
    with _TURN:
        _NAPS.append(seconds)
        time.sleep(seconds)
    return x + 1


def naps() -> int:
    return len(_NAPS)


@remote(pure=True)
def many(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, list[object]]]:
    return x.long(), {"rest": [3, "words", None, x > 0]}


@remote(pure=True)
def attached(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return two tensors whose backward takes 20 ms here."""
    made = x.clone().requires_grad_()
    made.register_hook(lambda _: time.sleep(0.02))
    return made + 1, {"twice": 2 * made}


def unknown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def fail() -> None:
    raise ValueError("not today")


def absent(*_: object) -> None:
    raise ModuleNotFoundError("No module named 'fxlib'")


class Shared(nn.Module):
    """Reads of a server that another trainer reads, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = rpc.rpc_sync("ps1", nap, args=(x, 0.02))
        return first + rpc.rpc_sync("ps1", nap, args=(x + 1, 0.02))


def profile_shared() -> Profile:
    """Measure `Shared` in this process, as one trainer of several does."""
    return fxlib.profile(Shared(), [torch.ones(2)], steps=3)
