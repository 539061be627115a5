"""The launcher: `python -m examples.own_servers.train`; `--service HOST:PORT` names a service that runs already."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, multiprocessing, nn
from torch.distributed import rpc

import fxlib
from examples.own_servers import store
from examples.service import service

NAMES = ("trainer", "ps0", "ps1")
SHOPS = 4
"""Item ids in a sample; each is looked up by a call of its own."""


class Clicks(nn.Module):
    """Predicts clicks from a user's features and the embeddings of items, all of which servers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.users = rpc.remote("ps1", store.UserFeatures, args=(store.ROWS,))
        self.hidden = nn.Sequential(nn.Linear(store.DIM, 256), nn.ReLU(), nn.Linear(256, store.DIM))
        self.top = nn.Linear(store.DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a logit [batch] for users [batch] and items [batch, 4]."""
        total = self.hidden(self.users.rpc_sync().of(users))
        for shop in range(SHOPS):
            total = total + rpc.rpc_sync(f"ps{shop % 2}", store.look_up_items, args=(items[:, shop],))
        return self.top(total).squeeze(1)


def train(address: str) -> None:
    """Ask for a faster module, and train with whatever comes back."""
    torch.set_num_threads(1)
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(torch.randint(store.ROWS, (64,)), torch.randint(store.ROWS, (64, SHOPS))) for _ in range(8)]
    workload = fxlib.Workload.describe(batches, loss="mean", optimizer=fxlib.Optimizer(name="sgd", lr=0.01))
    profile = fxlib.profile(model, workload)  # the trial answers calls as the servers do, without having their code
    with fxlib.connect(address) as client:
        result = client.optimize(model, workload, profile=profile, name="own-servers", budget_s=30)
    print(result)
    for users, items in batches:
        optimizer.zero_grad()
        result.module(users, items).mean().backward()
        optimizer.step()
        fxlib.push_gradients(result.module)
    print("trained", len(batches), "steps")


def join(rank: int, meeting: str, address: str) -> None:
    """Be the trainer or one of the servers, until all are done."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)
    if rank == 0:
        train(address)
    rpc.shutdown()


def main() -> None:
    """Start the processes of the job, and a service if none was named."""
    parser = argparse.ArgumentParser(prog="python -m examples.own_servers.train", description=__doc__)
    parser.add_argument("--service", metavar="HOST:PORT", help="a service that runs; without it, one is started")
    named = parser.parse_args().service
    with (
        tempfile.TemporaryDirectory() as folder,
        nullcontext(named) if named else service(Path(folder, "service")) as address,
    ):
        multiprocessing.spawn(join, args=(f"file://{folder}/meeting", address), nprocs=len(NAMES))


if __name__ == "__main__":
    main()
