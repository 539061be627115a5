"""The trainers of a trial as a process group: the ranks over which the job's collectives and gradients run."""

from __future__ import annotations

import os

import torch
from torch import distributed, nn

from fxlib.runtime.data_parallel import DataParallel, parallel_modules


def join(store: distributed.Store, rank: int, size: int, interface: str) -> None:
    """Join the group of all ranks, over TCP on one interface; return when all of them have joined."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    distributed.init_process_group("gloo", store=distributed.PrefixStore("trainers", store), rank=rank, world_size=size)


def wrap_data_parallel(module: nn.Module) -> None:
    """Replace each placeholder in a module by `DistributedDataParallel` over the group of all ranks."""
    for path, parallel in list(parallel_modules(module)):
        if isinstance(parallel, DataParallel):
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent)._modules[name] = parallel.join()


def barrier() -> None:
    """Wait for all ranks; return at once where there is no group."""
    if distributed.is_initialized():
        distributed.barrier()


def all_reduce_min(count: int) -> int:
    """Return the smallest number that a rank gives; where there is no group, this process's own."""
    if not distributed.is_initialized():
        return count
    least = torch.tensor(count)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return int(least)
