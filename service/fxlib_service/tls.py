"""Certificates, for gRPC."""

from __future__ import annotations

from pathlib import Path

import grpc

from fxlib.errors import FxlibError
from fxlib_service.config import Tls


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Read the files.

    Raises:
        FxlibError: one cannot be read.
    """
    pair = _read(tls.key, "--tls-key"), _read(tls.certificate, "--tls-cert")
    authority = _read(tls.client_ca, "--client-ca") if tls.client_ca else None
    return grpc.ssl_server_credentials([pair], root_certificates=authority, require_client_auth=authority is not None)


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FxlibError(f"cannot read {path}: {error.strerror}", where=option) from error
