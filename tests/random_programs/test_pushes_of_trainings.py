"""A training whose gradients travel together is the training: on random ones, step by step, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from fxlib.errors import FxlibWarning
from fxlib.recipes import recipes
from fxlib.runtime.gradients import pushes
from fxlib.runtime.tracking import autograd_node
from tests.random_programs.simulation import simulated
from tests.random_programs.trainings import Training, World, random_training, run
from tests.shared.many import many

pytestmark = pytest.mark.slow

FAILED_PUSH = "refused at"

RARE = {"what a backward that raised has brought": 29}
"""Seeds of trainings that notice what few do, by what they notice: there they come first."""

SEEDS = range(many(30))


def differences(training: Training, worlds: Callable[[int], AbstractContextManager[World]]) -> list[str]:
    """Name what differs between a training and its rewrite."""
    rewritten = recipes.apply(training.module).module
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)  # of steps that are pushed with the one before
        expected = run(training, training.module, worlds(7))
        for adversary in range(2):
            outcome = run(training, rewritten, worlds(adversary))
            found += [name for name in {**expected, **outcome} if expected.get(name) != outcome.get(name)]
    return found


def check(seed: int) -> None:
    training = random_training(seed)
    found = differences(training, simulated)
    assert not found, f"seed {seed}: {found}\n{training.deviations}\n{training.module.code}"


def test_trainings_that_are_rewritten_do_what_the_trainings_do() -> None:
    for seed in SEEDS:
        check(seed)


def test_random_trainings_send_messages_fail_and_deviate() -> None:
    """Else their sameness would say nothing."""
    failed, deviated = 0, set()
    with (
        mock.patch.object(pushes.PushMessage, "_send", autospec=True, side_effect=pushes.PushMessage._send) as sent,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FxlibWarning)
        for seed in range(30):
            training = random_training(seed)
            error = str(run(training, recipes.apply(training.module).module, simulated(0))["error"])
            failed += FAILED_PUSH in error
            deviated |= set(training.deviations.values())
    assert sent.call_count > 200
    assert failed > 0
    assert len(deviated) > 5


def _in_order_of_arrival() -> AbstractContextManager[object]:
    together = pushes._push_side_by_side
    return mock.patch.object(pushes, "_push_side_by_side", lambda found, *rest: together(found[::-1], *rest))


def _unchained() -> AbstractContextManager[object]:
    def all_at_once(self: pushes._Round) -> Any:
        sent = [
            pushes.PushMessage([push], None)
            for messages in self._to_come.values()
            for each in messages
            for push in each
        ]
        return {push: outcome for message in sent for push, outcome in message.outcomes().items()}

    return mock.patch.object(pushes._Round, "outcomes", all_at_once)


def _not_waited_for() -> AbstractContextManager[object]:
    return mock.patch.object(pushes.PushMessage, "outcomes", lambda self: dict.fromkeys(self.pushes))


def _each_server_by_itself() -> AbstractContextManager[object]:
    return mock.patch.object(pushes, "contract_of", return_value=mock.Mock(batchable=False, part=None))


def _parts_mistaken() -> AbstractContextManager[object]:
    return mock.patch.object(pushes, "_chains", lambda found: [[push] for push in reversed(found)])


def _half_a_backward() -> AbstractContextManager[object]:
    def at_once(self: autograd_node.Backward, came: list[tuple[autograd_node.Slot, Any]]) -> None:
        for slot, gradient in came:
            slot.gradient = gradient if slot.gradient is None else slot.gradient + gradient

    return mock.patch.object(autograd_node.Backward, "bring", at_once)


PLANTED: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "sent in another order": _in_order_of_arrival,
    "no waiting for the one before": _unchained,
    "no waiting for the last": _not_waited_for,
    "everything is a part by itself": _parts_mistaken,
    "unknown functions write on their server alone": _each_server_by_itself,
    "what a backward that raised has brought": _half_a_backward,
}


def _seeds_that_notice(bug: str) -> Iterator[int]:
    for seed in (RARE.get(bug, 0), *SEEDS):
        try:
            check(seed)
        except (AssertionError, RuntimeError):
            yield seed


@pytest.mark.parametrize("bug", PLANTED)
def test_a_push_without_one_of_its_rules_is_caught(bug: str) -> None:
    with PLANTED[bug]():
        assert next(_seeds_that_notice(bug), None) is not None
