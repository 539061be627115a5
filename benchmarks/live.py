"""What it costs to watch the steps of a training, and how soon a gain that is gone ends with the original.

`step_overhead`: the processor time of a step that does nothing but run a tiny module, so that Python is all there is:
`bare`; in the block of `Result.watch()`, `watched`; and with a canary of 5%, `canary`. All in one process, short blocks
in random order, round by round; `watched-bare` and `canary-bare` are the differences of paired blocks. Nobody is
reported to.

`way_back`: steps from the moment at which a gain of +50% becomes `gain`, somewhere in a window of decisions, until the
original runs for good, by drawn step times: each is its module's own time, times e**x, x normal with standard deviation
`noise`. Multiply by the time of a step. `taken_back` is the share of trainings of 100,000 steps that were taken back
although their gain stayed at `gain`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import nn

import fxlib
from benchmarks.report import Case, Row, main, median_interval, row
from fxlib.client.live_watch import BLOCK_STEPS, WINDOW, Comparison, StepWatch, Turns
from fxlib.runtime import CapturedModule

CANARIES: Final = (0.01, 0.05, 0.2)
GONE: Final = (0.0, -0.1, -0.3)
STAYS: Final = (0.03, 0.1)
NOISE: Final = 0.1
LEAST_GAIN: Final = 0.02
BLOCK: Final = 300
"""Steps of one arm in a block."""
MOST_ROUNDS: Final = 5_000


def measure(quick: bool) -> Sequence[Row]:
    """Measure both; with `quick`, with fewer rounds and trainings."""
    torch.set_num_threads(1)
    return [*overhead(20 if quick else 100), *ways_back(50 if quick else 300)]


def overhead(rounds: int) -> Iterator[Row]:
    """Measure what the block around a step costs."""
    module, x = fxlib.capture(nn.Linear(1, 1)), torch.ones(1, 1)
    arms: dict[str, StepWatch | None] = {"bare": None, "watched": watch(0.0), "canary": watch(0.05)}
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    order, chance = list(arms), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for arm in order:
            found[arm].append(seconds(module, x, arms[arm]) * 1e6)
    case: Case = {"figure": "step_overhead"}
    for arm, samples in found.items():
        yield row(benchmark="live", case=case, arm=arm, metric="us", unit="us", samples=samples)
    for arm in ("watched", "canary"):
        added = [with_it - bare for with_it, bare in zip(found[arm], found["bare"], strict=True)]
        yield row(benchmark="live", case=case, arm=f"{arm}-bare", metric="us", unit="us", samples=added)


def watch(canary: float) -> StepWatch:
    """Return a watch over a module of its own, which reports to nobody."""
    module = fxlib.capture(nn.Linear(1, 1))
    assert isinstance(module, CapturedModule)
    return StepWatch(
        module,
        original=module.__copy__(),
        job_id="benchmark",
        samples=1.0,
        least_gain=-0.99,
        report=None,
        options={"canary": canary},
    )


def seconds(module: nn.Module, x: torch.Tensor, live: StepWatch | None) -> float:
    """Return the processor time that one of a block's steps takes."""
    start = time.thread_time()
    for _ in range(BLOCK):
        block: AbstractContextManager[None] = nullcontext() if live is None else live.step()
        with block:
            module(x)
    return (time.thread_time() - start) / BLOCK


def ways_back(trainings: int) -> Iterator[Row]:
    """Draw trainings whose gain goes, and such whose gain stays."""
    for canary in CANARIES:
        length = Turns(canary, "").round_steps
        for gain in GONE:
            case: Case = {"figure": "way_back", "canary": canary, "gain": gain, "noise": NOISE}
            steps = [float(length * rounds_to_go_back(gain, random.Random(seed))) for seed in range(trainings)]
            yield row(benchmark="live", case=case, arm="fxlib", metric="steps", unit="steps", samples=steps)
    for gain in STAYS:
        rounds = 100_000 // Turns(CANARIES[1], "").round_steps
        taken = [float(is_taken_back(gain, rounds, random.Random(seed))) for seed in range(trainings)]
        case = {"figure": "taken_back", "canary": CANARIES[1], "gain": gain, "noise": NOISE}
        _, low, high = median_interval(taken)
        yield Row(
            benchmark="live", case=case, arm="fxlib", metric="share", value=sum(taken) / len(taken), unit="", low=low,
            high=high, runs=trainings,
        )  # fmt: skip


def rounds_to_go_back(gain: float, chance: random.Random) -> int:
    """Return the rounds from the fall of a gain, somewhere in a window, to the decision; at most MOST_ROUNDS."""
    comparison = Comparison(LEAST_GAIN)
    for _ in range(chance.randrange(WINDOW)):
        comparison.add(pair(0.5, chance))
    for rounds in range(1, MOST_ROUNDS):
        comparison.add(pair(gain, chance))
        if comparison.has_fallen:
            return rounds
    return MOST_ROUNDS


def is_taken_back(gain: float, rounds: int, chance: random.Random) -> bool:
    """Whether a training whose gain stays goes back within so many rounds."""
    comparison = Comparison(LEAST_GAIN)
    for _ in range(rounds):
        comparison.add(pair(gain, chance))
    return comparison.has_fallen


def pair(gain: float, chance: random.Random) -> float:
    """Draw the log-ratio of one pair of blocks."""
    original, rewritten = (
        sum(math.exp(chance.gauss(0.0, NOISE)) for _ in range(BLOCK_STEPS)) / speed for speed in (1.0, 1.0 + gain)
    )
    return math.log(original / rewritten)


if __name__ == "__main__":
    main("live", measure, about="What watching a training costs, and how soon a gain that is gone is noticed.")
