"""Seconds from the queue to the answer of a small job, by phase: how long a worker takes beside its measuring.

A case is one job of `fxlib serve` on this machine: `cold` is the first one, submitted as soon as the service listens,
while its worker's Ray is starting; `warm` are those after it. The job is a small DLRM on two parameter servers with a
budget of 8 s and the recipe `schedule`, and is never answered from the cache. Metrics: the job's `phase_seconds`;
`queued`, until a worker claimed it; `other`, what no phase claims (the sandbox's start, the host's lock, messages,
uploads); `answer`, all of it; and `unmeasured`, the answer's seconds without those of the phases that measure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

import fxlib
from benchmarks.report import Row, main, row
from examples.dlrm.model import DENSE_FEATURES, DLRM, SPARSE_FEATURES, tables
from examples.service import service
from fxlib import ps
from fxlib.client import Client
from fxlib.spec.workload import Workload

ROWS, DIM, HIDDEN, BATCH = 100, 8, 32, 16
BUDGET_S: Final = 8.0
MEASURING: Final = ("profile", "choice", "qps", "timeline")
"""The phases in which nothing but the steps of the job runs."""


def job() -> tuple[DLRM, Workload]:
    """Return the model and its step."""
    servers = ps.place(tables(ROWS, DIM), ("ps0", "ps1"), service_time_s=0.0005)
    torch.manual_seed(0)
    batch = fxlib.Batch(
        inputs=(torch.rand(BATCH, DENSE_FEATURES), torch.randint(0, ROWS, (BATCH, SPARSE_FEATURES))),
        target=torch.randint(0, 2, (BATCH,)).float(),
    )
    return DLRM(servers, dim=DIM, hidden=HIDDEN), Workload.describe([batch], loss="bce_with_logits", servers=servers)


def answer(client: Client) -> Mapping[str, float]:
    """Have one job answered, and return its seconds by metric.

    Raises:
        RuntimeError: the job was not measured.
    """
    result = client.optimize(*job(), recipe="schedule", fresh=True, budget_s=BUDGET_S, progress=False)
    done = client.job(result.job_id)
    if "qps" not in result.phase_seconds or not (done.created_at and done.started_at and done.finished_at):
        raise RuntimeError(f"the job was not measured: {result.explanation}")
    seconds = {"queued": (done.started_at - done.created_at).total_seconds(), **result.phase_seconds}
    whole_s = (done.finished_at - done.created_at).total_seconds()
    measured_s = sum(seconds.get(phase, 0.0) for phase in MEASURING)
    other_s = whole_s - sum(seconds.values())
    return {**seconds, "other": other_s, "answer": whole_s, "unmeasured": whole_s - measured_s}


def measure(quick: bool) -> Sequence[Row]:
    """Measure jobs of several services, one after another."""
    samples: dict[str, list[Mapping[str, float]]] = {"cold": [], "warm": []}
    for _ in range(1 if quick else 3):
        with (
            tempfile.TemporaryDirectory() as folder,
            service(Path(folder)) as address,
            fxlib.connect(address) as client,
        ):
            samples["cold"].append(answer(client))
            samples["warm"] += [answer(client) for _ in range(2 if quick else 5)]
    return [
        row(
            benchmark="trial_start",
            case={"model": "dlrm", "start": start},
            arm="worker",
            metric=metric,
            unit="s",
            samples=[each[metric] for each in found],
        )
        for start, found in samples.items()
        for metric in found[0]
    ]


if __name__ == "__main__":
    main("trial_start", measure, about=__doc__)
