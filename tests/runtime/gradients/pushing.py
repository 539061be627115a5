"""Models whose gradients travel together, their steps, and what is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed import rpc
from torch.fx import Node

from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import send_gradient
from fxlib.runtime.push_gradients import push_gradients
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME, read_log

ROWS = torch.tensor([1, 2])
Push = tuple[str, str, str]
"""Server, gradient function, name."""


def log(server: str = "ps0") -> list[str]:
    """What reached a server; asked for by a call of the program's own, which waits for nothing."""
    return rpc.rpc_sync(server, read_log)


def model(*pushes: Push, operator: Any = send_gradient, weights: tuple[float, ...] = ()) -> CapturedModule:
    """Sum of reads, each times its weight: with weight 0 a read takes no part."""
    program = Program("rows")
    parts: list[Node] = []
    for index, (server, gradient, name) in enumerate(pushes):
        result = program.call(server, "read", name, program.inputs[0])
        leaf = program.local(operator, result, server, f"{NAME}:{gradient}", (name, program.inputs[0]), {}, None, index)
        weight = weights[index] if weights else float(index + 1)
        if weight:
            parts.append(program.local(torch.mul, leaf, weight))
    total = parts[0]
    for part in parts[1:]:
        total = program.local(torch.add, total, part)
    return program.returns(total)


TWO = (("ps0", "take_gradient", "a"), ("ps0", "take_gradient", "b"))
BOTH = (*TWO, ("ps1", "take_gradient", "c"))


def step(module: CapturedModule) -> None:
    module(ROWS).sum().backward()
    push_gradients(module)


def backward(module: CapturedModule) -> None:
    module(ROWS).sum().backward()


@contextmanager
def messages() -> Iterator[list[tuple[str, Any]]]:
    """Yield what is sent by `rpc_async`: server and function."""
    sent: list[tuple[str, Any]] = []
    real = rpc.rpc_async

    def noting(to: str, function: Any, *, args: Any, **rest: Any) -> Any:
        sent.append((to, function))
        return real(to, function, args=args, **rest)

    with mock.patch.object(rpc, "rpc_async", noting):
        yield sent
