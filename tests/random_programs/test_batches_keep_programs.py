"""Random programs whose reads are merged and travel in batches do what they did; and the tests would notice if not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from fxlib import batch
from fxlib.errors import PassError
from fxlib.passes import CoalesceCalls, CoalesceWrites, MergeReads, SplitCalls
from fxlib.passes.remote import coalesce_calls, coalesce_writes, merge_reads
from fxlib.recipes import recipes
from fxlib.recipes.recipes import Recipe
from fxlib.runtime.ops.batches import IN_ORDER, BatchInFlight
from fxlib.runtime.ops.registry import is_batch, items_of
from fxlib.spec.contract import PURE
from tests.random_programs.programs import random_program
from tests.random_programs.running import differences, outcome
from tests.random_programs.simulation import simulated
from tests.shared.many import many

pytestmark = pytest.mark.slow

RARE = {
    "a batch has no effects": 22,
    "reads are merged whatever becomes of the results": 26,
    "reads are merged whatever is written in between": 171,
}
"""Seeds of programs that notice what few do, by what they notice: there they come first; no run is without them."""

SEEDS = (*range(many(30)), *RARE.values())

TOGETHER = Recipe(name="together", passes=(MergeReads(), SplitCalls(), CoalesceCalls(), CoalesceWrites()))


def check(seed: int, recipe: str | Recipe = "schedule") -> Counter[str]:
    """Compare one program with its rewrite under several adversaries; count what became of its calls."""
    program = random_program(seed)
    rewrite = recipes.apply(program.module, recipe)
    expected = outcome(program, program.module, simulated(7))
    for adversary in range(3):
        found = differences(expected, outcome(program, rewrite.module, simulated(adversary)))
        assert not found, f"seed {seed}, adversary {adversary}: {found}\n{program.module.code}\n{rewrite.module.code}"
    batches = [node for node in rewrite.module.graph.nodes if is_batch(node)]
    sizes = [len(items_of(node)) for node in batches]
    in_order = sum(node.args[3] == IN_ORDER for node in batches)
    merged = sum(each.reason.name == "MERGED" for each in rewrite.calls)
    return Counter(
        merged=merged, batches=len(sizes), batched=sum(sizes), in_order=in_order, raised=bool(expected["error"])
    )


@pytest.mark.parametrize("recipe", ["schedule", TOGETHER], ids=["scheduled", "as they stand"])
def test_programs_with_batches_and_merged_reads_do_what_they_did(recipe: str | Recipe) -> None:
    seen = sum((check(seed, recipe) for seed in SEEDS), Counter[str]())
    assert seen["batched"] > seen["batches"] * 2 > 60
    assert seen["merged"] > 3
    assert seen["in_order"] > 10
    assert seen["raised"] > 3


def _first_result(self: BatchInFlight, index: int) -> Any:
    return RESULT(self, 0)


def _no_levels(dependencies: Any, kinds: Any) -> list[int]:
    return [0] * len(dependencies.edges)


RESULT = BatchInFlight.result
PLANTED: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a batch has no effects": lambda: mock.patch.object(coalesce_calls, "union", return_value=PURE),
    "every call of a batch has the first one's result": lambda: mock.patch.object(
        BatchInFlight, "result", _first_result
    ),
    "writes go on after one has failed": lambda: mock.patch.object(batch, "run_in_order", batch.run),
    "writes travel with what needs the first": lambda: mock.patch.object(coalesce_writes._Group, "pass_by"),
    "reads are merged whatever is written in between": lambda: mock.patch.object(merge_reads, "levels", _no_levels),
    "reads are merged whatever becomes of the results": lambda: mock.patch.object(
        merge_reads._Results, "refusal", return_value=None
    ),
}


def _seeds_that_notice(bug: str) -> Iterator[int]:
    for seed in (RARE.get(bug, 0), *SEEDS):
        try:
            check(seed)
        except (AssertionError, PassError, RuntimeError):
            yield seed


@pytest.mark.parametrize("bug", PLANTED)
def test_batches_without_one_of_their_rules_are_caught(bug: str) -> None:
    with PLANTED[bug]():
        assert next(_seeds_that_notice(bug), None) is not None
