"""Serves the application on a port of its own, until the process is told to end."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from fxlib.client import Client
from fxlib.dashboard.app import make_app
from fxlib.errors import FxlibError
from fxlib.serialization.files import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where visitors come.

    Attributes:
        host: the address to listen on.
        port: the port; 0: one that is free.
        names: the host names under which visitors come, besides the address itself and those of loopback.
        certificate: PEM file of the certificate for HTTPS; None: HTTP.
        key: PEM file of its key.
    """

    host: str
    port: int
    names: Sequence[str] = ()
    certificate: Path | None = None
    key: Path | None = None


def serve(client: Client, door: Door, *, ready: Path | None = None) -> None:
    """Serve the dashboard of a service until SIGTERM or SIGINT.

    Args:
        client: a client of the service, with the credential of a viewer.
        door: where visitors come.
        ready: a file into which the address is written once it listens; None: no file.

    Raises:
        FxlibError: it cannot listen there, or a file of the certificate cannot be used.
    """
    hosts = ["localhost", "127.0.0.1", "[::1]", "::1", door.host, *door.names]
    app = make_app(client, hosts=hosts, stopping=lambda: server.should_exit)
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=3,
        ssl_certfile=door.certificate,
        ssl_keyfile=door.key,
    )
    server = uvicorn.Server(config)
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise FxlibError(f"it cannot be used: {error.strerror or error}", where="--https-cert, --https-key") from error
    with _listening(door) as listener:
        if ready is not None:
            write_whole(ready, [f"{door.host}:{listener.getsockname()[1]}\n".encode()])
        server.run(sockets=[listener])


def _listening(door: Door) -> socket.socket:
    family = socket.AF_INET6 if ":" in door.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((door.host, door.port))
    except OSError as error:
        listener.close()
        where = f"--listen {door.host}:{door.port}"
        raise FxlibError(f"cannot listen there: {error.strerror or error}", where=where) from error
    return listener
