"""Files that are read at startup, and again whenever they change while the service runs.

The PEM files hold the certificates that the service presents and trusts. The policy and the owner's token decide
permissions.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from wsgiref.simple_server import WSGIServer

import grpc

from fxlib.errors import FxlibError
from fxlib.utils.local_service import new_token, read_token
from fxlib_service import audit
from fxlib_service.authentication import Authenticator
from fxlib_service.config import Config, Tls
from fxlib_service.policy import Policy

_LOOK_S: Final = 0.5
"""Seconds between two looks at the files. A changed file is read once two successive looks find it the same, so that
its writer has finished."""

T = TypeVar("T")

_State = tuple[int, ...]

logger = logging.getLogger(__name__)


class FollowedFiles:
    """Reports changes to files since they were named here. None stands for a file that is not used.

    Attributes:
        asked: event that is set to have the files read now.
    """

    def __init__(self, *paths: Path | None) -> None:
        self._paths = [path for path in paths if path is not None]
        self._read = self._states()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fxlib-files")
        self.asked = asyncio.Event()

    async def look(self, read: Callable[[], T]) -> T:
        """Call a function that reads the files, on a thread for that alone: those of asyncio may all wait for blobs."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def changes(self) -> AsyncIterator[None]:
        """Yield each time that the files have to be read again. It ends when cancelled, or if there are no files."""
        seen = self._read
        while self._paths:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.asked.wait(), _LOOK_S)
            now = await self.look(self._states)
            if self.asked.is_set() or (now == seen and now != self._read):
                self.asked.clear()
                self._read = now
                yield
            seen = now

    def _states(self) -> tuple[_State, ...]:
        return tuple(map(_state, self._paths))


def _state(path: Path) -> _State:
    """Return values that differ once a file is written, replaced, or given to others; none if it cannot be examined."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class TlsFiles:
    """The certificates with which gRPC and the metrics address serve TLS, as of when the files last fitted together.

    Open connections stay as they are.

    Attributes:
        files: the files, to be followed.
        credentials: the credentials with which gRPC listens; for each connection, it asks them for the certificate.

    Raises:
        FxlibError: a file cannot be read or holds no certificate, or the key belongs to another certificate.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self.files = FollowedFiles(tls.key, tls.certificate, tls.client_ca)
        first, self._context = _read_certificates(tls)
        self._newer: grpc.ServerCertificateConfiguration | None = None
        self._pages: WSGIServer | None = None
        taken: Any = self._taken  # gRPC's stubs lack None
        asks = tls.client_ca is not None
        self.credentials = grpc.dynamic_ssl_server_credentials(first, taken, require_client_authentication=asks)

    def protect(self, pages: WSGIServer) -> None:
        """Serve these pages over TLS as well."""
        self._pages = pages
        self._wrap(pages)

    async def follow(self) -> None:
        """Read the files again when they have changed. It runs until it is cancelled.

        Files that cannot be used change nothing: the service continues with the earlier ones and logs why.
        """
        async for _ in self.files.changes():
            try:
                self._newer, self._context = await self.files.look(partial(_read_certificates, self._tls))
            except FxlibError as error:
                logger.error("%s; the service goes on with the certificates of before", error)  # noqa: TRY400  # one line
                continue
            if self._pages is not None:
                self._wrap(self._pages)
            logger.info("read the certificates again: connections from now on get %s", self._tls.certificate)

    def _taken(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates read since gRPC last asked, or None if there are none; called on a thread of gRPC."""
        newer, self._newer = self._newer, None
        return newer

    def _wrap(self, pages: WSGIServer) -> None:
        plain = socket.socket(fileno=pages.socket.detach())  # the same descriptor, which the server's thread waits for
        pages.socket = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)


def _read_certificates(tls: Tls) -> tuple[grpc.ServerCertificateConfiguration, ssl.SSLContext]:
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


class AccessFiles:
    """Reads the files, and reads them again while the service runs.

    A file that cannot be used changes nothing: the service continues with its earlier contents and logs why.

    Raises:
        FxlibError: a file cannot be used, and there are no earlier contents.

    Attributes:
        authenticator: identifies callers by the contents that were read last.
        owner_token: the token whose bearer is the owner, as of the start.
        files: the files, to be followed.
    """

    def __init__(self, config: Config) -> None:
        self._policy, self._token = config.policy, config.token_file
        self.files = FollowedFiles(self._policy, self._token)
        policy = None if self._policy is None else Policy.read(self._policy)
        self.owner_token = new_token() if self._token is None else _owner_token(self._token)
        self.authenticator = Authenticator(
            policy=policy,
            owner_tokens=_digests(self.owner_token),
            certificates_own=policy is None and config.tls is not None and config.tls.client_ca is not None,
        )

    async def follow(self, recheck: Callable[[], int]) -> None:
        """Read the files again when they have changed or when asked to. It runs until it is cancelled.

        Args:
            recheck: is called after a change; ends the calls whose callers have changed, and returns their number.
        """
        async for _ in self.files.changes():
            await self._reread(recheck)

    async def _reread(self, recheck: Callable[[], int]) -> None:
        try:
            policy, token = await self.files.look(self._contents)
        except FxlibError as error:
            logger.error("%s; the service goes on with what it read before", error)  # noqa: TRY400  # one line
            audit.write_change("kept", problem=str(error))
            return
        changes = self._take(policy, token)
        ended = recheck()
        changed = [f"{kind} {', '.join(names)}" for kind, names in changes.items() if names]
        logger.info("read again who may do what: %s; calls ended: %d", "; ".join(changed) or "nothing changed", ended)
        audit.write_change("changed", **changes, ended=ended)

    def _contents(self) -> tuple[Policy | None, str | None]:
        return (
            None if self._policy is None else Policy.read(self._policy),
            None if self._token is None else _owner_token(self._token),
        )

    def _take(self, policy: Policy | None, token: str | None) -> Mapping[str, Sequence[str]]:
        known, changes = self.authenticator, dict[str, Sequence[str]]()
        if known.policy is not None and policy is not None:
            changes |= known.policy.take(policy)
        if token is not None and (digests := _digests(token)) != known.owner_tokens:
            known.owner_tokens = digests
            changes["changed"] = [*changes.get("changed", ()), "the owner's token"]
        return changes


def _owner_token(path: Path) -> str:
    """Read the owner's token, and warn if others can read its file.

    Raises:
        FxlibError: the file cannot be read, or holds no token.
    """
    token = read_token(path)
    with suppress(OSError):  # it existed a moment ago
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning("others may read %s, and whoever has its token may do everything: chmod go-rwx it", path)
    return token


def _digests(token: str) -> frozenset[str]:
    return frozenset({hashlib.sha256(token.encode()).hexdigest()})
