"""The trainers of a trial as the process group of the job: what the collectives of its graph run over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import torch
from torch import distributed

from fxlib.reasons import Reason
from workers.trial.failures import TrialError

ALL_RANKS: Final = "0"
"""The name that torch gives the group of all ranks. Who is in another group, a graph does not say."""


def check_groups(groups: Mapping[str, tuple[int, ...]], trainers: int) -> None:
    """See that so many trainers can stand in for the process groups of a graph.

    Args:
        groups: names of process groups, and the sizes that collectives over them state.
        trainers: how many there are.

    Raises:
        TrialError: COLLECTIVES.
    """
    for name, sizes in groups.items():
        if name != ALL_RANKS:
            problem = f"who is in process group {name!r}, the graph does not say: only all ranks together can be tried"
        elif trainers < 2:
            problem = "there is one trainer, and it has no peers (say Workload.trainers: as many as the job has ranks)"
        elif others := [size for size in sizes if size != trainers]:
            problem = f"the graph is that of {others[0]} ranks, and Workload.trainers is {trainers}"
        else:
            continue
        raise TrialError(Reason.COLLECTIVES, problem, survived=True)


def gather(store: distributed.Store, rank: int, size: int, interface: str) -> None:
    """Join the group of all ranks, over TCP on one interface; returns when all are there."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    distributed.init_process_group("gloo", store=distributed.PrefixStore("trainers", store), rank=rank, world_size=size)


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
