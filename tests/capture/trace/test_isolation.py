"""A capture leaves nothing behind, is seen by its own thread alone, and needs no RPC group."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import PyRRef, rpc_async, rpc_sync

import fxlib
from fxlib.capture import intercept
from fxlib.errors import CaptureError
from tests.capture import servers
from tests.capture.servers import double
from tests.shared.forked import printed

FUNCTIONS: list[Any] = [
    *(rpc.rpc_sync, rpc.rpc_async, rpc.remote, rpc.get_worker_info, rpc.rref_proxy._invoke_rpc),
    *(torch.futures.wait_all, torch.futures.collect_all, threading.Thread.start, nn.Module.__setattr__),
    *(nn.Module.__getattr__, nn.Module.__call__, torch.autocast.__enter__, torch.autocast.__exit__, double),
]

ARRAY = np.ones(2, dtype=np.float32)


def state_of_everything() -> list[Any]:
    codes = [(function, function.__code__) for function in FUNCTIONS]
    names = [vars(module).copy() for module in (rpc, rpc.api, torch.futures, servers, sys.modules[__name__])]
    for each in names:
        each.pop("__warningregistry__", None)
    return [codes, dict(PyRRef.__dict__), names, torch.is_grad_enabled(), torch.overrides._len_torch_function_stack()]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    before = state_of_everything()
    yield
    assert state_of_everything() == before
    assert not intercept.is_capturing()


def calls(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", double, (x,)) + rpc_async("ps1", double, (x,)).wait()


def raises(x: torch.Tensor) -> Any:
    rpc_sync("ps0", double, (x,))
    raise KeyError("on purpose")


def is_interrupted(x: torch.Tensor) -> Any:
    raise KeyboardInterrupt


def test_a_capture_leaves_nothing_behind() -> None:
    with nothing_left_behind():
        fxlib.capture(calls, wrap=[double])


def test_a_failed_capture_leaves_nothing_behind() -> None:
    with nothing_left_behind(), pytest.raises(CaptureError, match="on purpose"):
        fxlib.capture(raises)


def test_an_interrupted_capture_leaves_nothing_behind() -> None:
    with nothing_left_behind(), pytest.raises(KeyboardInterrupt):
        fxlib.capture(is_interrupted)


def test_a_model_is_left_as_it_was() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2))
            self.plain = torch.ones(2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x) + self.plain + torch.from_numpy(ARRAY)

    model = Model()
    before = {**model.__dict__}
    fxlib.capture(model)

    assert model.__dict__ == before


@pytest.mark.slow
def test_captures_of_two_threads_do_not_meet() -> None:
    def capture(name: str) -> None:
        for _ in range(5):
            captured = fxlib.capture(calls)
            found.append([str(node) for node in captured.graph.nodes])

    found: list[list[str]] = []
    with nothing_left_behind():
        threads = [threading.Thread(target=capture, args=(str(i),)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(found) == 15
    assert all(each == found[0] for each in found)


def test_another_thread_runs_models_and_calls_while_one_captures() -> None:
    inside, done = threading.Event(), threading.Event()
    model, results = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), []

    def waits(x: torch.Tensor) -> Any:
        inside.set()
        assert done.wait(30)
        return rpc_sync("ps0", double, (x,))

    def other() -> None:
        assert inside.wait(30)
        try:
            results.append(model(torch.ones(3, 2)))
            model.note = 3  # type: ignore[assignment]
            with torch.no_grad(), torch.autocast("cpu"):
                results.append(torch.rand(2) + model[0](torch.ones(2)))
            with pytest.raises((RuntimeError, ValueError)):  # a real call, to a worker that there is not
                rpc_sync("nobody", double, (torch.ones(2),))
        except BaseException as error:  # noqa: BLE001 - asserted below
            results.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    captured = fxlib.capture(waits)
    thread.join()

    assert [type(result) for result in results] == [torch.Tensor, torch.Tensor]
    assert len(captured.graph.nodes) == 3


BEFORE_INIT_RPC = """
import fxlib, torch
from torch.distributed import rpc
from tests.capture import servers

def forward(x):
    rref = rpc.remote("ps0", servers.Table)
    first = rpc.rpc_async(rpc.get_worker_info("ps1"), servers.double, (x,)).wait()
    return first + servers.helped(x) + rref.rpc_sync().rows(x) + rref.to_here()

captured = fxlib.capture(forward)
print([node.args[0] for node in captured.graph.nodes if node.target is fxlib.runtime.ops.start_call])
try:
    captured(torch.ones(2))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_capture_needs_no_rpc_group(tmp_path: Path) -> None:
    lines = printed(BEFORE_INIT_RPC, tmp_path).splitlines()

    assert lines[0] == "['ps1', 'ps0']"
    assert lines[1].startswith("RPC has not been initialized")


def test_stock_tracing_works_after_a_capture() -> None:
    fxlib.capture(calls, wrap=[double])
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert len(traced.graph.nodes) == 4
