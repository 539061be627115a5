"""Remote functions of a parameter server that takes its time."""

from __future__ import annotations

import random
import time

import torch

import fxlib

STATE = {"table": torch.zeros(4)}


@fxlib.remote(reads="table")
def slow_double(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return x * 2


@fxlib.remote(writes="table")
def push(x: torch.Tensor) -> None:
    time.sleep(random.choice((0.0, 0.002)))
    STATE["table"] = STATE["table"] + x


@fxlib.remote(reads="table")
def pull() -> torch.Tensor:
    time.sleep(random.choice((0.0, 0.002)))
    return STATE["table"].clone()


def push_unknown(x: torch.Tensor) -> None:
    push(x)


def pull_unknown() -> torch.Tensor:
    return pull()
