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
from fxlib import ps, wire
from fxlib.protocol import blob_ref, recipe_to_proto, trial_to_proto, workload_to_proto
from fxlib.recipes import recipes
from fxlib.spec.report import CandidateReport, Report
from fxlib.spec.workload import Server, Table, Workload
from fxlib.v1 import jobs_pb2
from fxlib_workers.exchange import Candidate, JobFolder

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


def reduced(x: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' values, waited for at once."""
    collectives = torch.ops._c10d_functional
    result: torch.Tensor = collectives.wait_tensor(collectives.all_reduce(x, "sum", "0"))
    return result


class Reducing(nn.Module):
    """Lookups that could overlap, and a sum over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(2 * DIM, 4)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        rows = [rpc.rpc_sync(f"ps{i}", ps.lookup, args=(f"t{i}", sparse[:, i])) for i in range(2)]
        return reduced(self.top(torch.cat(rows, 1))) + dense.sum()


class Wrong(Lookups):
    """What a rewrite must not make of it."""

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        return super().forward(dense, sparse) * 1.0001


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
    made = candidate_of("schedule", candidate or done.module, calls=done.calls, passes=done.passes)
    folder.write_rewrite(made.report, [made])
    return folder


def candidate_of(name: str, module: GraphModule, **report: object) -> Candidate:
    """Make a candidate of a module."""
    graph = wire.serialize(wire.encode(module).graph)
    fields = {"explanation": "", "candidates": (CandidateReport(name=name),), **report}
    return Candidate(graph=graph, report=Report(decision="keep_original", reason=None, **fields))  # type: ignore[arg-type]


def request(
    path: Path,
    model: nn.Module,
    workload: Workload,
    options: fxlib.TrialOptions | None = None,
    recipe: str = "schedule",
    *,
    weights: bool = False,
) -> JobFolder:
    """Write the folder of a job as it was claimed."""
    path.mkdir()
    encoded = workload_to_proto(workload)
    captured = model if isinstance(model, GraphModule) else fxlib.capture(model)
    sent = wire.encode(captured, weights=weights)
    graph = wire.serialize(sent.graph)
    message = jobs_pb2.OptimizeRequest(
        request_id="test",
        graph=blob_ref(graph),
        workload=encoded.message,
        recipe=recipe_to_proto(recipe),
        trial=trial_to_proto(options or fxlib.TrialOptions(budget_s=40)),
    )
    folder = JobFolder(path)
    folder.fill(message, graph, {**sent.blobs, **encoded.blobs})
    return folder


def alive(name: str) -> list[int]:
    """Processes, zombies aside, whose command or environment holds `name`."""
    found = []
    for process in psutil.process_iter():
        try:
            texts = [*process.cmdline(), *process.environ().values()]
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and any(name in s for s in texts)
            ):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def descendants(pid: int) -> list[psutil.Process]:
    """Processes that `pid` started, or whose starters it started."""
    return psutil.Process(pid).children(recursive=True)
