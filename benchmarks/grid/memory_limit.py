"""How much memory a schedule takes, predicted and observed, where a limit is asked for.

A program reduces each large result as soon as it has it: as written it holds one at a time, and overlapped as many as
it may; `limit` is what a schedule may hold above the program as written. Observed is the rise of the process's resident
memory to its highest (`VmHWM`) over a forward, with every large block taken from the system and given back at once
(`MALLOC_MMAP_THRESHOLD_`).
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.rpc import rpc_sync
from torch.fx import GraphModule

import fxlib
from benchmarks.grid.cells import BLOCKING, FXLIB
from benchmarks.report import Case, Row, row
from fxlib import ps
from fxlib.analysis.cost.simulate import predict
from fxlib.ps.local import local
from fxlib.recipes.recipes import Recipe, from_passes
from fxlib.spec.workload import Server, Table, Workload

LOOKUPS, ROWS, DIM, BATCH, SERVERS = 16, 4096, 128, 4096, 2
ROUNDS = 7
SERVICE_S = 0.01
"""Long enough for all calls in flight to be answered at about the same time."""
MIB = 2**20
RESULT_BYTES: Final = 4 * BATCH * DIM
LIMIT_BYTES: Final = 4 * RESULT_BYTES
AS_WRITTEN, UNLIMITED, LIMITED = "as written", "none", f"{LIMIT_BYTES / MIB:g} MiB"
ENVIRONMENT: Final = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment of the process that observes."""
_PROC = Path("/proc/self")


def served(servers: int) -> tuple[Server, ...]:
    """One table for each lookup, dealt to the servers in turn."""
    tables = [Table(name=f"large{i}", rows=ROWS, dim=DIM) for i in range(LOOKUPS)]
    return tuple(
        Server(name=f"ps{rank}", tables=tables[rank::servers], service_time_s=SERVICE_S) for rank in range(servers)
    )


class Reducing(nn.Module):
    """Look up and reduce, one table after another."""

    def __init__(self, servers: int) -> None:
        super().__init__()
        self.servers = servers

    def forward(self, indices: Tensor) -> Tensor:
        sums = []
        for i in range(LOOKUPS):
            rows = rpc_sync(f"ps{i % self.servers}", ps.lookup, args=(f"large{i}", indices))
            sums.append(rows.sum(0))
        return torch.stack(sums)


def recipe(limit_bytes: int | None) -> Recipe:
    """Return the schedule of single calls, within a limit on what it holds above the program as written."""
    options = {} if limit_bytes is None else {"memory_bytes": limit_bytes}
    return from_passes([("split_calls", {}), ("overlap_calls", options), ("fold_pairs", {})])


def measured() -> list[Row]:
    """Start servers, and run the program as written, overlapped, and overlapped within the limit."""
    torch.set_num_threads(1)
    with local(served(SERVERS)):
        indices = torch.randint(0, ROWS, (BATCH,))
        with torch.no_grad():
            graph = fxlib.capture(Reducing(SERVERS))
        profile = fxlib.profile(graph, Workload(batches=[indices], mode="forward"))
        programs: dict[str, GraphModule] = {AS_WRITTEN: graph}
        for name, limit in ((UNLIMITED, None), (LIMITED, LIMIT_BYTES)):
            programs[name] = fxlib.optimize(graph, recipe=recipe(limit), profile=profile)
        found = [
            each
            for name, module in programs.items()
            for each in rows(name, module, indices, predict(module, profile).peak_bytes)
        ]
    return [*found, of_allowed(found)]


def rows(limit: str, module: nn.Module, indices: Tensor, predicted_bytes: int) -> Iterator[Row]:
    """Yield what one program holds at most, observed and predicted."""
    case: Case = {"lookups": LOOKUPS, "result_mib": RESULT_BYTES / MIB, "limit": limit}
    observed = [observed_bytes(module, indices) / MIB for _ in range(ROUNDS)]
    arm = BLOCKING if limit == AS_WRITTEN else FXLIB
    yield row(benchmark="overlap", case=case, arm=arm, metric="peak_memory", unit="MiB", samples=observed)
    said = [predicted_bytes / MIB]
    yield row(benchmark="overlap", case=case, arm=arm, metric="predicted_peak_memory", unit="MiB", samples=said)


def of_allowed(found: Sequence[Row]) -> Row:
    """Return what the limited schedule holds, as a share of what it may: the limit, above the program as written."""
    peaks = {each.case["limit"]: each for each in found if each.metric == "peak_memory"}
    allowed, held = peaks[AS_WRITTEN].value + LIMIT_BYTES / MIB, peaks[LIMITED]
    shares = {end: getattr(held, end) / allowed for end in ("value", "low", "high")}
    return replace(held, metric="peak_memory_of_allowed", unit="share", **shares)


def observed_bytes(module: nn.Module, indices: Tensor) -> int:
    """Return by how much memory rises over one forward that keeps nothing for backward."""
    with torch.no_grad():
        module(indices)
        gc.collect()
        (_PROC / "clear_refs").write_text("5")  # from here on, VmHWM is the highest again
        before = _status("VmRSS")
        module(indices)
        return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (_PROC / "status").read_text(), re.MULTILINE)
    assert found is not None, name
    return 1024 * int(found[1])


def main() -> None:
    """Write the rows, as JSON, to the file that the command line names."""
    Path(sys.argv[1]).write_text(json.dumps([asdict(each) for each in measured()]))


if __name__ == "__main__":
    main()
