"""Images per second of convolutional networks that nobody here wrote, and how far results are from the exact ones.

Arms, each in a process of its own, their short blocks in random order, round by round: `eager`; `stock_fuse`, which is
torch's own torch.fx.experimental.optimization.fuse; `inference`: the recipe, or the variant of it that a short choice
before the run finds faster, as a worker does; `int8`: the same of that recipe, calibrated on the very images;
`compile`: torch.compile with its defaults, left out with `--quick`, and where it takes too long to compile, which
`left_out` says, in seconds (Inductor keeps what an earlier run has compiled).
Metrics: `qps`, images per second (batches times their size); `max_relative_error` of the output (see `utils.compare`)
beside the model in float64, so that `eager` has one, too; and `ratio` of the medians of qps, with the interval of a
bootstrap over rounds. Models are pytorchcv's, with random weights and statistics of norms, at 224 by 224 pixels. On a
machine with a GPU the same rows are there for `device` cuda; `gpus` tells how many there are.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch
from pytorchcv.model_provider import get_model
from torch import nn
from torch.fx.experimental.optimization import fuse

import fxlib
from benchmarks.report import RESAMPLES, Case, Row, main, row
from fxlib.recipes import recipes
from fxlib.recipes.alternatives import candidates
from fxlib.utils.compare import relative_error
from tests.models.zoo import randomize

Forward = Callable[[torch.Tensor], torch.Tensor]

_SIDE: Final = 224
_CHOICE_ROUNDS: Final = 9
_CHOICE_S: Final = 3.0
"""A choice has so many rounds, and further ones for so long."""


def model_of(name: str, device: str) -> nn.Module:
    """Return an architecture of pytorchcv in eval mode, with weights and statistics of norms drawn from one seed."""
    torch.manual_seed(0)
    model: nn.Module = get_model(name, pretrained=False)
    randomize(model)
    return model.eval().to(device)


def images(batch: int, device: str) -> torch.Tensor:
    """Return the same images in every process."""
    return torch.randn(batch, 3, _SIDE, _SIDE, generator=torch.Generator().manual_seed(1)).to(device)


def ours(recipe: str, model: nn.Module, x: torch.Tensor) -> Forward:
    """Return the fastest of what a worker tries for a recipe, by a choice of its own before the run."""
    captured = fxlib.capture(model)
    request = recipes.PlanningRequest(workload=fxlib.Workload(batches=[x], mode="forward", optimizer="none"))
    tried = candidates(recipes.get(recipe), has_calls=False)
    made = [each.run(captured, request).module for each in tried]
    for module in made:
        module(x)
    taken_s: list[list[float]] = [[] for _ in made]
    end = time.perf_counter() + _CHOICE_S
    while len(taken_s[0]) < _CHOICE_ROUNDS or time.perf_counter() < end:
        for module, samples in zip(made, taken_s, strict=True):
            samples.append(seconds(module, x, 1))
    return made[min(range(len(made)), key=lambda index: median(taken_s[index]))]


ARMS: Mapping[str, Callable[[nn.Module, torch.Tensor], Forward]] = {
    "eager": lambda model, _: model,
    "stock_fuse": lambda model, _: fuse(model),
    "inference": partial(ours, "inference"),
    "int8": partial(ours, "int8"),
    "compile": lambda model, _: torch.compile(model, dynamic=False),
}
"""Makes of a model what each arm runs."""


def seconds(forward: Forward, x: torch.Tensor, runs: int) -> float:
    """Time so many forwards, until their results are there."""
    start = time.perf_counter()
    for _ in range(runs):
        forward(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


class OverCapError(Exception):
    """An arm was not ready when its time was over. It has ended."""


class Process:
    """One arm in a process of its own, which does nothing while others are timed.

    Args:
        arm: of `ARMS`; or "reference", the model itself in float64.
        name: the architecture.
        threads: of one forward.
        device: "cpu" or "cuda".
    """

    def __init__(self, arm: str, name: str, threads: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, arm, name, threads, device), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()
        self._process.join()

    def output(self, batch: int, *, cap_s: float | None = None) -> torch.Tensor:
        """Get ready for batches of a size, and return the output for one, in float64.

        Args:
            batch: images in one.
            cap_s: how long it may take; None for as long as it takes.

        Raises:
            OverCapError: it takes longer.
        """
        self._connection.send(("output", batch))
        if not self._connection.poll(cap_s):
            self._process.kill()
            raise OverCapError
        found: torch.Tensor = self._connection.recv()
        return found

    def seconds(self, runs: int) -> float:
        """Time so many forwards of the last size, after one that is not counted: others have used the caches."""
        self._connection.send(("seconds", runs))
        taken_s: float = self._connection.recv()
        return taken_s


def _serve(connection: Connection, arm: str, name: str, threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    model = model_of(name, device)
    forward: Forward = model
    x = torch.empty(0)
    with torch.no_grad():
        while True:
            try:
                asked, number = connection.recv()
            except EOFError:
                return
            if asked == "seconds":
                seconds(forward, x, 1)
                connection.send(seconds(forward, x, number))
            elif arm == "reference":
                connection.send(model.double()(images(number, device).double()).cpu())
            else:
                x = images(number, device)
                forward = ARMS[arm](model, x)
                connection.send(forward(x).double().cpu())


MODELS: Final = ("resnet50", "mobilenetv2_w1", "densenet121", "efficientnet_b0", "resnext50_32x4d")
BATCHES: Final = (1, 8)
THREADS: Final = (2, 1)
ROUNDS: Final = 30
QUICK_ROUNDS: Final = 9
BLOCK_S: Final = 0.3
BUDGET_S: Final = 60.0
"""No further round of a case begins after so long, but for the least number."""
LEAST_ROUNDS: Final = 9
COMPILATION_S: Final = 150.0
"""Seconds that `compile` may take for one size of batches."""
BASELINES: Final = ("eager", "stock_fuse")


def measure(quick: bool) -> Sequence[Row]:
    """Measure every model; with `quick`, the first one, with two threads."""
    models, threads, rounds = (MODELS[:1], THREADS[:1], QUICK_ROUNDS) if quick else (MODELS, THREADS, ROUNDS)
    arms = [arm for arm in ARMS if not (quick and arm == "compile")]
    gpus = torch.cuda.device_count()
    everywhere: Case = {"model": "any", "batch": 0, "threads": 0, "device": "cuda"}
    found = [row(benchmark="inference", case=everywhere, arm="machine", metric="gpus", unit="", samples=[gpus])]
    for device in ("cpu", "cuda") if gpus else ("cpu",):
        for name in models:
            for count in threads if device == "cpu" else threads[:1]:
                found += compare(name, count, device, arms, rounds)
    return found


def compare(name: str, threads: int, device: str, arms: Sequence[str], rounds: int) -> Iterator[Row]:
    """Measure all arms of one model at all sizes of batches."""
    with ExitStack() as running:
        exact = running.enter_context(Process("reference", name, threads, device))
        processes = {arm: running.enter_context(Process(arm, name, threads, device)) for arm in arms}
        for batch in BATCHES:
            case: Case = {"model": name, "batch": batch, "threads": threads, "device": device}
            reference, errors = exact.output(batch), dict[str, float]()
            for arm in list(processes):
                try:
                    output = processes[arm].output(batch, cap_s=COMPILATION_S if arm == "compile" else None)
                except OverCapError:
                    del processes[arm]
                else:
                    errors[arm] = relative_error(output, reference)
            yield from figures(case, errors, blocks(processes, batch, rounds))
            for arm in set(arms) - set(processes):
                left_out = [COMPILATION_S]
                yield row(benchmark="inference", case=case, arm=arm, metric="left_out", unit="s", samples=left_out)


def blocks(processes: dict[str, Process], batch: int, rounds: int) -> dict[str, list[float]]:
    """Return images per second of each arm, round by round."""
    runs = {arm: max(1, round(BLOCK_S / each.seconds(1))) for arm, each in processes.items()}
    found: dict[str, list[float]] = {arm: [] for arm in processes}
    order, chance, end = list(processes), random.Random(0), time.monotonic() + BUDGET_S
    for done in range(rounds):
        if done >= LEAST_ROUNDS and time.monotonic() > end:
            break
        chance.shuffle(order)
        for arm in order:
            found[arm].append(runs[arm] * batch / processes[arm].seconds(runs[arm]))
    return found


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two arms' medians, and its 95% interval over resampled rounds, which keep their pairs."""
    values = np.asarray([above, below])
    picks = np.random.default_rng(0).integers(0, len(above), size=(RESAMPLES, len(above)))
    medians = np.median(values[:, picks], axis=2)
    low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
    return float(np.median(above) / np.median(below)), float(low), float(high)


def figures(case: Case, errors: dict[str, float], qps: dict[str, list[float]]) -> Iterator[Row]:
    """Return what was measured, and `inference` beside the baselines."""
    for arm, samples in qps.items():
        yield row(benchmark="inference", case=case, arm=arm, metric="qps", unit="1/s", samples=samples)
        error = [errors[arm]]
        yield row(benchmark="inference", case=case, arm=arm, metric="max_relative_error", unit="", samples=error)
    for baseline in BASELINES:
        value, low, high = ratio_of_medians(qps["inference"], qps[baseline])
        fields = {"arm": f"inference/{baseline}", "metric": "ratio", "unit": ""}
        yield Row(
            benchmark="inference", case=case, value=value, low=low, high=high, runs=len(qps[baseline]), **fields
        )  # fmt: skip


if __name__ == "__main__":
    main("inference", measure, about="Images per second of convolutional networks, rewritten for inference.")
