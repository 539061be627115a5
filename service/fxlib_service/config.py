"""How a service is run: every option, with its unit and default."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fxlib.errors import FxlibError

MIB: Final = 1 << 20
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port; port 0 stands for any free one."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        """Read `HOST:PORT`, an IPv6 host in brackets.

        Raises:
            ValueError: it is not of that form.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(f"{text!r} is not HOST:PORT")
        return Address(host=host, port=int(port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files. With `client_ca`, only clients that show a certificate signed by it are served (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client, job or upload may take."""

    message_bytes: int = 8 * MIB
    blob_bytes: int = 16 * GIB
    graph_bytes: int = 256 * MIB
    graph_nodes: int = 1_000_000
    queued_per_namespace: int = 1_000
    streams_per_connection: int = 1_000
    calls: int = 10_000
    call_timeout_s: float = 120.0
    claim_wait_s: float = 60.0
    upload_idle_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """One service process.

    Attributes:
        data: folder of the database (unless `database_url` says otherwise) and of the blobs.
        insecure: serve without TLS where other machines reach it.
        policy: the file that tells who may do what; None: whoever is served may do everything.
        lease_s: a worker that is not heard of for so long has lost its job.
        abandon_uploads_s: unfinished uploads that nothing was added to for so long are dropped.
        keep_days: finished jobs are kept for so long, and blobs for so long after the last use; 0: for ever.
        shutdown_grace_s: how long calls may go on after SIGTERM.
        model_labels: how many model names the metrics tell apart; the others share the name "other".
    """

    data: Path
    listen: Address = Address(host="127.0.0.1", port=8470)
    metrics: Address = Address(host="127.0.0.1", port=8471)
    database_url: str = ""
    tls: Tls | None = None
    insecure: bool = False
    policy: Path | None = None
    ready_file: Path | None = None
    lease_s: float = 30.0
    abandon_uploads_s: float = 24 * 3600.0
    keep_days: float = 30.0
    shutdown_grace_s: float = 5.0
    model_labels: int = 50
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Refuse what is not safe unless it was asked for.

        Raises:
            FxlibError: an address is reachable from other machines, TLS is off, and `insecure` is not set.
        """
        if self.lease_s <= 0:
            raise FxlibError("must be positive", where="--lease-seconds")
        for option, address in (("--listen", self.listen), ("--metrics", self.metrics)):
            if not (address.loopback or self.tls or self.insecure):
                raise FxlibError(
                    f"{address} is reachable from other machines, and TLS is off",
                    where=option,
                    hint="Give --tls-cert and --tls-key, or say --insecure.",
                )
