"""What a forward leaves behind for its next step is refused with its line, and undone."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import torch

import fxlib
from fxlib.errors import CaptureError
from tests.capture.recording.stateful_model import HOW, Model, Plain, Run, Sized, X

STEPS = 0
SEEN: list[Any] = []
MASKS: dict[int, torch.Tensor] = {}


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    steps, seen, shared = STEPS, list(SEEN), Plain.shared
    yield
    globals()["STEPS"], Plain.shared = steps, shared
    SEEN[:] = seen
    MASKS.clear()


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread of pytest's be what may have changed something."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def count_globally(_: Any, x: torch.Tensor) -> Any:
    global STEPS  # noqa: PLW0603 - as a program may
    STEPS += 1
    return x * STEPS


def remember(_: Any, x: torch.Tensor) -> Any:
    SEEN.append(x)
    return x


def mask(_: Any, x: torch.Tensor) -> Any:
    if 4 not in MASKS:
        MASKS[4] = torch.ones(4).cumsum(0)
    return x * MASKS[4]


def mask_by_setdefault(_: Any, x: torch.Tensor) -> Any:
    return x * MASKS.setdefault(4, torch.ones(4))


def count_in_an_object(m: Any, x: torch.Tensor) -> Any:
    m.plain.value += 1
    return x * m.plain.value


def count_by_name(m: Any, x: torch.Tensor) -> Any:
    setattr(m.slots, "value", m.slots.value + 1)  # noqa: B010
    return x * m.slots.value


def count_in_a_class(_: Any, x: torch.Tensor) -> Any:
    Plain.shared += 1
    return x * Plain.shared


def count_in_a_function(_: Any, x: torch.Tensor) -> Any:
    helper.calls = getattr(helper, "calls", 0) + 1  # type: ignore[attr-defined]
    return x


def count_in_a_closure(m: Any, x: torch.Tensor) -> Any:
    m.closed.change(3.0)
    return m.closed(x)


def keep_in_a_default(_: Any, x: torch.Tensor, kept: list[Any] = []) -> Any:  # noqa: B006
    kept.append(x)
    return x


def write_to_an_array(m: Any, x: torch.Tensor) -> Any:
    m.array[0] += 1
    return x * float(m.array[0])


def sort_in_place(m: Any, x: torch.Tensor) -> Any:
    m.sizes.sort(reverse=True)
    return x * m.sizes[0]


NUMBERS = iter(range(100))


def take_the_next(_: Any, x: torch.Tensor) -> Any:
    return x * next(NUMBERS)


def ask_the_clock(_: Any, x: torch.Tensor) -> Any:
    return x * time.perf_counter()


def make_a_generator(_: Any, x: torch.Tensor) -> Any:
    return x * torch.rand(4, generator=torch.Generator().manual_seed(0))


def compare_results(_: Any, x: torch.Tensor) -> Any:
    return x if x.view(3, 4) is x else -x


def change_what_was_sent(_: Any, x: torch.Tensor) -> Any:
    MASKS["plain"] = x  # type: ignore[index]
    return x


REFUSED = [
    count_globally, remember, mask, mask_by_setdefault, count_in_an_object, count_by_name, count_in_a_class,
    count_in_a_function, count_in_a_closure, keep_in_a_default, write_to_an_array, sort_in_place, take_the_next,
    ask_the_clock, make_a_generator, compare_results, change_what_was_sent,
]  # fmt: skip


@HOW
@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
def test_what_outlives_the_forward_is_refused_with_its_line_and_undone(run: Run, how: Any) -> None:
    torch.manual_seed(0)
    model, fresh = (Model if how == "trace" else Sized)(run), Model(run)
    fresh.load_state_dict(model.state_dict())
    state = (STEPS, list(SEEN), dict(MASKS), Plain.shared, model.plain.value, model.array.tolist(), model.sizes[:])
    written_in = "stateful_model" if run is count_in_a_closure else "test_refused_effects"
    with pytest.raises(CaptureError, match=rf"{written_in}.py:\d+"):
        fxlib.capture(model, sample_inputs=[X], how=how)
    assert state == (
        STEPS, list(SEEN), dict(MASKS), Plain.shared, model.plain.value, model.array.tolist(), model.sizes,
    )  # fmt: skip
    assert isinstance(model(X), torch.Tensor)
    assert count_in_a_function is not run or helper.__dict__.pop("calls") == 1


def replace_a_partial(m: Any, x: torch.Tensor) -> Any:
    m.plain.value += 1
    y = m.partial(x)
    m.partial.__setstate__((torch.add, (2.0,), {}, {}))
    m.sizes[0] += 1
    return y


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("how", ["trace", "export", "auto"])
def test_a_change_that_cannot_be_put_back_is_named_and_keeps_no_other(how: Any) -> None:
    model = (Model if how == "trace" else Sized)(replace_a_partial)
    with pytest.raises(CaptureError, match=r"changes partial\.func, and a capture cannot put it back"):
        fxlib.capture(model, sample_inputs=[X], how=how)
    assert (model.plain.value, model.sizes) == (Plain().value, [1.0, 2.0])


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


def call_partials_for_the_first_time(m: Any, x: torch.Tensor) -> Any:
    for each in sorted(m.partials, key=lambda each: each.keywords["by"]):
        x = each(x)
    return x


@HOW
@pytest.mark.usefixtures("_alone")
def test_what_python_notes_in_a_partial_at_its_first_call_is_no_change(how: Any) -> None:
    model = (Model if how == "trace" else Sized)(call_partials_for_the_first_time)
    model.partials = [functools.partial(scaled, by=3.0), functools.partial(scaled, by=2.0)]  # type: ignore[assignment]
    captured = fxlib.capture(model, sample_inputs=[X], how=how)
    for _ in range(2):
        assert torch.equal(captured(X), model(X))
    assert fxlib.usage(captured).original == {}
