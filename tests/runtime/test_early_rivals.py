"""Several captured modules and one server."""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from fxlib.errors import FxlibError, FxlibWarning
from fxlib.gradients import push_gradients
from fxlib.runtime import CapturedModule
from tests.runtime.early import ROWS, TWO, backward, log, messages, model, step, trained
from tests.runtime.graphs import Program
from tests.runtime.remote_functions import NAME

pytestmark = pytest.mark.usefixtures("servers", "nothing_under_way")


def test_modules_that_share_a_server_push_as_written() -> None:
    one, other = model(*TWO), model(*TWO)
    with warnings.catch_warnings(record=True) as caught, messages() as sent:
        warnings.simplefilter("always")
        for _ in range(3):
            (one(ROWS) + other(ROWS)).sum().backward()
            push_gradients(one)
            push_gradients(other)
    assert sent == []
    assert {str(warning.message).rpartition(": ")[2][:23] for warning in caught} == {"another captured module"}


def test_a_call_of_another_module_between_backward_and_push_is_not_served_in_silence() -> None:
    other, reads = trained(*TWO), Program("rows")
    reader = reads.returns(reads.call("ps0", "read", "a", reads.inputs[0]))
    elsewhere = Program("rows")
    far_reader = elsewhere.returns(elsewhere.call("ps1", "read", "a", elsewhere.inputs[0]))
    backward(other)
    far_reader(ROWS)
    with pytest.raises(FxlibError, match="another captured module called 'ps0'"):
        reader(ROWS)


def test_nor_are_calls_of_another_module_that_travel_together() -> None:
    other, reads = trained(*TWO), Program("rows")
    calls: tuple[Any, ...] = tuple((f"{NAME}:read", (name, reads.inputs[0]), {}) for name in "ab")
    reader = reads.returns(reads.batch("ps0", *calls)[1])
    backward(other)
    with pytest.raises(FxlibError, match="another captured module called 'ps0'"):
        reader(ROWS)


def test_modules_on_servers_of_their_own_both_send_early() -> None:
    one, other = trained(("ps0", "take_gradient", "a")), trained(("ps1", "take_gradient", "b"))
    with messages() as sent:
        (one(ROWS) + other(ROWS)).sum().backward()
    push_gradients(nn.ModuleList([one, other]))
    assert sorted(to for to, _ in sent) == ["ps0", "ps1"]


def test_a_dropped_module_is_nobodys_rival() -> None:
    backward(model(*TWO))
    gc.collect()
    module = trained(*TWO)
    with messages() as sent:
        step(module)
    assert len(sent) == 1


def test_two_threads_with_a_module_each_on_one_server_are_warned_and_push_as_written() -> None:
    one, other = trained(*TWO), model(*TWO)
    backward(one)  # sent, and on its way
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(1) as pool:
            for _ in range(3):
                pool.submit(step, other).result()
        push_gradients(one)
        with messages() as sent:
            step(one)
    assert [str(warning.message).rpartition(": ")[2] for warning in caught] == [
        "another captured module called 'ps0' between backward and fxlib.push_gradients, in another thread",
        "another captured module has gradients for 'ps0', too, in another thread",
    ]
    assert sent == []
    assert len(log()) == 2 * (1 + 3 + 1)


def test_threads_that_train_modules_of_their_own_on_one_server_lose_no_gradient() -> None:
    steps, modules = 20, [model(*TWO) for _ in range(3)]

    def train(module: CapturedModule) -> None:
        for _ in range(steps):
            step(module)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)
        with ThreadPoolExecutor(len(modules)) as pool:
            list(pool.map(train, modules))
    assert len(log()) == 2 * steps * len(modules)
