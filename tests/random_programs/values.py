"""A client that random programs of Python send values to: it answers with a number of everything that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

import fxlib

DEEPEST = 5


def get(host: str, value: Any) -> torch.Tensor:
    """Return a number that differs wherever something that the value leads to does."""
    return torch.tensor(_number(value, DEEPEST))


def get_later(host: str, value: Any) -> Future[torch.Tensor]:
    """Do so at once, and let the result be asked for later."""
    future: Future[torch.Tensor] = Future()
    future.set_result(get(host, value))
    return future


def join(future: Future[torch.Tensor]) -> torch.Tensor:
    """Return the number."""
    return future.result()


def _number(value: Any, depth: int) -> float:
    if isinstance(value, (bool, int, float)):
        return float(value)
    if isinstance(value, (str, type(None))) or depth == 0 or callable(value):
        return float(len(value)) if isinstance(value, str) else 0.5
    if isinstance(value, (Mapping, np.ndarray)):
        value = list(value.values()) if isinstance(value, Mapping) else value.tolist()
    if not isinstance(value, (list, tuple)):
        held = getattr(value, "__dict__", None)
        value = list(held.values()) if held is not None else [getattr(value, each) for each in type(value).__slots__]
    return 0.1 * len(value) + sum((place + 1) * _number(each, depth - 1) for place, each in enumerate(value))


fxlib.register_call(
    name="values of random programs",
    blocking=get,
    issue=get_later,
    wait=join,
    contract=fxlib.Contract(reads=frozenset({"values"})),
    to="host",
)
