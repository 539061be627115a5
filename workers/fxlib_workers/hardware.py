"""What this host is, in a line: results measured on one kind of hardware are reused on the same kind only."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

from fxlib.utils.hardware import cores, processor


def fingerprint(ray_address: str = "") -> str:
    """Return architecture, processor, usable cores, memory in GiB, accelerators, and the cluster where there is one.

    >>> fingerprint()
    'x86_64, AMD EPYC 7763 64-Core Processor, 2 cores, 24 GiB'
    """
    parts = [platform.machine(), processor(), f"{cores()} cores", f"{round(_memory_bytes() / (1 << 30))} GiB"]
    parts += _accelerators()
    if ray_address:
        parts.append(f"Ray at {ray_address}")
    return ", ".join(filter(None, parts))


def _memory_bytes() -> int:
    total: int = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def _accelerators() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
