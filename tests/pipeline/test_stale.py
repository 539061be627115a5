"""Reads may miss the pushes of as many steps as the loop allows by `stale=`, never more, and nothing but pushes."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.distributed import rpc

import fxlib
from fxlib import batch
from fxlib.errors import FxlibError, FxlibWarning
from fxlib.pipeline.module_ahead import ahead_of
from fxlib.pipeline.watch import WATCH
from fxlib.runtime import CapturedModule, record
from fxlib.spec.report import WAYS
from tests.random_programs import simulation
from tests.random_programs.simulation import SERVERS, simulated
from tests.shared.many import many

pytestmark = pytest.mark.slow

OWN = 1000.0
"""What a write of the loop adds to a server's count of pushes."""


def _count() -> torch.Tensor:
    return simulation._state().get("pushes", torch.zeros(2, 4))


@fxlib.remote(writes="pushes")
def push(x: torch.Tensor, gradient: torch.Tensor) -> None:
    """Count a push; no read that may not run beside it may be in flight."""
    for world in simulation._WORLD[-1:]:  # none on a real server
        here = (each for each in world._flying if world.states[each.server] is world.serving)
        assert not [each for each in here if not each.landed and _is_awaited(each)]
    simulation._state()["pushes"] = _count() + 1


def _is_awaited(flying: simulation.Flying) -> bool:
    calls = flying.args[0] if flying.function is batch.run else [(flying.function, (), {})]
    return any(function is read for function, *_ in calls)


@fxlib.remote(reads="pushes", gradient=f"{__name__}:push")
def read(x: torch.Tensor) -> torch.Tensor:
    """Return how many pushes this server has had."""
    return _count() + 0 * x


@fxlib.remote(reads="pushes", keys="x", concurrent=True, gradient=f"{__name__}:push")
def read_beside(x: torch.Tensor) -> torch.Tensor:
    """Return the same, perhaps beside a push."""
    return _count() + 0 * x


@fxlib.remote(writes="pushes")
def write() -> None:
    """Write what is no push of a module."""
    simulation._WORLD[-1].serving["pushes"] = _count() + OWN


class Counts(nn.Module):
    """Returns what two servers say of how many pushes they have had."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = [rpc.rpc_sync(server, self._function, args=(x,)) * self.weight for server in SERVERS]
        return torch.stack(counts)


def module_of(*, concurrent: bool = False, rewritten: bool = True) -> CapturedModule:
    module = fxlib.capture(Counts(read_beside if concurrent else read))
    found = fxlib.optimize(module) if rewritten else module
    assert isinstance(found, CapturedModule)
    return found


def batches(count: int) -> list[torch.Tensor]:
    return [torch.full((2, 4), float(index)) for index in range(count)]


def train(module: nn.Module, x: torch.Tensor, *, pushes: bool = True) -> list[float]:
    """Make a step, and return how many pushes each server had had when its read ran."""
    found = module(x)
    if pushes:
        found.sum().backward()
        fxlib.push_gradients(module)
    return [float(each[0, 0]) for each in found.detach()]


DEEDS = ("push", "push", "push", "no push", "dropped", "evaluation", "own write", "other tensors", "state")


def _do(deed: str, module: nn.Module, x: torch.Tensor, loop: Any) -> list[float]:
    if deed == "evaluation":
        with torch.no_grad():
            module(x + 1)
    if deed == "own write":
        rpc.rpc_sync("ps0", write)
    found = train(module, x + 0 if deed == "other tensors" else x, pushes=deed not in ("no push", "dropped"))
    if deed == "dropped":
        fxlib.drop_gradients(module)
    if deed == "state":
        module.state_dict()
    return found


@pytest.mark.parametrize("concurrent", [False, True], ids=["awaited", "concurrent"])
@given(
    deeds=st.lists(st.sampled_from(DEEDS), min_size=1, max_size=12),
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 4),
    stale=st.integers(0, 3),
    rewritten=st.booleans(),
    defer_pushes=st.booleans(),
    trainers=st.integers(1, 2),
)
@settings(max_examples=many(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_read_misses_more_pushes_than_it_may_nor_a_write_of_the_loop(
    *,
    concurrent: bool,
    deeds: Sequence[str],
    seed: int,
    depth: int,
    stale: int,
    rewritten: bool,
    defer_pushes: bool,
    trainers: int,
) -> None:
    module = module_of(concurrent=concurrent, rewritten=rewritten)
    made, missed, written = 0, 0, 0
    with warnings.catch_warnings(), simulated(seed):
        warnings.simplefilter("ignore", FxlibWarning)
        loop = fxlib.pipeline(
            batches(len(deeds)), module, depth=depth, stale=stale, defer_pushes=defer_pushes, trainers=trainers
        )
        for x, deed in zip(loop, deeds, strict=True):
            written += deed == "own write"
            first, second = _do(deed, module, x, loop)
            behind = [made + written * OWN - first, made - second]
            assert all(0 <= each <= stale for each in behind), (deed, behind)
            missed += int(sum(behind))
            made += deed not in ("no push", "dropped")
        fxlib.drop_gradients(module)
    counted = sum(steps * reads for steps, reads in loop.staleness.items())
    assert max(loop.staleness, default=0) <= stale
    assert missed <= counted if concurrent else missed == counted
    assert loop.staleness.total() == loop.taken


def versions(loop: Any, module: nn.Module, deed: Callable[[int], bool] = lambda _: True) -> list[float]:
    """Return for each step of a loop how many pushes its first read missed."""
    missed, made = [], 0
    for index, x in enumerate(loop):
        missed.append(made - train(module, x, pushes=deed(index))[0])
        made += deed(index)
    return missed


@pytest.mark.parametrize(
    "depth, stale, steady",
    [(1, 0, 0), (1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 2, 2), (3, 2, 2), (4, 0, 0)],
)
def test_reads_are_as_stale_as_depth_and_limit_allow_and_counted(depth: int, stale: int, steady: int) -> None:
    module = module_of(rewritten=False)
    with simulated(5):
        loop = fxlib.pipeline(batches(12), module, depth=depth, stale=stale)
        missed = versions(loop, module)
    assert missed[:2] == [0, min(steady, 1)]
    assert set(missed[depth:]) == {steady}
    if stale:  # else some steps are made without a pipeline, to see whether it pays
        assert loop.staleness == Counter(int(each) for each in missed[1:] for _ in SERVERS)
    else:
        assert set(loop.staleness) == {0}


def test_without_a_limit_results_are_those_of_the_plain_loop() -> None:
    for rewritten, seed in itertools.product((False, True), range(5)):
        module = module_of(concurrent=True, rewritten=rewritten)
        with simulated(seed):
            plain = [train(module, x) for x in batches(6)]
        with simulated(seed):
            assert [train(module, x) for x in fxlib.pipeline(batches(6), module, depth=2, stale=0)] == plain


@pytest.mark.parametrize("stale", [0, 1])
def test_a_push_that_comes_unexpected_leaves_after_reads_that_may_not_run_beside_it(stale: int) -> None:
    for seed in range(10):
        module = module_of(rewritten=False)
        with simulated(seed):
            missed = versions(fxlib.pipeline(batches(6), module, stale=stale), module, lambda index: index > 2)
        assert max(missed) == stale  # and `push` has found no read in flight


def test_a_step_is_one_push_however_many_forwards_it_has() -> None:
    module = module_of()
    with simulated(5):
        loop = fxlib.pipeline(batches(15), module, depth=1, stale=1)
        missed = versions(loop, module, lambda index: index % 3 == 2)
    assert [each for index, each in enumerate(missed) if index >= 3] == [1, 0, 0] * 4


def test_what_reads_miss_is_not_read_again_and_what_they_may_not_miss_travels_with_its_push() -> None:
    module = module_of()
    api: Any = rpc.api
    with simulated(5):
        send, names = api._invoke_rpc, []

        def noted(to: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(function.__name__)
            return send(to, function, *args, **kwargs)

        api._invoke_rpc = noted
        for x in fxlib.pipeline(batches(6), module, stale=1):
            train(module, x)
        api._invoke_rpc = send
    assert Counter(names) == {"read": 2 * 6, "push": 2 * 6}  # no message of both


def test_pushes_in_flight_count_as_missed_by_what_is_read_beside_them() -> None:
    module = module_of(concurrent=True)
    with simulated(5):
        loop = fxlib.pipeline(batches(12), module, stale=2, defer_pushes=True)
        versions(loop, module)
    assert loop.staleness[2] == 2 * 10
    with simulated(5):
        loop = fxlib.pipeline(batches(12), module, stale=1, defer_pushes=True)
        versions(loop, module)
    assert max(loop.staleness) == 1


def test_of_several_pipelines_the_smallest_limit_holds() -> None:
    module = module_of(rewritten=False)
    with simulated(5):
        made = 0
        outer = fxlib.pipeline(batches(6), module, depth=2, stale=2)
        for x in outer:
            for other in fxlib.pipeline([x, x + 1], module):  # the first is the outer loop's own
                assert float(module(other).detach()[0, 0, 0]) == made
            train(module, x)
            made += 1
    assert made == 6


def test_several_trainers_read_ahead_without_a_warning_but_not_over_a_synchronization() -> None:
    module = module_of()
    with simulated(5), warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = fxlib.pipeline(batches(6), module, stale=1, trainers=2)
        assert versions(loop, module) == [0, 1, 1, 1, 1, 1]
    store = distributed.HashStore()
    with simulated(5):
        loop = fxlib.pipeline(batches(6), module, stale=1, trainers=2)
        for made, x in enumerate(loop):
            assert train(module, x) == [made, made]
            store.set("step", "1")
    assert loop.taken == 0


def test_an_evaluation_reads_what_is_there_and_the_loop_goes_on() -> None:
    module = module_of()
    with simulated(5):
        loop = fxlib.pipeline(batches(6), module, stale=1)
        for made, x in enumerate(loop):
            with torch.no_grad():
                assert float(module(x + 10)[0, 0, 0]) == made
            train(module, x)
    assert loop.staleness == {1: 2 * 5}


def test_a_loop_that_is_left_leaves_nothing_and_counts_what_it_took() -> None:
    module = module_of(concurrent=True)
    with simulated(5) as world:
        loop = fxlib.pipeline(batches(6), module, depth=3, stale=3)
        for index, x in enumerate(loop):
            train(module, x)
            if index == 2:
                break
        assert all(each.landed for each in world._flying)
        assert not WATCH.is_watching
        assert sum(loop.staleness.values()) == loop.taken == 2 * 2
        assert train(module, batches(1)[0]) == [3, 3]


class Restarted:
    """A loader that can be put back to where it was."""

    def __init__(self) -> None:
        self.index = 0

    def __iter__(self) -> Any:
        while self.index < 6:
            self.index += 1
            yield batches(6)[self.index - 1]

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}


def test_a_checkpoint_is_behind_all_pushes_and_counts_the_batches_that_were_yielded() -> None:
    module = module_of(concurrent=True)
    with simulated(5) as world:
        loop = fxlib.pipeline(Restarted(), module, ahead=True, depth=2, stale=3, defer_pushes=True)
        for made, x in enumerate(loop, start=1):
            train(module, x)
            assert loop.state_dict() == {"index": made}
            assert all(float(state["pushes"][0, 0]) == made for state in world.states.values())


def test_a_timeline_shows_which_reads_were_stale() -> None:
    module = module_of()
    with simulated(5), record() as recording:
        versions(fxlib.pipeline(batches(4), module, stale=1), module)
    assert {each.kind for each in recording.timeline.spans if each.kind in WAYS} == {"stale"}


@pytest.mark.parametrize("stale", [-1, True, 1.0, "1", None])
def test_what_is_no_number_of_steps_is_refused(stale: Any) -> None:
    with pytest.raises(FxlibError, match=f"stale={stale!r}"):
        fxlib.pipeline([], nn.Identity(), stale=stale)


def test_a_loop_with_stale_reads_has_a_depth_of_one_whatever_was_chosen_before() -> None:
    module = module_of()
    with simulated(1):
        _ = [train(module, x) for x in fxlib.pipeline(batches(2), module)]
        ahead_of(module)._choice.depth = 8
        loop = fxlib.pipeline(batches(12), module, stale=4)
        _ = [train(module, x) for x in loop]
    assert max(loop.staleness) == 1
