"""How a module is wrapped in `DistributedDataParallel`, into the wire format and back: as data, and no code."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from torch import nn

from fxlib.runtime.data_parallel import HOOKS, DataParallel, DataParallelOptions
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import Fault
from fxlib.wire.limits import Limits
from fxlib.wire.names import check_comment, check_label

_FIELDS = tuple(asdict(DataParallelOptions()))


def write_data_parallel(message: pb.DataParallel, module: DataParallel) -> None:
    """Write all but the module inside."""
    message.group, message.ranks, message.oddity = module.group, module.ranks, module.oddity
    for name, value in asdict(module.options).items():
        if value is not None:
            setattr(message, name, value)


def read_options(message: pb.DataParallel) -> DataParallelOptions:
    """Return how the module is wrapped."""
    unset = {} if message.HasField("bucket_cap_mb") else {"bucket_cap_mb": None}
    values: dict[str, Any] = {name: getattr(message, name) for name in _FIELDS}
    return DataParallelOptions(**{**values, **unset})


def read_data_parallel(message: pb.DataParallel, inside: nn.Module) -> DataParallel:
    """Return what stands for the wrapped module where there is no process group."""
    return DataParallel(inside, read_options(message), group=message.group, ranks=message.ranks, oddity=message.oddity)


def check_data_parallel(module: pb.Module, limits: Limits) -> None:
    """Raise Fault unless a wrapped module holds one module and nothing else, and its options are such as exist."""
    message = module.parallel
    parts = len(module.children) + len(module.parameters) + len(module.buffers) + len(module.attributes)
    if parts != 1 or not module.children or module.children[0].name != "module":
        raise Fault("a DistributedDataParallel holds one child, 'module', and nothing else")
    if not module.children[0].HasField("module"):
        raise Fault("a DistributedDataParallel holds no module")
    check_label(message.group)
    check_comment(message.oddity, limits)
    if not message.ranks:
        raise Fault("a process group has at least one rank")
    if message.hook and message.hook not in HOOKS:
        raise Fault(f"{message.hook[:80]!r} is no communication hook that is known")
    if message.HasField("bucket_cap_mb") and not (math.isfinite(message.bucket_cap_mb) and message.bucket_cap_mb > 0):
        raise Fault("the size of a bucket is positive and finite")
