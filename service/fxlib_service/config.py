"""The configuration of a service: every option, with its unit and default."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fxlib.errors import OptionError
from fxlib.utils.local_service import TOKEN_FILE
from fxlib.utils.settings import (
    BYTES,
    COUNT,
    DAYS,
    FILE,
    FOLDER,
    GIB,
    SECONDS,
    Application,
    Kind,
    group,
    option,
)

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port. Port 0 stands for any free port."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        """Read `HOST:PORT`, with an IPv6 host in brackets.

        Raises:
            ValueError: the text is not of that form.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(f"{text!r} is not HOST:PORT")
        return Address(host=host, port=int(port))

    @property
    def loopback(self) -> bool:
        """Whether the address can be reached only from this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_ADDRESS: Final = Kind(read=Address.parse, metavar="HOST:PORT")
_URL: Final = Kind(read=str, metavar="URL")
_LOCATION: Final = Kind(read=str, metavar="DIR|URL")


def _data_folder() -> Path:
    """Return the default data folder.

    Raises:
        OptionError: this user has no home.
    """
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "fxlib"
    except RuntimeError as error:
        raise OptionError("this user has no home to put it into", option="data", hint="Name a folder.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The PEM files for TLS. With `client_ca`, clients need a certificate that it has signed (mutual TLS)."""

    certificate: Path = field(
        metadata=option("tls-cert", "PEM file of the certificate chain; serves both addresses over TLS", FILE)
    )
    key: Path = field(metadata=option("tls-key", "PEM file of the certificate's key", FILE))
    client_ca: Path | None = field(
        default=None,
        metadata=option(
            "client-ca", "PEM file; only clients with a certificate signed by this authority are served", FILE
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the resources of one client, job or upload. Limits without an option are the same in every service.

    Attributes:
        message_bytes: size of the largest upload or result; `in_flight` has the limits of other messages.
        graph_bytes: size of the largest serialized graph.
        streams_per_connection: number of calls that one connection may have open at once.
        connections: number of connections that each of the service's addresses may have open at once.
        idle_s: time without a call after which a connection is closed; a client opens it again with its next call.
        calls: number of calls that the service may have open at once.
        call_timeout_s: longest duration of a call that has one response.
        claim_wait_s: longest time for which a worker's claim waits for a job.
        upload_idle_s: time without new bytes after which an upload is ended.
    """

    message_bytes: int = 8 * MIB
    in_flight_bytes: int = field(
        default=384 * MIB,
        metadata=option(
            "max-in-flight-bytes",
            "bytes of requests, of uploads and of answers that may be on their way at once, a third each, and half of "
            "that for one tenant; more wait, and are refused after a while with SERVICE_BUSY and when to come back",
            BYTES,
        ),
    )
    blob_bytes: int = field(default=16 * GIB, metadata=option("max-blob-bytes", "size of one blob", BYTES))
    graph_bytes: int = 256 * MIB
    graph_nodes: int = field(default=1_000_000, metadata=option("max-graph-nodes", "nodes of one graph", COUNT))
    queued_per_namespace: int = field(
        default=1_000,
        metadata=option(
            "max-queued",
            "queued jobs of one namespace; more are refused with QUEUE_FULL and when to come back",
            COUNT,
        ),
    )
    live_reports_per_minute: int = field(
        default=6_000,
        metadata=option(
            "max-live-reports",
            "live reports of one namespace a minute; more are refused with QUOTA_EXCEEDED and when to come back",
            COUNT,
        ),
    )
    trial_s: float = field(
        default=3600.0,
        metadata=option("max-trial-seconds", "longest measurement that a job may ask for", SECONDS),
    )
    trial_processes: int = field(
        default=64,
        metadata=option("max-trial-processes", "most trainers and servers together that a job may ask for", COUNT),
    )
    streams_per_connection: int = 1_000
    connections: int = 4_096
    idle_s: float = 300.0
    calls: int = 10_000
    call_timeout_s: float = 120.0
    claim_wait_s: float = 60.0
    upload_idle_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse limits that contradict each other.

        Raises:
            OptionError: one tenant could not send the largest message.
        """
        if self.in_flight_bytes < 6 * self.message_bytes:
            raise OptionError(
                f"{self.in_flight_bytes} is less than six times the largest message",
                option="max-in-flight-bytes",
                hint=f"Give at least {6 * self.message_bytes}.",
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one service process; `APPLICATION` reads them."""

    data: Path = field(
        default_factory=_data_folder,
        metadata=option(
            "data",
            "folder of the database and the blobs, where they are nowhere else; one service to a folder (it holds a "
            "lock there)",
            FOLDER,
            default="fxlib in $XDG_DATA_HOME, or else in ~/.local/share",
        ),
    )
    listen: Address = field(
        default=Address(host="127.0.0.1", port=8470),
        metadata=option("listen", "where clients and workers reach the service; port 0 takes a free one", _ADDRESS),
    )
    metrics: Address = field(
        default=Address(host="127.0.0.1", port=8471),
        metadata=option("metrics", "where Prometheus finds the metrics, at /metrics", _ADDRESS),
    )
    database_url: str = field(
        default="",
        repr=False,  # it may hold a password
        metadata=option(
            "database",
            "URL of a PostgreSQL database (postgresql://USER@HOST/NAME), which several services may share, or of "
            "another SQLite file (sqlite:///FILE)",
            _URL,
            default="SQLite in the data folder",
        ),
    )
    blobs: str = field(
        default="",
        repr=False,  # a URL may hold a password
        metadata=option(
            "blobs",
            "folder of the blobs, or an URL of fsspec (s3://BUCKET/PREFIX, gs://...); services that share a database "
            "share it, too",
            _LOCATION,
            default="the data folder",
        ),
    )
    tls: Tls | None = field(default=None, metadata=group(Tls))
    insecure: bool = field(
        default=False,
        metadata=option("insecure", "serve without TLS where other machines reach it; refused otherwise", kind=None),
    )
    policy: Path | None = field(
        default=None,
        metadata=option("policy", "TOML file that tells who may do what, besides whoever runs the service", FILE),
    )
    token_file: Path | None = field(
        default=None,
        metadata=option(
            "token-file",
            "file of the token whose bearer may do everything",
            FILE,
            default="a new token at each start, for this user's eyes alone",
            variable=TOKEN_FILE,
        ),
    )
    tcp_only: bool = field(
        default=False,
        metadata=option(
            "tcp-only",
            "listen on the port alone, which asks for a token, and not on the Unix socket, where its user needs none",
            kind=None,
        ),
    )
    audit_log: Path | None = field(
        default=None,
        metadata=option(
            "audit-log",
            "file for a line about each call: who made it, and what became of it",
            FILE,
            default="jobs and refusals alone, in the service's own log",
        ),
    )
    ready_file: Path | None = field(
        default=None,
        metadata=option("ready-file", "file for the line of JSON that tells the addresses, once it is ready", FILE),
    )
    lease_s: float = field(
        default=30.0, metadata=option("lease-seconds", "silence after which a worker has lost its job", SECONDS)
    )
    limits: Limits = field(default_factory=Limits, metadata=group(Limits))
    abandon_uploads_s: float = field(
        default=24 * 3600.0,
        metadata=option(
            "abandon-uploads-seconds",
            "time after which an unfinished upload is dropped, if nothing was added to it",
            SECONDS,
        ),
    )
    reserve_bytes: int = field(
        default=64 * MIB,
        metadata=option(
            "reserve-bytes",
            "room that is allocated on the disk in advance for the answers to jobs that were accepted; when the disk "
            "is full, new jobs and uploads are refused, and answers take it",
            BYTES,
        ),
    )
    keep_days: float = field(
        default=30.0,
        metadata=option(
            "keep-days",
            "time for which finished jobs are kept after their end, and blobs after their last use; 0 is for ever",
            DAYS,
        ),
    )
    shutdown_grace_s: float = field(
        default=5.0, metadata=option("shutdown-grace-seconds", "time that calls may go on for after SIGTERM", SECONDS)
    )
    model_labels: int = field(
        default=50,
        metadata=option(
            "model-labels", "model names that the metrics distinguish; the others share the name `other`", COUNT
        ),
    )

    def __post_init__(self) -> None:
        """Refuse an unsafe configuration unless `insecure` permits it.

        Raises:
            OptionError: the lease is not positive; or an address can be reached from other machines, TLS is off, and
                `insecure` is not set.
        """
        if self.lease_s <= 0:
            raise OptionError("the length of a lease must be positive", option="lease-seconds")
        for name, address in (("listen", self.listen), ("metrics", self.metrics)):
            if not (address.loopback or self.tls or self.insecure):
                raise OptionError(
                    f"{address} is reachable from other machines, and TLS is off",
                    option=name,
                    hint="Give --tls-cert and --tls-key, or say --insecure.",
                )


APPLICATION: Final = Application(
    command="serve",
    program="python -m fxlib_service",
    description="The fxlib optimization service: it takes jobs from launchers and leases them to workers.",
    config=Config,
)
