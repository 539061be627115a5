"""A training whose gradients leave from inside backward is the training: on random ones, step by step, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxlib import recipes
from fxlib.errors import FxlibWarning
from fxlib.runtime import convoy, early, fans, pushes
from tests.random_programs.simulation import simulated
from tests.random_programs.trainings import Training, World, random_training, run

NOTICED = "FxlibError: send_gradients: gradients of remote results left from inside backward, and then"
FAILED_PUSH = "refused at"


def differences(training: Training, worlds: Callable[[int], AbstractContextManager[World]]) -> list[str]:
    """Name what differs between a training and its rewrite; a refusal that says so is no silent difference."""
    rewritten = recipes.apply(training.module).module
    expected = run(training, training.module, worlds(7))
    found: list[str] = []
    for adversary in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FxlibWarning)
            outcome = run(training, rewritten, worlds(adversary))
        error = str(outcome.pop("error"))
        if error.startswith(NOTICED) and training.deviations:  # and was the same until then
            noticed = min(training.deviations)
            found += [
                name for name in outcome if int(name.split()[0]) < noticed and expected.get(name) != outcome[name]
            ]
            continue
        found += [
            name for name in {**expected, **outcome} if expected.get(name) != {**outcome, "error": error}.get(name)
        ]
    return found


def check(seed: int) -> None:
    training = random_training(seed)
    found = differences(training, simulated)
    assert not found, f"seed {seed}: {found}\n{training.deviations}\n{training.module.code}"


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_a_training_that_sends_early_does_what_the_training_does(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", [0, 250])
def test_many_trainings_that_send_early_do_what_the_trainings_do(first: int) -> None:
    for seed in range(first, first + 250):
        check(seed)


def test_random_trainings_send_early_fail_and_deviate() -> None:
    """Else their sameness would say nothing."""
    sent, refused, failed = 0, 0, 0
    with mock.patch.object(convoy.Convoy, "start", autospec=True, side_effect=convoy.Convoy.start) as start:
        for seed in range(60):
            training = random_training(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FxlibWarning)
                error = str(run(training, recipes.apply(training.module).module, simulated(0))["error"])
            refused, failed = refused + error.startswith(NOTICED), failed + (FAILED_PUSH in error)
        sent = start.call_count
    assert sent > 200
    assert refused > 3
    assert failed > 0


def _in_order_of_arrival() -> AbstractContextManager[object]:
    start = early.EarlyPushes._send

    def reversed_(self: early.EarlyPushes, forward: early.Forward, group: early.Group) -> None:
        group.pushes.reverse()
        start(self, forward, group)

    return mock.patch.object(early.EarlyPushes, "_send", reversed_)


def _not_owned() -> AbstractContextManager[object]:
    return mock.patch.object(fans, "owned", lambda gradient, strides: gradient)


def _unchained() -> AbstractContextManager[object]:
    def all_at_once(self: convoy.Convoy) -> None:
        for push in [push for parcel in self._to_come for push in parcel]:
            pushes.Parcel([push])
            self._outcomes[push] = None
        self._to_come.clear()

    return mock.patch.object(convoy.Convoy, "start", all_at_once)


def _each_server_by_itself() -> AbstractContextManager[object]:
    return mock.patch.object(pushes, "contract_of", return_value=mock.Mock(batchable=False, part=None))


def _parts_mistaken() -> AbstractContextManager[object]:
    return mock.patch.object(pushes, "_chains", lambda found: [[push] for push in reversed(found)])


def _never_looking_back() -> AbstractContextManager[object]:
    return mock.patch.object(early.EarlyPushes, "_stray", return_value=None)


PLANTED: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "sent in another order": _in_order_of_arrival,
    "no copies": _not_owned,
    "no waiting for the one before": _unchained,
    "everything is a part by itself": _parts_mistaken,
    "unknown functions write on their server alone": _each_server_by_itself,
    "deviations go unnoticed": _never_looking_back,
}


def _seeds_that_notice() -> Iterator[int]:
    for seed in range(400):
        try:
            check(seed)
        except (AssertionError, RuntimeError):
            yield seed


@pytest.mark.parametrize("bug", PLANTED)
def test_a_sender_without_one_of_its_rules_is_caught(bug: str) -> None:
    with PLANTED[bug]():
        assert next(_seeds_that_notice(), None) is not None
