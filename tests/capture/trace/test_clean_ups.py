"""A remote call that cleans up after an error is refused: a graph ends at the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.rpc import rpc_sync

import fxlib
from fxlib.errors import CaptureError
from tests.capture import servers
from tests.capture.servers import double


def ask(x: Tensor) -> Any:
    return rpc_sync("ps0", double, (x,))


class Lease(ContextDecorator):
    def __enter__(self) -> None:
        ask(torch.ones(1))

    def __exit__(self, *_: object) -> None:
        ask(torch.ones(1))


@contextmanager
def lease() -> Iterator[None]:
    ask(torch.ones(1))
    try:
        yield
    finally:
        ask(torch.ones(1))


def returns_from_the_block(x: Tensor) -> Any:
    try:
        return x * 2
    finally:
        ask(x)


def goes_on_behind_the_block(x: Tensor) -> Any:
    for step in range(2):
        try:
            x = ask(x)
        finally:
            if step < 2:
                x = x + ask(x)
    return x


def leaves_a_with(x: Tensor) -> Any:
    with Lease():
        return ask(x)


def leaves_a_generator(x: Tensor) -> Any:
    with lease():
        return ask(x)


@Lease()
def is_decorated(x: Tensor) -> Any:
    return x * 2


def calls_back(x: Tensor) -> Any:
    with ExitStack() as stack:
        stack.callback(ask, x)
        return x * 2


REFUSED = (
    returns_from_the_block,
    goes_on_behind_the_block,
    leaves_a_with,
    leaves_a_generator,
    is_decorated,
    calls_back,
)


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("exported", [False, True])
def test_a_call_that_cleans_up_is_refused(forward: Callable[..., Any], *, exported: bool) -> None:
    with pytest.raises(CaptureError, match="a finally or an __exit__ makes a remote call") as refused:
        fxlib.capture(forward, sample_inputs=[torch.ones(2)] if exported else None)
    assert __file__ in refused.value.where


class Enters:
    """Calls a server before its block, on the very line of the block."""

    def __init__(self, x: Tensor) -> None:
        self.x = ask(x)

    def __enter__(self) -> Any:
        return ask(self.x)

    def __exit__(self, *_: object) -> None:
        self.x = None


def reads_in_the_end(x: Tensor) -> Any:
    try:
        y = x * 2
    finally:
        rows = rpc_sync("ps0", servers.lookup, ("table", x))
    return y + rows


def enters_by_calls(x: Tensor) -> Any:
    with Enters(x) as y:
        x = ask(y)
    return ask(x)


def enters_two(x: Tensor) -> Any:
    with Enters(x) as y, Enters(y) as z:
        return z


def calls_within_blocks_and_behind_them(x: Tensor) -> Any:
    try:
        x = ask(x)
    finally:
        x = x * 2
    with torch.no_grad(): x = ask(x)  # fmt: skip # noqa: E701
    return ask(x)


CALLS = {reads_in_the_end: 1, enters_by_calls: 4, enters_two: 4, calls_within_blocks_and_behind_them: 3}


@pytest.mark.parametrize("forward", CALLS, ids=lambda forward: forward.__name__)
def test_other_calls_in_such_code_are_captured(forward: Callable[..., Any]) -> None:
    found = [node for node in fxlib.capture(forward).graph.nodes if "call" in node.meta]
    assert len(found) == CALLS[forward]
