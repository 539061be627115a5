"""A gloo process group that tests may leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch import distributed

_SETTLED_S = 0.2


@contextmanager
def process_group(folder: str | Path, *, rank: int = 0, size: int = 1) -> Iterator[None]:
    """Be one rank of a group that meets in the folder."""
    meeting, limit = f"file://{Path(folder, 'meeting')}", timedelta(seconds=120)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=limit)
    try:
        yield
    finally:
        # Who destroys a group while gloo's thread lets go of its last work waits for that thread for ever: it needs the
        # interpreter's lock, which the one that waits holds (pytorch/pytorch#56297).
        time.sleep(_SETTLED_S)
        distributed.destroy_process_group()
