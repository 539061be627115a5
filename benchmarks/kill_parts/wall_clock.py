"""A wall clock that is set while its processes run: what `time.time` adds to the real time stands in a file.

The clock of a machine is one for all that runs on it, so no benchmark may set it. (libfaketime 0.9.10 does not help:
with a clock that is behind, sleeps by the monotonic clock fail under it.) Our code reads the wall clock by `time.time`
alone; it is replaced before anything of fxlib is imported. Steady clocks are the machine's own, as they are when a real
clock is set. gRPC's Python part hands deadlines to its core as wall times, and both keep the machine's clock.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from grpc import _channel, _common, _server
from grpc.aio import _utils

FILE: Final = "FXLIB_KILLS_CLOCK"
"""The environment variable that names the file: eight bytes, the seconds to add."""


def install() -> None:
    """Have this process read the clock that the file sets."""
    path, real = Path(os.environ[FILE]), time.time
    machine_s = SimpleNamespace(**vars(time))
    for module in (vars(_common)["cygrpc"], _common, _channel, _server, _utils):
        vars(module)["time"] = machine_s

    def shifted() -> float:
        return real() + ahead_s(path)

    time.time = shifted


def ahead_s(path: Path) -> float:
    """Return by how many seconds the clock is ahead."""
    try:
        (seconds,) = struct.unpack("d", path.read_bytes())
    except (OSError, struct.error):  # not written yet
        return 0.0
    return float(seconds)


def set_ahead(path: Path, seconds: float) -> None:
    """Set the clock so many seconds ahead of the real one."""
    beside = path.with_suffix(".part")
    beside.write_bytes(struct.pack("d", seconds))
    beside.replace(path)
