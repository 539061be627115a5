"""A trainer with two servers, of two releases: `python one_release_apart.py RANK FOLDER`. Rank 0 is the trainer."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import batch, ps
from fxlib.spec.workload import Server, Table

ROWS, DIM, TABLES = 40, 4, 6
SERVERS = [
    Server(name=f"ps{rank}", tables=tuple(Table(name=f"t{i}", rows=ROWS, dim=DIM) for i in range(rank, TABLES, 2)))
    for rank in range(2)
]


class Lookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.top = nn.Linear(3, DIM), nn.Linear(DIM * (TABLES + 1), 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        rows = [rpc.rpc_sync(f"ps{i % 2}", ps.lookup, args=(f"t{i}", sparse[:, i])) for i in range(TABLES)]
        return self.top(torch.cat([torch.relu(self.bottom(dense)), *rows], 1))


def state_after(module: nn.Module) -> list[torch.Tensor]:
    """Train for some steps from one state on; return what came out of each, and what the servers hold then."""
    for server in SERVERS:
        rpc.rpc_sync(server.name, ps.setup, args=(server, 0))
    torch.manual_seed(1)
    told = []
    for _ in range(3):
        out = module(torch.randn(8, 3), torch.randint(0, ROWS, (8, TABLES)))
        out.square().mean().backward()
        fxlib.push_gradients(module)
        told.append(out.detach())
    rows = torch.arange(ROWS)
    return told + [rpc.rpc_sync(f"ps{i % 2}", ps.lookup, args=(f"t{i}", rows)).detach() for i in range(TABLES)]


def calls_in_one_message() -> None:
    """Check what comes of calls in one message against what comes of each by itself."""
    rows = torch.arange(5)
    calls: list[batch.Call] = [(ps.lookup, (name, rows), {}) for name in ("t0", "t2", "nothing")]
    single = [rpc.rpc_sync("ps0", ps.lookup, args=("t0", rows)), rpc.rpc_sync("ps0", ps.lookup, args=("t2", rows))]
    ways = [(batch.run, (calls,)), (batch.run_in_order, (calls,)), (batch.run_batched, (ps.lookup_many, calls))]
    for function, args in ways:
        outcomes = rpc.rpc_sync("ps0", function, args=args)
        assert all(map(torch.equal, map(batch.result, outcomes[:2]), single)), function
        assert batch.failed(outcomes[2]), function
        with pytest.raises((RuntimeError, ValueError), match="nothing"):
            batch.result(outcomes[2])
    assert torch.equal(rpc.rpc_sync("ps0", batch.echo, args=(rows,)), rows)


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")  # of torch, about its own use of process groups
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder / 'meeting'}", rpc_timeout=60, _transports=["uv"], _channels=["basic"]
    )
    if rank:
        ps.serve(SERVERS[rank - 1], rank=rank, world_size=3, options=options)
        return
    rpc.init_rpc("trainer", rank=0, world_size=3, rpc_backend_options=options)
    calls_in_one_message()
    model = Lookups()
    original = fxlib.capture(model)
    expected = state_after(original)
    for recipe in ("schedule", "training"):
        found = state_after(fxlib.optimize(original, recipe=recipe))
        assert all(map(torch.equal, found, expected)), recipe
    print(f"same by {fxlib.__file__}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
