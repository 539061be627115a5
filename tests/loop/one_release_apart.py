"""A launcher of one release or another: `python one_release_apart.py ADDRESS NAME` prints what it was told, as JSON."""

import json
import sys

import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import ps
from fxlib.spec.job import Event
from fxlib.spec.workload import Server, Table, Workload

TABLES, ROWS, DIM = 4, 50, 8


class Lookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.top = nn.Linear(13, 32), nn.Linear(32 + TABLES * DIM, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        rows = [rpc.rpc_sync(f"ps{i % 2}", ps.lookup, args=(f"t{i}", sparse[:, i])) for i in range(TABLES)]
        return self.top(torch.cat([torch.relu(self.bottom(dense)), *rows], 1))


def main(address: str, name: str) -> None:
    held = [Table(name=f"t{i}", rows=ROWS, dim=DIM) for i in range(TABLES)]
    servers = [Server(name=f"ps{rank}", tables=tuple(held[rank::2]), service_time_s=0.005) for rank in range(2)]
    torch.manual_seed(0)
    batch = (torch.randn(16, 13), torch.randint(0, ROWS, (16, TABLES)))
    workload = Workload.describe([batch], servers=servers, seed=3)
    with fxlib.connect(address) as client:
        result = client.optimize(Lookups(), workload, name=name, budget_s=20, progress=False)
        again = client.optimize(Lookups(), workload, name=name, budget_s=20, progress=False)
        job = client.job(result.job_id)
        events: list[Event] = []
        client.watch(result.job_id, events.append)
    told = {
        "from": fxlib.__file__,
        "decision": result.decision,
        "explanation": result.explanation,
        "gain": None if result.gain is None else result.gain.low,
        "calls": [call.action for call in result.calls],
        "again": [again.cached, again.decision, None if again.gain is None else again.gain.low],
        "job": [job.state, job.name],
        "phases": [event.phase for event in events],
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
