"""The trainers of a trial as the process group of the job: what its collectives and gradients run over."""

from __future__ import annotations

import os

import torch
from torch import distributed, nn

from fxlib.runtime.data_parallel import DataParallel, parallel_modules


def gather(store: distributed.Store, rank: int, size: int, interface: str) -> None:
    """Join the group of all ranks, over TCP on one interface; returns when all are there."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    distributed.init_process_group("gloo", store=distributed.PrefixStore("trainers", store), rank=rank, world_size=size)


def wrap(module: nn.Module) -> None:
    """Put `DistributedDataParallel` over the group of all ranks in the place of what stands for it in a module."""
    for path, parallel in list(parallel_modules(module)):
        if isinstance(parallel, DataParallel):
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent)._modules[name] = parallel.join()


def meet() -> None:
    """Wait until all ranks are here, where they are a group."""
    if distributed.is_initialized():
        distributed.barrier()


def fewest(count: int) -> int:
    """Return the least of what the ranks name; where they are no group, this process's own."""
    if not distributed.is_initialized():
        return count
    least = torch.tensor(count)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return int(least)
