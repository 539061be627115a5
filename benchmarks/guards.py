"""What a captured module's checks cost beside what its graph saves of eager's own Python.

Models of tiny modules on tensors of one element, so that Python is all there is. Of `mixed` ones, half of the modules
are the user's, each with a number that its forward reads, and half are torch's; in `torchs`, all are. Arms, all in one
process, their short blocks in random order, round by round: `eager`; `captured`, the model as `fxlib.capture` returns
it; `training`, that after the recipe; `unguarded`, the same graph without an original, which checks nothing, and so
calls each module as a module, whose hooks may have changed; `compile`, torch.compile with the backend "eager", which
runs the same operators behind TorchDynamo's guards (left out with 10,000 modules, for which it takes minutes to
compile). Metrics: `us` a forward, and of arms like `captured/eager` the `ratio` of paired blocks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

import fxlib
from benchmarks.report import Case, Row, main, ratio_interval, row
from fxlib.runtime import CapturedModule

KINDS: Final = ("mixed", "torchs")
MODULES: Final = (10, 100, 1_000, 10_000)
ROUNDS: Final = 60
QUICK_ROUNDS: Final = 15
BLOCK_S: Final = 0.02
"""Seconds of forwards of one arm in a block; at least one is run."""
MOST_COMPILED: Final = 1_000
RATIOS: Final = (("captured", "eager"), ("training", "eager"), ("unguarded", "eager"), ("compile", "eager"))

Forward = Callable[[torch.Tensor], Any]


class Scaled(nn.Module):
    """A module of the user's: an operator, a module of torch's, and a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale what the activation leaves."""
        return self.activation(x) * self.scale


class Chain(nn.Module):
    """As many modules as asked for, itself and its list not counted."""

    def __init__(self, kind: str, modules: int) -> None:
        super().__init__()
        mixed = (Scaled(1.0 + 1e-6 * each) for each in range(modules // 2))
        self.layers = nn.ModuleList(mixed if kind == "mixed" else (nn.ReLU() for _ in range(modules)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run one after the other."""
        for each in self.layers:
            x = each(x)
        return x


def measure(quick: bool) -> Sequence[Row]:
    """Measure each size of model; with `quick`, up to 1,000 modules."""
    torch.set_num_threads(1)
    sizes = MODULES[:-1] if quick else MODULES
    rounds = QUICK_ROUNDS if quick else ROUNDS
    return [each for kind in KINDS for modules in sizes for each in compare(kind, modules, rounds)]


def arms_of(kind: str, modules: int) -> dict[str, Forward]:
    """Return the arms for a model of this size, each of which has run."""
    model = Chain(kind, modules)
    captured = fxlib.capture(model)
    arms: dict[str, Forward] = {
        "eager": model,
        "captured": captured,
        "training": fxlib.optimize(captured),
        "unguarded": CapturedModule(model, fxlib.capture(model).graph),
    }
    if modules <= MOST_COMPILED:
        arms["compile"] = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(1)
    for forward in arms.values():
        if not torch.equal(forward(x), model(x)):
            raise AssertionError("an arm computes something else")
    return arms


def compare(kind: str, modules: int, rounds: int) -> Iterator[Row]:
    """Measure all arms of one model."""
    arms, x = arms_of(kind, modules), torch.ones(1)
    # As many for all: on a shared machine, shorter blocks would be interrupted less.
    runs = max(1, round(BLOCK_S / min(seconds(arms["eager"], x, 1) for _ in range(9))))
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    order, chance = list(arms), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for arm in order:
            found[arm].append(seconds(arms[arm], x, runs) * 1e6)
    case: Case = {"kind": kind, "modules": modules}
    for arm, samples in found.items():
        yield row(benchmark="guards", case=case, arm=arm, metric="us", unit="us", samples=samples)
    for above, below in RATIOS:
        if above in found:
            value, low, high = ratio_interval(found[above], found[below])
            yield Row(
                benchmark="guards", case=case, arm=f"{above}/{below}", metric="ratio", value=value, unit="", low=low,
                high=high, runs=rounds,
            )  # fmt: skip


def seconds(forward: Forward, x: torch.Tensor, runs: int) -> float:
    """Return what one of so many forwards takes."""
    start = time.perf_counter()
    for _ in range(runs):
        forward(x)
    return (time.perf_counter() - start) / runs


if __name__ == "__main__":
    main("guards", measure, about="What the checks of captured modules cost beside what their graphs save.")
