"""A server that refuses a message of many calls: what may be made singly is, and nothing is made twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from fxlib import batch
from fxlib.errors import FxlibWarning
from fxlib.runtime.ops import batches, issue_batch, wait_item
from fxlib.runtime.ops.batches import IN_ORDER, NamedCall
from fxlib.runtime.push_gradients import push_gradients
from tests.runtime.gradients.pushing import TWO, backward, log, messages, model, step
from tests.runtime.remote_functions import NAME, Older

pytestmark = pytest.mark.usefixtures("servers", "empty_logs")


def unheard_of(calls: Any, limit_s: float = 0.0) -> None:
    """Have the name of a function that servers do not know."""


@pytest.fixture(params=["of an older version", "without it"])
def refusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that do not have `fxlib.batch.run_in_order` as it is here, and that nobody was warned of."""
    entry: Callable[..., Any] = Older.run_in_order
    if request.param == "without it":
        entry = unheard_of
        monkeypatch.setattr(entry, "__module__", "fxlib.batch")
        monkeypatch.setattr(batch, "unheard_of", entry, raising=False)
    monkeypatch.setattr(batch, "run_in_order", entry)
    monkeypatch.setattr(batches, "_REFUSED_BY", set())


@pytest.mark.usefixtures("refusing")
def test_writes_whose_message_is_refused_are_made_one_by_one_until_one_fails() -> None:
    calls: list[NamedCall] = [(f"{NAME}:write", (entry,), {}) for entry in "ab"]
    calls += [(f"{NAME}:fail", ("no more",), {}), (f"{NAME}:write", ("c",), {})]
    flying = issue_batch("ps0", tuple(calls[:2]), None, IN_ORDER)
    with pytest.warns(FxlibWarning, match="made one by one"):
        wait_item(flying, 1)
    flying = issue_batch("ps0", tuple(calls), None, IN_ORDER)
    wait_item(flying, 1)
    with pytest.raises(ValueError, match="no more"):
        wait_item(flying, 2)
    assert log() == ["a", "b"] * 2


@pytest.mark.usefixtures("refusing")
def test_gradients_whose_message_is_refused_are_pushed_one_by_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)
        with messages() as sent:
            step(model(*TWO))
    assert [getattr(function, "__name__", "") for _, function in sent][1:] == ["take_gradient"] * 2
    assert log() == ["a [1.0, 1.0]", "b [2.0, 2.0]"]


@pytest.mark.usefixtures("refusing")
def test_the_first_push_that_fails_after_a_refusal_ends_the_pushes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)
        module = model(TWO[0], ("ps0", "fail_to_take", "b"), ("ps0", "take_gradient", "c"))
        for _ in range(2):
            backward(module)
            with pytest.raises(ValueError, match="b is refused"):
                push_gradients(module)
    assert log() == ["a [1.0, 1.0]"] * 2


def test_a_write_that_failed_is_no_refusal() -> None:
    calls: tuple[NamedCall, ...] = ((f"{NAME}:write", ("a",), {}), (f"{NAME}:fail", ("run_in_order() takes all",), {}))
    flying = issue_batch("ps0", calls, None, IN_ORDER)
    with pytest.raises(ValueError, match="takes all"):
        wait_item(flying, 1)
    assert log() == ["a"]
