"""A training under `fxlib.pipeline` is the training: on random ones, over several steps, bit for bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed import rpc
from torch.fx import GraphModule

import fxlib
from fxlib import batch
from fxlib.errors import FxlibWarning
from fxlib.pipeline import by_keys, request, unchanged, updates, watch
from fxlib.pipeline.by_keys import Rows
from fxlib.pipeline.module_ahead import ModuleAhead, ahead_of, captured_in
from fxlib.recipes import recipes
from fxlib.runtime.ahead import Rider
from tests.random_programs.simulation import simulated
from tests.random_programs.trainings import IN_THE_LOOP, Given, Loop, Training, World, random_training, run
from tests.shared.many import many

pytestmark = pytest.mark.slow

RARE = {
    "a changed tensor": 16,
    "updates of another push are missed": 49,
    "pushes without an update change nothing": 15,
}
"""Seeds of trainings that notice what few do, by what they notice: there they come first."""

SEEDS = range(many(30))
SEEDS_BY_KEYS = range(many(15))


def pipelined(seed: int, counted: list[int] | None = None, *, defer_pushes: bool = False) -> Loop:
    """Have the batches come through a pipeline of a depth that the seed decides, which may change from step to step."""
    dice = random.Random(seed)
    depth = dice.choice((1, 1, 2, 3))
    changes = dice.random() < 0.25

    def loop(batches: list[Given], module: GraphModule) -> Iterable[Given]:
        found = fxlib.pipeline(batches, module, depth=None if changes else depth, defer_pushes=defer_pushes)
        captured = captured_in(module)
        for each in found:
            if changes and captured is not None:
                ahead_of(captured)._choice.depth = dice.randint(1, 4)
            yield each
        if counted is not None:
            counted.append(found.taken)

    return loop


def differences(training: Training, worlds: Callable[[int], AbstractContextManager[World]]) -> list[str]:
    """Name what differs between a training and itself, and its rewrite, under a pipeline."""
    rewritten = recipes.apply(training.module).module
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)  # of batches that are changed, and steps that are skipped
        expected = run(training, training.module, worlds(7))
        for adversary, module in enumerate((training.module, rewritten, rewritten)):
            outcome = run(training, module, worlds(adversary), pipelined(training.seed + adversary))
            found += [name for name in {**expected, **outcome} if expected.get(name) != outcome.get(name)]
    return found


def check(seed: int, *, by_keys: bool = False, updated: bool = False) -> None:
    training = random_training(seed, loop=True, by_keys=by_keys, updated=updated)
    found = differences(training, simulated)
    assert not found, f"seed {seed}: {found}\n{training.deviations} {training.in_the_loop}\n{training.module.code}"


@pytest.mark.parametrize(
    "by_keys, updated, seeds",
    [(False, False, SEEDS), (True, False, SEEDS_BY_KEYS), (True, True, SEEDS_BY_KEYS)],
    ids=["whole", "by keys", "updated"],
)
def test_trainings_under_a_pipeline_do_what_the_trainings_do(
    by_keys: bool, updated: bool, seeds: Sequence[int]
) -> None:
    for seed in seeds:
        check(seed, by_keys=by_keys, updated=updated)


def deferred_differences(training: Training, worlds: Callable[[int], AbstractContextManager[World]]) -> list[str]:
    """Name what differs where pushes are left in flight: what is looked at behind a step is settled, and others not."""
    rewritten, found = recipes.apply(training.module).module, list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)
        expected = run(training, training.module, worlds(7))
        for adversary, module in enumerate((training.module, rewritten, rewritten)):
            dice = random.Random(training.seed + adversary)
            looked = {step: dice.random() < 0.4 for step in range(training.steps)}
            loop = pipelined(training.seed + adversary, defer_pushes=True)
            outcome = run(training, module, worlds(adversary), loop, lambda step, looked=looked: looked[step])  # type: ignore[misc]
            found += [name for name in outcome if name in expected and expected[name] != outcome[name]]
            found += [name for name in expected if name not in outcome and looked.get(int(name.split()[0]), True)]
    return found


@pytest.mark.parametrize(
    "by_keys, updated", [(False, False), (True, False), (True, True)], ids=["whole", "by keys", "updated"]
)
def test_pushes_that_are_left_in_flight_end_where_they_did(by_keys: bool, updated: bool) -> None:
    for seed in range(many(10)):
        training = random_training(seed, loop=True, by_keys=by_keys, updated=updated)
        found = deferred_differences(training, simulated)
        assert not found, f"seed {seed}: {found}\n{training.deviations} {training.in_the_loop}"


def test_random_trainings_run_ahead_both_ways_fail_and_deviate() -> None:
    """Else their sameness would say nothing."""
    taken: list[int] = []
    failed, deviated = 0, set[str]()
    with (
        mock.patch.object(Rider, "__init__", autospec=True, side_effect=Rider.__init__) as rode,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FxlibWarning)
        for seed in range(30):
            training = random_training(seed, loop=True)
            found = run(training, recipes.apply(training.module).module, simulated(0), pipelined(seed, taken))
            failed += "no row at" in str(found["error"])
            deviated |= set(training.in_the_loop.values())
    assert sum(taken) > 100
    assert rode.call_count > 100
    assert failed > 0
    assert deviated == set(IN_THE_LOOP)


def _nothing_is_written() -> AbstractContextManager[object]:
    return mock.patch.object(request, "meet", return_value=False)


def _nobody_watches() -> AbstractContextManager[object]:
    return mock.patch.object(watch.Watch, "_written", return_value=frozenset())


def _reads_before_their_push() -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(ModuleAhead, "_is_free", return_value=True))
    stack.enter_context(mock.patch.object(request.Request, "park", return_value=None))
    stack.enter_context(_nothing_is_written())
    return stack


def _riders_before_the_pushes() -> AbstractContextManager[object]:
    in_order = batch.run_in_order

    def reversed_order(calls: list[batch.Call], limit_s: float = 0.0) -> list[object]:
        if len(calls) == 2 and calls[0][0] in (batch.run, batch.run_in_order):
            return in_order(calls[::-1], limit_s)[::-1]
        return in_order(calls, limit_s)

    return mock.patch.object(batch, "run_in_order", reversed_order)


def _no_key_is_hit() -> AbstractContextManager[object]:
    return mock.patch.object(torch, "isin", lambda keys, _: torch.zeros(len(keys), dtype=torch.bool))


def _conflicts_of_the_last_push_alone() -> AbstractContextManager[object]:
    pushed = Rows.pushed

    def forgetful(rows: Rows, *args: object, sample: int | None) -> None:
        rows.changed = rows.changed[:0]
        pushed(rows, *args, sample=sample)  # type: ignore[arg-type]

    return mock.patch.object(Rows, "pushed", forgetful)


def _changed_rows_are_not_read_again() -> AbstractContextManager[object]:
    def nothing(rows: Rows) -> None:
        rows.changed = rows.changed[:0]

    return mock.patch.object(Rows, "to_read_again", nothing)


def _rows_in_other_places() -> AbstractContextManager[object]:
    merged = Rows.merged

    def turned(rows: Rows, results: list[torch.Tensor]) -> list[torch.Tensor]:
        found = merged(rows, results)
        return [each.flip(0) for each in found]

    return mock.patch.object(Rows, "merged", turned)


def _rows_are_not_updated() -> AbstractContextManager[object]:
    return mock.patch.object(Rows, "updated", return_value=None)


def _updates_of_another_push_are_missed() -> AbstractContextManager[object]:
    return mock.patch.object(updates, "replaced", lambda known, *_: known)


def _pushes_without_an_update_change_nothing() -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(updates.Updates, "_forget_what_others_change"))
    stack.enter_context(mock.patch.object(updates.Updates, "cover", return_value=True))
    return stack


def _the_state_is_not_updated() -> AbstractContextManager[object]:
    merge = updates.replaced
    return mock.patch.object(by_keys, "replaced", lambda known, *rest: replace(merge(known, *rest), state=known.state))


def _any_tensor_will_do() -> AbstractContextManager[object]:
    return mock.patch.object(unchanged.Noted, "is_still", return_value=True)


PLANTED: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a conflict that is missed": _nothing_is_written,
    "nobody watches what the loop writes": _nobody_watches,
    "a read before its push": _reads_before_their_push,
    "a read in front of the push of its message": _riders_before_the_pushes,
    "a changed tensor": lambda: mock.patch.object(
        unchanged.Noted, "is_still", lambda self, value: self._tensor is None or value is self._tensor
    ),
    "another tensor": _any_tensor_will_do,
}
PLANTED_BY_KEYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a conflict of keys that is missed": _no_key_is_hit,
    "conflicts of an earlier step are forgotten": _conflicts_of_the_last_push_alone,
    "changed rows are kept": _changed_rows_are_not_read_again,
    "rows in other places": _rows_in_other_places,
    "rows are read again in front of their push": _riders_before_the_pushes,
}
PLANTED_IN_UPDATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "rows are not updated": _rows_are_not_updated,
    "updates of another push are missed": _updates_of_another_push_are_missed,
    "pushes without an update change nothing": _pushes_without_an_update_change_nothing,
    "the state is not updated": _the_state_is_not_updated,
}


def _seeds_that_notice(bug: str, *, by_keys: bool = False, updated: bool = False) -> Iterator[int]:
    for seed in (RARE.get(bug, 0), *(SEEDS_BY_KEYS if by_keys else SEEDS)):
        try:
            check(seed, by_keys=by_keys, updated=updated)
        except (AssertionError, RuntimeError):
            yield seed


@pytest.mark.parametrize("bug", PLANTED)
def test_a_pipeline_without_one_of_its_rules_is_caught(bug: str) -> None:
    with PLANTED[bug]():
        assert next(_seeds_that_notice(bug), None) is not None


@pytest.mark.parametrize("bug", PLANTED_BY_KEYS)
def test_a_pipeline_by_keys_without_one_of_its_rules_is_caught(bug: str) -> None:
    with PLANTED_BY_KEYS[bug]():
        assert next(_seeds_that_notice(bug, by_keys=True), None) is not None


@pytest.mark.parametrize("bug", PLANTED_IN_UPDATES)
def test_a_pipeline_that_updates_rows_without_one_of_its_rules_is_caught(bug: str) -> None:
    with PLANTED_IN_UPDATES[bug]():
        assert next(_seeds_that_notice(bug, by_keys=True, updated=True), None) is not None


def test_random_trainings_read_by_keys_and_read_changed_rows_again_or_update_them() -> None:
    """Else their sameness would say nothing."""
    with (
        mock.patch.object(Rows, "merged", autospec=True, side_effect=Rows.merged) as merged,
        mock.patch.object(Rows, "updated", autospec=True, side_effect=Rows.updated) as updated,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FxlibWarning)
        taken: list[int] = []
        for seed in range(40):
            training = random_training(seed, loop=True, by_keys=True, updated=seed >= 20)
            run(training, recipes.apply(training.module).module, simulated(0), pipelined(seed, taken))
    assert merged.call_count > 20
    assert updated.call_count > 20
    assert sum(taken) > merged.call_count


def test_a_training_leaves_nobody_watching_and_nothing_patched() -> None:
    training = random_training(3, loop=True)
    sends = rpc.api._invoke_rpc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)
        run(training, training.module, simulated(0), pipelined(3))
    assert rpc.api._invoke_rpc is sends
    assert not watch.WATCH.is_watching
