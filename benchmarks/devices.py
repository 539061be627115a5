"""Predicted against measured: a forward of models that nobody here wrote, on this processor as it was just calibrated.

Case `{model, threads}`. Arms: `measured` (the captured module, without gradients, median of its runs) and `predicted`
(the simulator of `fxlib.analyze`, which never ran the model). Metric `seconds` of each, and of arm
`predicted/measured` their `ratio`; case `all` has the median over models of the error, |ratio - 1|, which is `error`.
Metric `peak_bytes`, of the values of a forward above state and inputs: `measured` by torch's profiler, which also sees
what operators need while they run. A processor that others share, too, is measured with their work in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

import fxlib
from benchmarks.report import Case, Row, main, row
from fxlib.inspection import Device, analyze, calibrate
from tests.models import zoo

MODELS = (
    *("resnet50", "densenet121", "mobilenetv2_wd4", "squeezenet_v1_1", "efficientnet_b0", "shufflenetv2_wd2"),
    *("bn_vgg11", "resnet20_cifar10", "bert", "gpt2", "t5", "vit", "convnext"),
)
QUICK_MODELS = ("resnet20_cifar10", "squeezenet_v1_1", "bert")
SECONDS, QUICK_SECONDS = 1.0, 0.5
"""How long each model runs."""
FEWEST_RUNS = 5


def measure(quick: bool) -> Sequence[Row]:
    """Calibrate, then measure every model with as many threads."""
    device = calibrate(seconds=2.0 if quick else 8.0)
    found: list[Row] = []
    for name in QUICK_MODELS if quick else MODELS:
        found += compare(name, device, QUICK_SECONDS if quick else SECONDS)
    ratios = [each.value for each in found if each.metric == "ratio"]
    errors = [abs(ratio - 1) for ratio in ratios]
    case: Case = {"model": "all", "threads": torch.get_num_threads()}
    found.append(row(benchmark="devices", case=case, arm="predicted", metric="error", unit="", samples=errors))
    return found


def compare(name: str, device: Device, seconds: float) -> Iterator[Row]:
    """Measure one model, and predict it."""
    model, inputs = zoo.build(name)
    captured = fxlib.capture(model, sample_inputs=inputs)
    analysis = analyze(captured, inputs, device=device)
    assert analysis.seconds is not None
    case: Case = {"model": name, "threads": torch.get_num_threads()}
    runs_s = list(timed(captured, inputs, seconds))
    yield row(benchmark="devices", case=case, arm="measured", metric="seconds", unit="s", samples=runs_s)
    predicted_s = analysis.seconds
    yield row(benchmark="devices", case=case, arm="predicted", metric="seconds", unit="s", samples=[predicted_s])
    ratio = [predicted_s / median(runs_s)]
    yield row(benchmark="devices", case=case, arm="predicted/measured", metric="ratio", unit="", samples=ratio)
    held = {
        "measured": peak_bytes(captured, inputs),
        "predicted": analysis.peak_bytes - analysis.state_bytes - analysis.input_bytes,
    }
    for arm, held_bytes in held.items():
        yield row(benchmark="devices", case=case, arm=arm, metric="peak_bytes", unit="B", samples=[held_bytes])


@torch.no_grad()
def timed(module: torch.nn.Module, inputs: zoo.Inputs, seconds: float) -> Iterator[float]:
    """Run a module for so long, and yield what each run takes; the first two only warm up."""
    module(*inputs)
    module(*inputs)
    end, runs = time.perf_counter() + seconds, 0
    while runs < FEWEST_RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        module(*inputs)
        yield time.perf_counter() - start
        runs += 1


@torch.no_grad()
def peak_bytes(module: torch.nn.Module, inputs: zoo.Inputs) -> int:
    """Return the most that one run holds at once of what it allocates itself, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        module(*inputs)
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


if __name__ == "__main__":
    main("devices", measure, about="The simulator's forecasts against measurements on this processor.")
