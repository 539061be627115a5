"""Models, workloads and job folders for tests of trials."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule

import fxlib
from fxlib import ps, recipes, wire
from fxlib.protocol import blob_ref, recipe_to_proto, trial_to_proto, workload_to_proto
from fxlib.result import Report
from fxlib.v1 import jobs_pb2
from fxlib.workload import Server, Table, Workload
from workers.folder import JobFolder

ROWS, DIM, WIDTH = 50, 8, 32


class Lookups(nn.Module):
    """A recommendation model whose forward makes blocking lookups on two servers."""

    def __init__(self, tables: int = 4) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = nn.Linear(13, WIDTH)
        self.top = nn.Sequential(nn.Linear(WIDTH + tables * DIM, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        rows = [rpc.rpc_sync(f"ps{i % 2}", ps.lookup, args=(f"t{i}", sparse[:, i])) for i in range(self.tables)]
        return self.top(torch.cat([torch.relu(self.bottom(dense)), *rows], 1))


def lookup_workload(tables: int = 4, service_time_s: float = 0.005, **step: object) -> Workload:
    """The step of `Lookups`, described."""
    held = [Table(name=f"t{i}", rows=ROWS, dim=DIM) for i in range(tables)]
    servers = [
        Server(name=f"ps{rank}", tables=tuple(held[rank::2]), service_time_s=service_time_s) for rank in range(2)
    ]
    batch = (torch.randn(16, 13), torch.randint(0, ROWS, (16, tables)))
    fields = {"servers": servers, "seed": 3, **step}
    return Workload.describe([batch], **fields)  # type: ignore[arg-type]


def fill(
    path: Path,
    model: nn.Module,
    workload: Workload,
    options: fxlib.TrialOptions | None = None,
    candidate: GraphModule | None = None,
) -> JobFolder:
    """Write the folder of a job whose graph was rewritten: by the schedule recipe, unless there is a candidate."""
    folder = request(path, model, workload, options)
    captured = wire.decode(wire.parse(folder.original.read_bytes()))
    done = recipes.apply(captured, contracts=workload.contracts, assume=workload.assume)
    folder.rewritten.write_bytes(wire.serialize(wire.encode(candidate or done.module).graph))
    report = Report(decision="keep_original", reason=None, explanation="", calls=done.calls, passes=done.passes)
    folder.write_rewrite(report)
    return folder


def request(
    path: Path,
    model: nn.Module,
    workload: Workload,
    options: fxlib.TrialOptions | None = None,
    recipe: str = "schedule",
) -> JobFolder:
    """Write the folder of a job as it was claimed."""
    path.mkdir()
    encoded = workload_to_proto(workload)
    graph = wire.serialize(wire.encode(fxlib.capture(model)).graph)
    message = jobs_pb2.OptimizeRequest(
        request_id="test",
        graph=blob_ref(graph),
        workload=encoded.message,
        recipe=recipe_to_proto(recipe),
        trial=trial_to_proto(options or fxlib.TrialOptions(budget_s=40)),
    )
    folder = JobFolder(path)
    folder.fill(message, graph, encoded.blobs)
    return folder


def alive(name: str) -> list[int]:
    """Processes, zombies aside, whose command or environment holds `name`."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and any(name in s for s in told):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
