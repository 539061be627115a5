"""The module that the tests of a loop train, and the world in which it makes its calls."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from torch.distributed import rpc

import fxlib
from fxlib.pipeline import watch
from fxlib.runtime import CapturedModule
from tests.pipeline.clicks import Clicks, Sent
from tests.random_programs.simulation import simulated


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt: in the background of a shell, a process ignores it from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def sent(module: CapturedModule) -> Iterator[Sent]:
    """The world, entered when the module has been captured."""
    sends = rpc.api._invoke_rpc
    with simulated(5) as world:
        yield Sent(world)
        if watch.WATCH.is_watching:
            gc.collect()  # a test that has caught an error is a frame that still holds its loop
        assert not watch.WATCH.is_watching  # whose end would put back how this world sends, when that is gone
    assert rpc.api._invoke_rpc is sends


@pytest.fixture
def module() -> CapturedModule:
    found = fxlib.capture(Clicks())
    assert isinstance(found, CapturedModule)
    return found
