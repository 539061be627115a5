"""Steps are watched, original and rewritten run in turn, and a gain that is gone ends with the original."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import grpc
import pytest
import torch
from torch import distributed as dist
from torch import nn
from typing_extensions import Unpack

import fxlib
from fxlib import wire
from fxlib.client.live_watch import _LOOK_S, BLOCK_STEPS, COLD_STEPS, WINDOW, Comparison, StepWatch, Turns
from fxlib.client.result import Result, WatchOptions
from fxlib.errors import FxlibError, FxlibWarning, WorkloadError
from fxlib.runtime import CapturedModule
from fxlib.spec.report import LiveFigures
from tests.client.models import Clicks, workload
from tests.client.scripted import Scripted
from tests.collectives.world import on_all_ranks
from tests.pipeline.clicks import Clicks as Trained
from tests.random_programs.simulation import simulated
from tests.shared.undisturbed import until


class Clock:
    """Time that passes as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    found = Clock()
    with mock.patch("fxlib.client.live_watch.time.perf_counter", found):
        yield found


def captured(model: nn.Module | None = None) -> CapturedModule:
    found = fxlib.capture(model or nn.Linear(2, 2))
    assert isinstance(found, CapturedModule)
    return found


def watching(
    module: CapturedModule, report: Callable[[LiveFigures], None] | None = None, **options: Unpack[WatchOptions]
) -> StepWatch:
    return StepWatch(
        module, original=module.__copy__(), job_id="job", samples=10.0, least_gain=0.02, report=report, options=options
    )


def originals(module: CapturedModule) -> int:
    return sum(module._fxlib.graphs.usage().original.values())


def step(live: StepWatch, module: CapturedModule, clock: Clock, *, original_s: float, rewritten_s: float) -> bool:
    """Take one step, and say whether the original ran in it."""
    before = originals(module)
    with live.step():
        module(torch.ones(1, 2))
        ran = originals(module) > before
        clock.now += original_s if ran else rewritten_s
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("canary", [0.5, 0.3, 0.1, 0.01])
def test_the_original_runs_its_share_in_blocks_beside_those_they_are_compared_with(canary: float) -> None:
    turns = Turns(canary, "seed")
    length = turns.round_steps
    places = [turns.at(step) for step in range(200 * length)]
    assert sum(each.original for each in places) <= canary * len(places)
    assert sum(each.original for each in places) >= canary * len(places) - 200
    orders = set()
    for begin in range(0, len(places), length):
        paired = [each.original for each in places[begin : begin + length] if each.paired]
        orders.add(tuple(paired))
        assert sorted(paired) == [False] * BLOCK_STEPS + [True] * BLOCK_STEPS
    assert len(orders) == 2  # either comes first


@pytest.mark.parametrize("canary", [0.5, 0.07, 0.0])
def test_the_first_steps_after_a_switch_do_not_count(canary: float) -> None:
    turns, before, since = Turns(canary, "seed"), None, 0
    for place in map(turns.at, range(5000)):
        since = since + 1 if place.original == before else 0
        before = place.original
        assert not (place.counts and since < COLD_STEPS)
        assert not (place.paired and not place.counts)


@pytest.mark.slow
def test_a_gain_that_stays_is_never_taken_for_gone_and_one_that_goes_is_seen() -> None:
    noise = random.Random(0)
    comparison = Comparison(0.02)
    for _ in range(2000):
        comparison.add(math.log(1.1) + noise.gauss(0.0, 0.1))
    assert not comparison.has_fallen
    assert comparison.gain is not None
    assert comparison.gain.low < 0.1 < comparison.gain.high
    pairs = next(count for count in itertools.count(1) if _falls(comparison, math.log(0.8) + noise.gauss(0.0, 0.05)))
    assert pairs < 2 * WINDOW


def _falls(comparison: Comparison, log_ratio: float) -> bool:
    comparison.add(log_ratio)
    return comparison.has_fallen


@pytest.mark.slow
def test_a_job_whose_gain_is_gone_goes_back_and_says_so(clock: Clock) -> None:
    module = captured()
    with watching(module, canary=0.5) as live:
        for _ in range(10 * 12):
            step(live, module, clock, original_s=0.03, rewritten_s=0.02)
        found = live.figures
        assert found.gain is not None
        assert found.gain.value == pytest.approx(0.5)
        assert [found.qps_original, found.qps_optimized] == pytest.approx([10 / 0.03, 10 / 0.02])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2 * WINDOW * 12):
                step(live, module, clock, original_s=0.03, rewritten_s=0.04)
        assert ["fell below what was asked for (" in str(each.message) for each in told] == [True]
        assert told[0].filename == __file__
        assert all(step(live, module, clock, original_s=0.03, rewritten_s=0.04) for _ in range(100))
        assert live.figures.went_back
    assert step(live, module, clock, original_s=0.03, rewritten_s=0.04)  # also when nobody watches any more


def go_back(module: CapturedModule, clock: Clock) -> None:
    with watching(module, canary=0.5) as live:
        for _ in range(2 * WINDOW * 12):
            step(live, module, clock, original_s=0.03, rewritten_s=0.04)


@pytest.mark.parametrize("canary", [0.0, 0.5])
def test_a_later_watch_leaves_the_original_of_a_job_that_went_back(clock: Clock, canary: float) -> None:
    module = captured()
    with pytest.warns(FxlibWarning, match="fell below"):
        go_back(module, clock)
    with watching(module, canary=canary) as live:
        assert all(step(live, module, clock, original_s=0.03, rewritten_s=0.04) for _ in range(48))
        found = live.figures
    assert found == LiveFigures(qps_original=found.qps_original, steps=48, went_back=True)
    assert found.qps_original == pytest.approx(10 / 0.03)
    assert step(live, module, clock, original_s=0.03, rewritten_s=0.04)


def test_a_watch_begins_with_the_rewritten_module_though_one_before_was_not_closed(clock: Clock) -> None:
    module = captured()
    left = watching(module, canary=0.5)
    while not step(left, module, clock, original_s=1.0, rewritten_s=0.5):
        pass
    with watching(module) as live:
        assert not any(step(live, module, clock, original_s=1.0, rewritten_s=0.5) for _ in range(10))
        assert live.figures.qps_optimized == pytest.approx(10 / 0.5)
    left.close()


def test_without_a_canary_the_rewritten_module_alone_runs_and_its_rate_is_known(clock: Clock) -> None:
    module = captured()
    with watching(module) as live:
        assert not any(step(live, module, clock, original_s=9.0, rewritten_s=0.5) for _ in range(250))
        with live.step(samples=1000):
            clock.now += 1.0
        seen = live.figures
        assert seen.qps_optimized == pytest.approx(3480 / 125)
        assert seen == LiveFigures(qps_optimized=seen.qps_optimized, steps=251)


def fail(clock: Clock) -> None:
    clock.now += 100.0
    raise ZeroDivisionError


def test_a_step_that_raises_is_no_figure(clock: Clock) -> None:
    module = captured()
    with watching(module, canary=0.5) as live:
        for _ in range(3 * 12):
            with pytest.raises(ZeroDivisionError), live.step():
                fail(clock)
        assert (live.figures.qps_original, live.figures.qps_optimized, live.figures.gain) == (None, None, None)
        assert live.figures.steps == 36


def test_closing_in_a_turn_of_the_original_leaves_the_rewritten_module(clock: Clock) -> None:
    module = captured()
    live = watching(module, canary=0.5)
    while not step(live, module, clock, original_s=1.0, rewritten_s=1.0):
        pass
    live.close()
    assert not step(live, module, clock, original_s=1.0, rewritten_s=1.0)
    live.close()


NONSENSE: list[WatchOptions] = [
    {"canary": 0.6},
    {"canary": -0.1},
    {"canary": math.nan},
    {"every_s": 0.0},
    {"least_gain": -1.0},
    {"group": "world"},
]


@pytest.mark.parametrize("options", NONSENSE)
def test_options_that_make_no_sense_are_refused(options: WatchOptions) -> None:
    with pytest.raises(WorkloadError):
        watching(captured(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pipelined", [False, True])
def test_switching_changes_no_bit_of_a_training(seed: int, pipelined: bool) -> None:
    expected, _ = trained(seed, canary=0.0, pipelined=False)
    found, used = trained(seed, canary=0.5, pipelined=pipelined)
    assert used.graphs["main"] > 20
    assert sum(used.original.values()) > 20
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def trained(seed: int, *, canary: float, pipelined: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """Train for some rounds on a world of the seed's; return losses, weights and the servers' state, and what ran."""
    torch.manual_seed(seed)
    original = captured(Trained())
    module = fxlib.optimize(original)
    assert isinstance(module, CapturedModule)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    batches = [torch.randn(2, 4) for _ in range(60)]
    losses = []
    with simulated(seed) as world, mock.patch("fxlib.pipeline.module_ahead.SETTLE_S", 0.0):
        watch = StepWatch(
            module,
            original=original.__copy__(),
            job_id=str(seed),
            samples=2.0,
            least_gain=-0.999,
            report=None,
            options={"canary": canary},
        )
        with watch as live:
            for batch in fxlib.pipeline(batches, module) if pipelined else batches:
                with live.step():
                    optimizer.zero_grad()
                    loss = module(batch).square().mean()
                    loss.backward()
                    fxlib.push_gradients(module)
                    optimizer.step()
                losses.append(loss.detach())
        world.drain()
        return {"losses": torch.stack(losses), **module.state_dict(), **world.snapshot()}, module._fxlib.graphs.usage()


def optimized(address: str, **options: Any) -> Result:
    with fxlib.connect(address, patience_s=60) as client:
        return client.optimize(fxlib.capture(Clicks()), workload(), progress=False, **options)


def adopting(service: Scripted) -> None:
    service.adopt(wire.encode(fxlib.optimize(fxlib.capture(Clicks()))).graph.SerializeToString())


def test_the_service_is_told_now_and_then_and_at_the_end(service: Scripted, address: str) -> None:
    adopting(service)
    result = optimized(address)
    with result.watch(every_s=0.05) as live:
        with live.step():
            time.sleep(0.001)
        until(lambda: len(service.live) > 0)
        for _ in range(9):
            with live.step():
                time.sleep(0.001)
    last = service.live[-1]
    assert (last.job_id, last.live.steps) == ("job-1", 10)
    assert 0 < last.live.qps_optimized < 4000  # batches of 4 samples
    assert not last.live.HasField("qps_original")


def test_nothing_is_told_anew_while_no_step_is_made() -> None:
    told, passed = list[LiveFigures](), threading.Event()

    def report(figures: LiveFigures) -> None:
        told.append(figures)
        passed.set()

    with watching(captured(), report, every_s=0.01) as live:
        with live.step():
            pass
        assert passed.wait(60)
        time.sleep(0.1)
        assert [each.steps for each in told] == [1]
        with live.step():
            pass
    assert [each.steps for each in told] == [1, 2]


@pytest.mark.parametrize("every_s", [1e12, math.inf])
def test_a_watch_may_report_at_its_end_alone(every_s: float) -> None:
    told = list[LiveFigures]()
    with watching(captured(), told.append, every_s=every_s) as live, live.step():
        pass
    assert [each.steps for each in told] == [1]


def test_a_kept_original_reports_its_own_rate(service: Scripted, address: str) -> None:
    with optimized(address).watch(canary=0.5) as live:
        for _ in range(10):
            with live.step():
                time.sleep(0.001)
    last = service.live[-1].live
    assert last.HasField("qps_original")
    assert not last.HasField("qps_optimized")


def test_a_service_that_is_away_or_refuses_is_nothing_to_the_loop(service: Scripted, address: str) -> None:
    adopting(service)
    service.fail("ReportLive", *[grpc.StatusCode.INVALID_ARGUMENT] * 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimized(address).watch(every_s=0.01) as live:
            for _ in range(20):
                with live.step():
                    time.sleep(0.005)
    assert service.calls["ReportLive"] > 1


def test_a_launcher_without_a_service_watches_all_the_same() -> None:
    with pytest.warns(FxlibWarning), fxlib.connect("localhost:1", patience_s=0.1) as client:
        result = client.optimize(fxlib.capture(Clicks()), workload(), progress=False)
    with result.watch(canary=0.1) as live, live.step():
        pass
    assert live.figures.steps == 1


def test_a_result_is_data_without_what_watches_it(service: Scripted, address: str) -> None:
    result = optimized(address)
    assert not {"watcher", "module"} & result.to_dict().keys()
    with pytest.raises(FxlibError, match="knows no service"):
        Result.original(nn.Linear(1, 1), "no service").watch()


@contextmanager
def timed_by_rank() -> Iterator[Clock]:
    found = Clock()
    with mock.patch("fxlib.client.live_watch.time.perf_counter", found):
        yield found


def go_back_together() -> list[bool]:
    """Train on a rank where the rewritten module is slower; return at which steps the original ran."""
    module, ran = captured(), list[bool]()
    with timed_by_rank() as clock, watching(module, canary=0.2, group="world") as live:
        while len(ran) < 100_000 and not live.figures.went_back:
            ran.append(step(live, module, clock, original_s=0.03, rewritten_s=0.04))
            if len(ran) % 100 == 0:
                time.sleep(0.01)
            dist.barrier()
        ran += [step(live, module, clock, original_s=0.03, rewritten_s=0.04) for _ in range(100)]
    return ran


@pytest.mark.slow
def test_all_ranks_take_turns_and_go_back_at_the_same_steps() -> None:
    first, second = on_all_ranks(go_back_together)
    assert first == second
    assert all(first[-100:])
    assert 0 < sum(first[:200]) < 100


def end_early() -> bool:
    """Stop watching on a rank whose gain is there, while the other goes on for a moment."""
    module = captured()
    with timed_by_rank() as clock, watching(module, canary=0.2, group="world") as live:
        for _ in range(100 * (1 + dist.get_rank())):
            step(live, module, clock, original_s=0.04, rewritten_s=0.03)
        return live.figures.went_back


@pytest.mark.slow
def test_ranks_that_end_at_different_steps_wait_for_nobody() -> None:
    assert on_all_ranks(end_early) == [False, False]


def outlast_rank_0() -> int:
    """Stop watching on rank 0, while the other goes on for longer than it takes to learn of that."""
    module, taken = captured(), 0
    with watching(module, group="world") as live:
        end = time.monotonic() + 8 * _LOOK_S * dist.get_rank()
        while taken == 0 or time.monotonic() < end:
            with live.step():
                taken += 1
            time.sleep(0.01)
    return taken


@pytest.mark.slow
def test_a_rank_steps_on_after_rank_0_has_ended() -> None:
    first, second = on_all_ranks(outlast_rank_0, timeout_s=30.0)
    assert first == 1 < second
