"""What a program may do that sending early is not made for: it is noticed, in time or with an error."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

from fxlib.errors import FxlibError, FxlibWarning
from fxlib.gradients import push_gradients
from fxlib.runtime import CapturedModule, track_gradient
from tests.runtime.early import ROWS, TWO, backward, log, messages, model, step, trained

pytestmark = pytest.mark.usefixtures("servers", "nothing_under_way")


def two_backwards(module: CapturedModule) -> None:
    loss = module(ROWS).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(module: CapturedModule) -> None:
    (module(ROWS) + module(ROWS)).sum().backward()


def forward_before_the_push(module: CapturedModule) -> None:
    backward(module)
    with torch.no_grad():
        module(ROWS)


def gradients_with_a_graph(module: CapturedModule) -> None:
    module(ROWS).square().sum().backward(create_graph=True)


def backward_by_halves(module: CapturedModule) -> None:
    kept = module(ROWS)
    kept[:1].sum().backward(retain_graph=True)
    kept[1:].sum().backward()


HARMLESS = (two_backwards, two_forwards, forward_before_the_push, gradients_with_a_graph, backward_by_halves)


@pytest.mark.parametrize("other", HARMLESS)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_program_that_trains_otherwise_is_warned_once_and_pushed_as_written(other: Callable[..., None]) -> None:
    blocking, module = model(*TWO, operator=track_gradient), model(*TWO)
    with warnings.catch_warnings(record=True) as caught, messages() as sent:
        warnings.simplefilter("always")
        for each in (module, blocking):
            for _ in range(3):
                other(each)
                push_gradients(each)
    assert sent == []
    assert [warning.category for warning in caught if "pushed by fxlib" in str(warning.message)] == [FxlibWarning]
    entries = log()
    assert entries[: len(entries) // 2] == entries[len(entries) // 2 :]


@pytest.mark.parametrize("late", [two_backwards, forward_before_the_push, backward_by_halves])
def test_what_shows_too_late_is_an_error_with_a_way_out(late: Callable[..., None]) -> None:
    module = trained(*TWO)
    with pytest.raises(FxlibError, match=r"left from inside backward.*accumulation="):
        late(module)


def test_a_step_that_is_never_pushed_is_an_error_at_the_next_forward() -> None:
    module = trained(*TWO)
    backward(module)
    with pytest.raises(FxlibError, match="push_gradients"):
        module(ROWS)


def test_what_shows_in_time_is_a_warning_though_earlier_steps_sent_early() -> None:
    module = trained(*TWO)
    with pytest.warns(FxlibWarning, match="several forwards"):
        two_forwards(module)
    push_gradients(module)
    assert [entry[0] for entry in log()] == ["a", "b", "a", "b"]


def test_a_kept_forward_without_backward_makes_its_step_wait_for_the_push() -> None:
    module = trained(*TWO)
    kept = module(ROWS)
    with messages() as sent:
        backward(module)
    push_gradients(module)
    del kept
    with messages() as sent_again:
        step(module)
    assert sent == []
    assert len(sent_again) == 1


def test_threads_that_share_a_module_push_as_written() -> None:
    module = model(*TWO)
    module(ROWS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=module, args=(ROWS,))
        thread.start()
        thread.join()
    assert "several threads" in str(caught[0].message)


def test_a_copy_of_a_module_watches_for_itself() -> None:
    twin = copy.deepcopy(trained(*TWO))
    with messages() as sent:
        step(twin)
    assert sent == []
