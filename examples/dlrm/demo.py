"""The whole loop on one machine: `python -m examples.dlrm.demo` (or `make demo`).

Starts the service with a worker beside it, trains a DLRM against parameter servers as its author wrote it, asks the
service for a faster module, trains the same steps with that, and once more with the next batch's lookups made while
one trains, and leaves a report. All processes end with it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import fxlib
from examples.dlrm import data, report
from examples.dlrm.model import DLRM, tables
from examples.dlrm.training import LR, Loop, ahead, compute_step, one_by_one, race, train, training_step
from examples.service import service
from fxlib import ps
from fxlib.ps.local import local

ROWS, DIM, HIDDEN, BATCH, BATCHES = 1000, 16, 512, 256, 8
RESAMPLES = 2000
ACROSS = "pipelined"
"""The arm that trains with the optimized module under `fxlib.pipeline`."""


def main() -> int:
    """Run the demo; 0 if the optimized module was adopted and trained the very same losses."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    logs = options.out / "clicks.tsv"
    data.generate(logs, samples=BATCH * BATCHES)
    batches = [
        fxlib.Batch(inputs=(dense, sparse), target=labels)
        for dense, sparse, labels in data.read(logs, batch=BATCH, rows=ROWS)
    ]
    servers = ps.place(tables(ROWS, DIM), ("ps0", "ps1"), service_time_s=options.service_ms / 1e3)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DLRM(servers, dim=DIM, hidden=HIDDEN)
    with service(options.out / "service") as address:
        graph, result = optimize(model, batches, servers, address, budget_s=options.budget_s)
    print(result, flush=True)
    with local(servers):
        return compare(options, result, graph, model, batches=batches, servers=servers)


def optimize(
    model: DLRM, batches: Sequence[fxlib.Batch], servers: Sequence[fxlib.Server], address: str, *, budget_s: float
) -> tuple[nn.Module, fxlib.Result]:
    """Ask the service for a faster module: what a launcher adds to its program."""
    graph = fxlib.capture(model)
    workload = fxlib.Workload.describe(
        batches, loss="bce_with_logits", optimizer=fxlib.Optimizer(name="adam", lr=LR), servers=tuple(servers)
    )
    with fxlib.connect(address) as client:
        return graph, client.optimize(graph, workload, recipe="schedule", name="dlrm-demo", budget_s=budget_s)


def compare(
    options: argparse.Namespace,
    result: fxlib.Result,
    graph: nn.Module,
    model: DLRM,
    *,
    batches: Sequence[fxlib.Batch],
    servers: Sequence[fxlib.Server],
) -> int:
    """Train with both modules in this very job, and race them; print and write what came out."""
    arms = {"original": graph, "optimized": result.module, ACROSS: result.module}
    start: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
    losses = {
        arm: train(module, loop_of(arm, module), batches, steps=options.steps, servers=servers, start=start)
        for arm, module in arms.items()
    }
    loops = {arm: loop_of(arm, module) for arm, module in arms.items()}
    alone = one_by_one(compute_step(model, batches[0]))
    seconds = race({**loops, "compute alone": alone}, batches, rounds=options.rounds)
    same = losses["original"] == losses["optimized"] == losses[ACROSS]
    figures = _figures(seconds, losses, same=same)
    print("\n" + "\n".join(figures), flush=True)
    report.write(options.out, result=result, figures=figures, losses=losses)
    print(
        f"\nreport: {options.out / 'report.html'}; trace for https://ui.perfetto.dev: {options.out / 'timeline.json'}"
    )
    return 0 if same and result.adopted else 1


def loop_of(arm: str, module: nn.Module) -> Loop:
    """Return the training loop of an arm."""
    step = training_step(module)
    return ahead(module, step) if arm == ACROSS else one_by_one(step)


def _figures(seconds: dict[str, list[float]], losses: dict[str, list[float]], *, same: bool) -> list[str]:
    lines = ["In this job itself, blocks interleaved:", f"  {'':<14} {'samples/s':>10}   95% interval"]
    for arm, values in seconds.items():
        value, low, high = median([BATCH / each for each in values])
        lines.append(f"  {arm:<14} {value:>10,.0f}   [{low:,.0f}, {high:,.0f}]")
    gain, low, high = ratio(seconds["original"], seconds["optimized"])
    lines.append(f"  gain {gain - 1:+.1%}, 95% interval [{low - 1:+.1%}, {high - 1:+.1%}]")
    bound, _, _ = ratio(seconds["original"], seconds["compute alone"])
    lines.append(
        f"  compute alone would give {bound - 1:+.1%}; of the time that it would save, "
        f"{(1 - 1 / gain) / (1 - 1 / bound):.0%} is saved"
    )
    first, last = losses["original"][0], losses["original"][-1]
    verdict = "identical bit for bit" if same else "NOT IDENTICAL"
    lines.append(
        f"losses of {len(losses['original'])} steps, original, optimized and pipelined: {verdict} "
        f"({first:.4f} to {last:.4f})"
    )
    lines.append(_across(seconds))
    return lines


def _across(seconds: dict[str, list[float]]) -> str:
    """Compare a step as it is written, within the step, and across it."""
    written, within, across = (1e3 * median(seconds[arm])[0] for arm in ("original", "optimized", ACROSS))
    faster, low, high = ratio(seconds["optimized"], seconds[ACROSS])
    return (
        f"a step takes {written:.1f} ms as written, {within:.1f} ms with its calls overlapped, and {across:.1f} ms "
        f"with the next one's made ahead by fxlib.pipeline: {faster:.2f} times as fast as without, "
        f"95% interval [{low:.2f}, {high:.2f}]"
    )


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios of paired blocks, and its interval."""
    return median([a / b for a, b in zip(above, below, strict=True)])


def median(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the samples, and the ends of its 95% bootstrap interval."""
    values = torch.tensor(samples, dtype=torch.float64)
    dice = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=dice)
    medians = values[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(values.quantile(0.5)), low, high


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.dlrm.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-report"), help="folder of the report")
    parser.add_argument("--steps", type=int, default=200, help="training steps of each module")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of the race at the end")
    parser.add_argument("--service-ms", type=float, default=2.0, help="time that a parameter server takes for a call")
    parser.add_argument("--budget-s", type=float, default=60.0, help="budget of the service's measurement")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
