"""Images per second of convolutional networks that nobody here wrote, and how far results are from the exact ones.

Arms, each in a process of its own, their short blocks in random order, round by round: `eager`; `stock_fuse`, which is
torch's own torch.fx.experimental.optimization.fuse; `inference`: the recipe, or the variant of it that a short choice
before the run finds faster, as a worker does; `compile`: torch.compile with its defaults, left out with `--quick`, and
where it takes too long to compile, which `left_out` says, in seconds (Inductor keeps what an earlier run has compiled).
Metrics: `qps`, images per second (batches times their size); `max_relative_error` of the output (see `utils.compare`)
beside the model in float64, so that `eager` has one, too; and `ratio` of the medians of qps, with the interval of a
bootstrap over rounds. Models are pytorchcv's, with random weights and statistics of norms, at 224 by 224 pixels. On a
machine with a GPU the same rows are there for `device` cuda; `gpus` tells how many there are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np
import torch

from benchmarks.convolutional.arms import ARMS, OverCapError, Process
from benchmarks.report import RESAMPLES, Case, Row, main, row
from fxlib.utils.compare import relative_error

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
"""That `compile` may take for one size of batches."""
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
