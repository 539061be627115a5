"""The whole loop on one machine: `python -m examples.dlrm.demo` (or `make demo`).

Starts the service with a worker beside it, trains a DLRM against parameter servers as its author wrote it, asks the
service for a faster module, trains the same steps with that, and leaves a report. All processes end with it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import fxlib
from benchmarks.report import median_interval, ratio_interval
from examples.dlrm import data, report
from examples.dlrm.model import DLRM, tables
from examples.dlrm.training import LR, compute_step, race, train, training_step
from fxlib import ps
from fxlib.cli.children import die_with_parent
from fxlib.ps.local import local
from fxlib.spec.report import Result
from fxlib.spec.workload import Optimizer, Server

ROWS, DIM, HIDDEN, BATCH, BATCHES = 1000, 16, 512, 256, 8
READY, END_S = "fxlib: the service is at ", 20.0


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
    model: DLRM, batches: Sequence[fxlib.Batch], servers: Sequence[Server], address: str, *, budget_s: float
) -> tuple[nn.Module, Result]:
    """Ask the service for a faster module: what a launcher adds to its program."""
    graph = fxlib.capture(model)
    workload = fxlib.Workload.describe(
        batches, loss="bce_with_logits", optimizer=Optimizer(name="adam", lr=LR), servers=tuple(servers)
    )
    with fxlib.connect(address) as client:
        return graph, client.optimize(graph, workload, recipe="schedule", name="dlrm-demo", budget_s=budget_s)


def compare(
    options: argparse.Namespace,
    result: Result,
    graph: nn.Module,
    model: DLRM,
    *,
    batches: Sequence[fxlib.Batch],
    servers: Sequence[Server],
) -> int:
    """Train with both modules in this very job, and race them; print and write what came out."""
    arms = {"original": graph, "optimized": result.module}
    start: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
    losses = {
        arm: train(module, batches, steps=options.steps, servers=servers, start=start) for arm, module in arms.items()
    }
    steps = {arm: training_step(module) for arm, module in arms.items()}
    alone = compute_step(model, batches[0])
    seconds = race({**steps, "compute alone": alone}, batches, rounds=options.rounds)
    same = losses["original"] == losses["optimized"]
    figures = _figures(seconds, losses, same=same)
    print("\n" + "\n".join(figures), flush=True)
    report.write(options.out, result=result, figures=figures, losses=losses)
    print(
        f"\nreport: {options.out / 'report.html'}; trace for https://ui.perfetto.dev: {options.out / 'timeline.json'}"
    )
    return 0 if same and result.adopted else 1


def _figures(seconds: dict[str, list[float]], losses: dict[str, list[float]], *, same: bool) -> list[str]:
    lines = ["In this job itself, blocks interleaved:", f"  {'':<14} {'samples/s':>10}   95% interval"]
    for arm, values in seconds.items():
        value, low, high = median_interval([BATCH / each for each in values])
        lines.append(f"  {arm:<14} {value:>10,.0f}   [{low:,.0f}, {high:,.0f}]")
    gain, low, high = ratio_interval(seconds["original"], seconds["optimized"])
    lines.append(f"  gain {gain - 1:+.1%}, 95% interval [{low - 1:+.1%}, {high - 1:+.1%}]")
    bound, _, _ = ratio_interval(seconds["original"], seconds["compute alone"])
    lines.append(
        f"  compute alone would give {bound - 1:+.1%}; of the time that it would save, "
        f"{(1 - 1 / gain) / (1 - 1 / bound):.0%} is saved"
    )
    first, last = losses["original"][0], losses["original"][-1]
    verdict = "identical bit for bit" if same else "NOT IDENTICAL"
    lines.append(
        f"losses of {len(losses['original'])} steps, original and optimized: {verdict} ({first:.4f} to {last:.4f})"
    )
    return lines


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """Run `fxlib serve` on free ports; yield its address, and end it and all that it started."""
    command = [sys.executable, "-m", "fxlib.cli", "serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--data", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread so far
    )
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith(READY)), None)
        if ready is None:
            raise SystemExit("the service did not start: see its messages above")
        print(ready.strip(), flush=True)
        yield ready.removeprefix(READY).split(",")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
