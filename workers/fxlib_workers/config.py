"""How a worker is run: every option, with its unit and default."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from fxlib.client import Tls
from fxlib.errors import FxlibError

TRIAL_SETTINGS: Final = "FXLIB_TRIAL_SETTINGS"
"""The environment variable that hands `TrialSettings` to the process that drives trials, as JSON."""

REWRITE_JOB: Final = "FXLIB_REWRITE_JOB"
"""The environment variable that tells a rewriting process the job's folder."""

REWRITE_LIMITS: Final = "FXLIB_REWRITE_LIMITS"
"""The environment variable that hands `RewriteLimits` to it, as JSON."""

REWRITE_MODULES: Final = "FXLIB_REWRITE_MODULES"
"""The environment variable that names the operator's modules to it, as JSON."""

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteLimits:
    """What the process that rewrites one graph may take.

    Attributes:
        memory_bytes: address space on top of what the libraries take.
        file_bytes: size of one file that it writes.
        cpu_s: processor time.
        wall_s: time from start to answer.
    """

    memory_bytes: int = 8 * _GIB
    file_bytes: int = 8 * _GIB
    cpu_s: int = 600
    wall_s: float = 900.0

    def __post_init__(self) -> None:
        """Refuse limits that nothing can keep.

        Raises:
            FxlibError: one is not positive.
        """
        for name, value in asdict(self).items():
            if value <= 0:
                raise FxlibError("must be positive", where=f"RewriteLimits.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """Where and how trials run.

    Attributes:
        ray_address: of a Ray cluster; empty for a Ray of one's own on this host.
        interface: network interface over which the processes of a trial speak to each other.
        allowed_modules: whose functions and classes servers of a trial may run: the operator's word.
        cpus_per_process: share of a processor that Ray reserves for each process; processes are not bound to it.
        keep_variables: names, or patterns of them, of variables of the worker's environment that trials and rewrites
            see besides those that libraries need.
        process_memory_bytes: what one process of a trial may allocate on top of what the libraries take.
        process_file_bytes: size of one file that a process of a trial may write.
        placement_timeout_s: how long Ray may take to find room for a trial.
        start_timeout_s: how long the processes of a trial may take to come up and load the model.
    """

    ray_address: str = ""
    interface: str = "lo"
    allowed_modules: tuple[str, ...] = ()
    keep_variables: tuple[str, ...] = ()
    cpus_per_process: float = 0.01
    process_memory_bytes: int = 16 * _GIB
    process_file_bytes: int = 4 * _GIB
    placement_timeout_s: float = 20.0
    start_timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """One worker process.

    Attributes:
        service: the service's "host:port".
        name: of this worker, unique among those of one service.
        slots: jobs at once; they take turns at measuring.
        once: end after one job.
        host_lock: the file by which workers on one host take turns at measuring.
        claim_wait_s: how long one call may wait for a job.
        outage_s: how long the service may be away before a finished result is given up.
    """

    service: str = "127.0.0.1:8470"
    tls: Tls | None = None
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    slots: int = 1
    once: bool = False
    rewrite: RewriteLimits = field(default_factory=RewriteLimits)
    trial: TrialSettings = field(default_factory=TrialSettings)
    host_lock: Path = Path("/tmp/fxlib-host.lock")  # noqa: S108 - one place that all users of the host share
    claim_wait_s: float = 20.0
    outage_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            FxlibError: there is no slot, or a cluster's processes would speak on the loopback interface.
        """
        if self.slots < 1:
            raise FxlibError("must be at least 1", where="--slots")
        if self.trial.ray_address and self.trial.interface == "lo":
            raise FxlibError(
                "the processes of a trial on a cluster cannot speak to each other on loopback",
                where="--interface",
                hint="Name the network interface that the cluster's hosts share, e.g. eth0.",
            )
