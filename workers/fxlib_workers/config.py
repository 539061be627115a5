"""The configuration of a worker: every option, with its unit and default."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from fxlib.config import SERVICE, read_address
from fxlib.errors import FxlibError, OptionError
from fxlib.spec.labels import problems_of, read_label
from fxlib.utils.local_service import TOKEN_FILE
from fxlib.utils.settings import COUNT, FILE, GIB, GIBIBYTES, SECONDS, Application, Kind, group, option
from fxlib_workers.process.probe import Level

TRIAL_SETTINGS: Final = "FXLIB_TRIAL_SETTINGS"
"""The environment variable that holds `TrialSettings` as JSON, for the process that drives trials."""

LOOPBACK: Final = "lo"
"""The interface of trials whose processes are all on one host, which may give them a network of their own."""


def _level(text: str) -> Level:
    try:
        return Level(text)
    except ValueError:
        raise ValueError(f"{text!r} is none of {', '.join(Level)}") from None


def _own_name(text: str) -> str:
    if not (text.isprintable() and 1 <= len(text) <= _LONGEST_NAME):
        raise ValueError(f"{text[:64]!r} is not one line of 1 to {_LONGEST_NAME} characters")
    return text


_LONGEST_NAME: Final = 256
"""The longest name of a worker that a service takes."""

_LEVEL: Final = Kind(read=_level, metavar="LEVEL")
_ADDRESS: Final = Kind(read=read_address, metavar="HOST:PORT")
_LABEL: Final = Kind(read=read_label, metavar="KEY=VALUE", show="=".join)
_NAME: Final = Kind(read=str, metavar="NAME")
_OWN_NAME: Final = Kind(read=_own_name, metavar="NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteLimits:
    """The resources that the process rewriting one graph may use.

    Attributes:
        memory_bytes: the address space in addition to that of the libraries.
        file_bytes: the size of the largest file that it may write.
        cpu_s: the processor time.
        wall_s: the time from start to answer.
    """

    memory_bytes: int = field(
        default=8 * GIB, metadata=option("rewrite-memory-gib", "memory that a rewrite may take", GIBIBYTES)
    )
    file_bytes: int = 8 * GIB
    cpu_s: int = 600
    wall_s: float = field(default=900.0, metadata=option("rewrite-timeout", "time that a rewrite may take", SECONDS))

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            FxlibError: a limit is not positive.
        """
        for name, value in asdict(self).items():
            if value <= 0:
                raise FxlibError("must be positive", where=f"RewriteLimits.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """The settings that say where and how trials run.

    Attributes:
        ray_address: the address of a Ray cluster; empty for the worker's own Ray on this host.
        interface: the network interface over which the processes of a trial communicate.
        exposed_ray: whether the worker's own Ray may listen on all interfaces of the host.
        allowed_modules: the modules whose functions and classes the operator allows servers of a trial to run.
        keep_variables: names, or patterns of names, of environment variables that trials and rewrites see in addition
            to those that libraries need.
        cpus_per_process: the share of a processor that Ray reserves for each process, which is not bound to it.
        process_memory_bytes: the memory that a process of a trial may allocate in addition to that of the libraries.
        host_memory_bytes: the total memory that the processes of a trial on one host may use; 0 for three quarters of
            the host's.
        process_file_bytes: the size of the largest file that a process of a trial may write.
        placement_timeout_s: the time that Ray has to find room for a trial.
        start_timeout_s: the time that the processes of a trial have to start and load the model.
        node_containment: the level that a node of a cluster must reach for trials to run there, so that the level that
            the worker reported at its start also holds on nodes that join later.
    """

    ray_address: str = field(
        default="",
        metadata=option(
            "ray-address",
            "a Ray cluster to measure on",
            Kind(read=str, metavar="ADDR"),
            default="a Ray of the worker's own on this host",
        ),
    )
    interface: str = field(
        default=LOOPBACK,
        metadata=option(
            "interface", "network interface over which the processes of a trial speak to each other", _NAME
        ),
    )
    exposed_ray: bool = field(
        default=False,
        metadata=option(
            "expose-ray",
            "let a Ray of the worker's own listen on all interfaces of the host, where it cannot have a network of its "
            "own; refused otherwise with an interface besides loopback",
            kind=None,
        ),
    )
    allowed_modules: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "allow-module",
            "module whose functions and classes servers of a trial may run",
            Kind(read=str, metavar="PKG.MOD"),
            repeatable=True,
        ),
    )
    keep_variables: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "keep-env",
            "variable of the environment, or pattern of names (`AWS_*`), that trials and rewrites see, too",
            _NAME,
            repeatable=True,
        ),
    )
    cpus_per_process: float = 0.01
    process_memory_bytes: int = field(
        default=16 * GIB,
        metadata=option("trial-memory-gib", "memory that each process of a trial may take", GIBIBYTES),
    )
    host_memory_bytes: int = field(
        default=0,
        metadata=option(
            "trial-host-memory-gib",
            "memory that all processes of a trial on one host may take together",
            GIBIBYTES,
            default="three quarters of the host's",
        ),
    )
    process_file_bytes: int = 4 * GIB
    placement_timeout_s: float = field(
        default=20.0, metadata=option("placement-timeout", "time that Ray has to find room for a trial", SECONDS)
    )
    start_timeout_s: float = 120.0
    node_containment: Level = Level.NONE


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one worker process. `APPLICATION` reads them.

    Attributes:
        claim_wait_s: the time that one call may wait for a job.
        outage_s: the time that the service may be unreachable before a finished result is given up.
    """

    service: str = field(
        default="127.0.0.1:8470", metadata=option("service", "the service", _ADDRESS, variable=SERVICE)
    )
    tls_ca: Path | None = field(
        default=None,
        metadata=option("tls-ca", "PEM file of the authority behind the service's certificate; turns TLS on", FILE),
    )
    tls_certificate: Path | None = field(
        default=None, metadata=option("tls-cert", "PEM file of the worker's own certificate, for mutual TLS", FILE)
    )
    tls_key: Path | None = field(default=None, metadata=option("tls-key", "PEM file of its key", FILE))
    token_file: Path | None = field(
        default=None,
        metadata=option(
            "token-file",
            "file of the token that the service asks for",
            FILE,
            default="that of this user's own service on this machine",
            variable=TOKEN_FILE,
        ),
    )
    insecure: bool = field(
        default=False, metadata=option("insecure", "send the token unencrypted to another machine", kind=None)
    )
    name: str = field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        metadata=option("name", "a name unique among the service's workers", _OWN_NAME, default="host and process id"),
    )
    labels: tuple[tuple[str, str], ...] = field(
        default=(),
        metadata=option(
            "label", "label of this worker, by which jobs may ask to be measured here", _LABEL, repeatable=True
        ),
    )
    slots: int = field(default=1, metadata=option("slots", "jobs at once; they take turns at measuring", COUNT))
    once: bool = field(default=False, metadata=option("once", "end after one job", kind=None))
    trial: TrialSettings = field(default_factory=TrialSettings, metadata=group(TrialSettings))
    rewrite: RewriteLimits = field(default_factory=RewriteLimits, metadata=group(RewriteLimits))
    require_containment: Level = field(
        default=Level.NONE,
        metadata=option(
            "require-containment",
            "least containment of what a job's graph runs in, without which the worker does not start: none, "
            "filtered, private or isolated",
            _LEVEL,
        ),
    )
    host_lock: Path = field(
        # One path for all users of the host; a unit of systemd may have a folder /tmp of its own.
        default=Path("/dev/shm/fxlib-host.lock"),  # noqa: S108
        metadata=option("host-lock", "lock by which the workers of a host take turns at measuring", FILE),
    )
    claim_wait_s: float = 20.0
    outage_s: float = 600.0

    def __post_init__(self) -> None:
        """Check the options against each other.

        Raises:
            OptionError: there is no slot, a label is not valid or is given twice, a certificate has no key, or
                processes of a cluster would use loopback.
        """
        if self.slots < 1:
            raise OptionError("must be at least 1", option="slots")
        if len(dict(self.labels)) < len(self.labels):
            raise OptionError("a label has one value", option="label")
        for key, problem in problems_of(dict(self.labels)):
            raise OptionError(f"{key or 'labels'} {problem}", option="label")
        if (self.tls_certificate is None) != (self.tls_key is None):
            there, missing = ("tls-cert", "tls-key") if self.tls_certificate else ("tls-key", "tls-cert")
            raise OptionError(f"it needs --{missing}, too", option=there)
        if self.trial.ray_address and self.trial.interface == LOOPBACK:
            raise OptionError(
                "the processes of a trial on a cluster cannot speak to each other on loopback",
                option="interface",
                hint="Name the network interface that the cluster's hosts share, e.g. eth0.",
            )


APPLICATION: Final = Application(
    command="worker",
    program="python -m fxlib_workers",
    description="Claims jobs of an fxlib service, rewrites graphs in a sandboxed process, measures them on Ray.",
    config=Config,
)
