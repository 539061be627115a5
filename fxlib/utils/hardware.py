"""The hardware of this host."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import torch

_FOR_NUMBERS: Final = ("avx", "fma", "f16c", "amx", "neon", "sve", "sme", "bf16", "i8mm", "dot")
"""Prefixes of torch's names of vector instructions."""


FOR_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The instructions without which bfloat16 is slower than float32; the last one is for ARM."""
FOR_INT8: Final = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "dot"})
"""The instructions that add up products of 8-bit integers in 32 bits; the last two are for ARM."""


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(names, platform.processor())


def cores() -> int:
    """Return how many cores this process may use, respecting a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else min(count, max(1, int(quota) // int(period)))


_USED: Final = (
    (Path("/sys/fs/cgroup/cpu.stat"), 1e-6),
    (Path("/sys/fs/cgroup/cpuacct/cpuacct.usage"), 1e-9),
    (Path("/sys/fs/cgroup/cpuacct.usage"), 1e-9),
)
"""Files in which the kernel counts the processor time of all processes of a host, or of a container, and their unit in
seconds."""


def used_s() -> float | None:
    """Return the seconds of processor time that all processes of this host, or container, took; None if unknown."""
    for path, unit_s in _USED:
        try:
            return int(path.read_text().split("usage_usec", 1)[-1].split()[0]) * unit_s
        except (OSError, ValueError, IndexError):
            continue
    return None


def memory_bytes() -> int:
    """Return how much memory this host has, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def instructions() -> tuple[str, ...]:
    """Return the processor's instruction sets that decide how fast int8, bfloat16 and compiled code are.

    Names are those of `torch.cpu.get_capabilities`, such as avx2, avx512_vnni and amx_bf16.
    """
    found = torch.cpu.get_capabilities()
    return tuple(sorted(name for name, has in found.items() if has is True and name.startswith(_FOR_NUMBERS)))
