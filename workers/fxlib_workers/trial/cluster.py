"""Ray: one of this process's own on this host, or the operator's cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import ray

from fxlib_workers.config import TrialSettings

_OBJECT_STORE_BYTES: Final = 256 << 20
_MOST_CPUS: Final = 8
"""Ray starts an idle process for each CPU that it is told of; a trial asks for hundredths of one."""


@contextmanager
def connected(settings: TrialSettings, folder: Path) -> Iterator[None]:
    """Be connected to Ray; a Ray of one's own keeps its files in `folder`, and ends with the block.

    Raises:
        ConnectionError, RuntimeError: there is no Ray at the address, or none can be started.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS"] = "0"
    if settings.ray_address:
        ray.init(address=settings.ray_address, log_to_driver=False, logging_level=logging.WARNING)
    else:
        ray.init(
            address="local",
            num_cpus=min(os.cpu_count() or 1, _MOST_CPUS),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
    try:
        yield
    finally:
        ray.shutdown()
