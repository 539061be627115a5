"""The PEM files that the service shows and trusts: read at the start, and whenever they change."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc

from fxlib.errors import FxlibError
from fxlib_service.config import Tls
from fxlib_service.followed_files import FollowedFiles

logger = logging.getLogger(__name__)


class TlsFiles:
    """What gRPC and the metrics address serve TLS with: the files as they were when they last fitted together.

    Connections that are open stay as they are.

    Attributes:
        files: the files, to be followed.
        credentials: what gRPC listens with; it asks for each connection what to show.

    Raises:
        FxlibError: a file cannot be read, holds no certificate, or the key is another one's.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self.files = FollowedFiles(tls.key, tls.certificate, tls.client_ca)
        first, self._context = _read(tls)
        self._newer: grpc.ServerCertificateConfiguration | None = None
        self._pages: WSGIServer | None = None
        taken: Any = self._taken  # its stubs lack None
        asks = tls.client_ca is not None
        self.credentials = grpc.dynamic_ssl_server_credentials(first, taken, require_client_authentication=asks)

    def protect(self, pages: WSGIServer) -> None:
        """Serve these pages over TLS, too."""
        self._pages = pages
        self._wrap(pages)

    async def follow(self) -> None:
        """Read the files again when they have changed; it ends by being cancelled.

        Files that cannot be used change nothing: the service goes on with what it read before, and logs why.
        """
        async for _ in self.files.changes():
            try:
                self._newer, self._context = await asyncio.to_thread(_read, self._tls)
            except FxlibError as error:
                logger.error("%s; the service goes on with the certificates of before", error)  # noqa: TRY400  # one line
                continue
            if self._pages is not None:
                self._wrap(self._pages)
            logger.info("read the certificates again: connections from now on get %s", self._tls.certificate)

    def _taken(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what was read since gRPC last asked, on a thread of gRPC's; None if nothing was."""
        newer, self._newer = self._newer, None
        return newer

    def _wrap(self, pages: WSGIServer) -> None:
        plain = socket.socket(fileno=pages.socket.detach())  # the same descriptor, which the server's thread waits for
        pages.socket = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)


def _read(tls: Tls) -> tuple[grpc.ServerCertificateConfiguration, ssl.SSLContext]:
    """Read the PEM files for gRPC, and for Python's own sockets."""
    pair = _bytes(tls.key, "--tls-key"), _bytes(tls.certificate, "--tls-cert")
    authority = _bytes(tls.client_ca, "--client-ca") if tls.client_ca else None
    context, option = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "--tls-cert"  # gRPC says of neither what is wrong
    try:
        context.load_cert_chain(tls.certificate, tls.key, password="")
        if tls.client_ca:
            option, context.verify_mode = "--client-ca", ssl.CERT_REQUIRED
            context.load_verify_locations(tls.client_ca)
    except (ssl.SSLError, OSError) as error:
        raise FxlibError(f"it cannot be used: {getattr(error, 'reason', '') or error}", where=option) from error
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority), context


def _bytes(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FxlibError(f"cannot read {path}: {error.strerror}", where=option) from error
