"""Send a client's credentials: a token from a file, over a connection that nobody else can read."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import grpc

from fxlib.errors import CredentialError, FxlibError
from fxlib.utils.local_service import TOKEN_FILE, LocalService, find, read_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files: the authority behind the service's certificate (None: the system's), and a client's for mutual TLS.

    `server_name` is the name in the service's certificate, if it differs from the address.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        """Check that a certificate and its key come together: gRPC ends the process if one is missing.

        Raises:
            CredentialError: one of them is missing.
        """
        if (self.certificate is None) != (self.key is None):
            given, missing = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise CredentialError(f"a {given} was given without its {missing}", where=str(self.certificate or self.key))

    def states(self) -> tuple[tuple[int, ...], ...]:
        """Return values that differ once one of the files is written or replaced."""
        found = []
        for path in (each for each in (self.ca, self.certificate, self.key) if each is not None):
            with suppress(OSError):  # it is being replaced
                status = Path(path).stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def check_pair(self) -> None:
        """Check that certificate and key belong together.

        Raises:
            OSError: they do not, or one cannot be read.
        """
        if self.certificate is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.certificate, self.key, password="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The location of the token, and whether it may be sent.

    Attributes:
        address: the service's address, for messages.
        token_file: the token's file; None: there is no token.
        required: whether a missing file is an error; this user's own service may have none.
        private: whether the connection is encrypted, or does not leave the machine.
        named_by: where the file was named, for messages; empty if it was not named.
        held: the token itself, if it is not in a file.
    """

    address: str
    token_file: Path | None
    required: bool
    private: bool
    named_by: str = ""
    held: str = field(default="", repr=False)

    def token(self) -> str:
        """Return the token to send, "" for none; each call reads it, since a restarted service has another one.

        Raises:
            CredentialError: the token cannot be read, or others could read it in transit.
        """
        file = self.token_file
        if not self.held and (file is None or not (self.required or file.exists())):
            return ""
        if not self.private:
            raise CredentialError(
                "the token is not sent without encryption",
                where=f"the service at {self.address}",
                hint="Connect with TLS, or say insecure where nobody else is on the network.",
            )
        if file is None:
            return self.held
        try:
            return read_token(file)
        except FxlibError as error:
            raise CredentialError(str(error), where=self.named_by) from error


def choose(
    address: str, *, token_file: Path | str | None, tls: Tls | None, insecure: bool, token: str = ""
) -> tuple[str, Credentials]:
    """Return the address to connect to, and the credentials to send there.

    This user's own service on this machine is reached on its socket, or with the token that it left, unless a token was
    named, or a certificate, which identifies the user. A `token` itself is shown instead of any file's.

    Raises:
        CredentialError: a token is given for a socket, on which every caller is the owner, whatever token they show.
    """
    private = tls is not None or insecure or is_loopback(address)
    if token:
        if address.startswith("unix:"):
            raise CredentialError(
                "tokens say nothing on a socket, where everybody is the owner",
                where=f"the service at {address}",
                hint="Connect to its HOST:PORT.",
            )
        return address, Credentials(address=address, token_file=None, required=True, private=private, held=token)
    named = token_file or os.environ.get(TOKEN_FILE) or None
    here = _local(address)
    if named is None and here is not None and tls is None and here.answers():
        return here.target, Credentials(address=address, token_file=None, required=False, private=True)
    own = here.token if here is not None and (tls is None or tls.certificate is None) else None
    return address, Credentials(
        address=address,
        token_file=Path(named) if named is not None else own,
        required=named is not None,
        private=private,
        named_by="token_file" if token_file else TOKEN_FILE if named is not None else "",
    )


def _local(address: str) -> LocalService | None:
    port = address.rpartition(":")[2]
    return find(int(port)) if is_loopback(address) and port.isdecimal() else None


def is_loopback(address: str) -> bool:
    """Whether an address belongs to this machine, and cannot be reached from anywhere else."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AuthorizedChannel:
    """A channel that adds the token to every call; it has the methods of `grpc.Channel` that generated stubs use.

    It does not use `grpc.intercept_channel`, which asks the channel for each call anew: in a channel that was closed
    meanwhile, that ends the process (grpcio 1.85), while a call that was asked for before raises ValueError.

    Args:
        dial: opens a channel; raises OSError or CredentialError if the PEM files cannot be used.
        credentials: the token that is sent.
        tls: the PEM files. When they have changed, calls from then on go over a channel that is opened with the newer
            ones, and calls under way go on over theirs: certificates expire while a worker runs.
    """

    def __init__(self, dial: Callable[[], grpc.Channel], credentials: Credentials, tls: Tls | None) -> None:
        self._dial = dial
        self._credentials = credentials
        self._tls = tls or Tls()
        self._looking = Lock()
        self._read = self._tls.states()
        self._channel = dial()
        self._before = WeakSet[grpc.Channel]()
        self._closed = False

    @contextmanager
    def current(self) -> Iterator[grpc.Channel]:
        """Yield the channel for a new call, which nobody closes in the block.

        Raises:
            ValueError: it is closed.
        """
        with self._looking:
            if self._closed:
                raise ValueError("Cannot invoke RPC on closed channel!")
            if (now := self._tls.states()) != self._read:
                with suppress(OSError, CredentialError):  # one of them may still be the old one
                    self._tls.check_pair()
                    newer, self._read = self._dial(), now
                    self._before.add(self._channel)
                    self._channel = newer
            yield self._channel

    def close(self) -> None:
        """Close the channel, and cancel the calls in flight over it; those over an earlier one may go on."""
        with self._looking:
            self._closed = True
            for each in (self._channel, *self._before):
                each.close()

    def unary_unary(self, *args: Any, **kwargs: Any) -> AuthorizedCall:
        """Return an object that calls a method of the service."""
        return AuthorizedCall(self, lambda channel: channel.unary_unary(*args, **kwargs), self._credentials)

    def unary_stream(self, *args: Any, **kwargs: Any) -> AuthorizedCall:
        """Return an object that calls a method of the service that answers with a stream."""
        return AuthorizedCall(self, lambda channel: channel.unary_stream(*args, **kwargs), self._credentials)

    def stream_unary(self, *args: Any, **kwargs: Any) -> AuthorizedCall:
        """Return an object that calls a method of the service that takes a stream."""
        return AuthorizedCall(self, lambda channel: channel.stream_unary(*args, **kwargs), self._credentials)


class AuthorizedCall:
    """Calls one method of a service, with the token."""

    def __init__(
        self, channel: AuthorizedChannel, ask_for: Callable[[grpc.Channel], Any], credentials: Credentials
    ) -> None:
        self._channel = channel
        self._ask_for = ask_for
        self._credentials = credentials
        with channel.current() as self._over:
            self._call = ask_for(self._over)

    def __call__(self, request: Any, **options: Any) -> Any:
        """Call the method, and return its answer, or the stream of its answers."""
        return self._current()(request, **self._authorized(options))

    def future(self, request: Any, **options: Any) -> Any:
        """Begin a call whose answer is asked for later."""
        return self._current().future(request, **self._authorized(options))

    def _current(self) -> Any:
        """Return the method of the channel as it is now."""
        with self._channel.current() as channel:
            if channel is not self._over:
                self._call, self._over = self._ask_for(channel), channel
            return self._call

    def _authorized(self, options: dict[str, Any]) -> dict[str, Any]:
        token = self._credentials.token()
        if not token:
            return options
        return {**options, "metadata": (*(options.get("metadata") or ()), ("authorization", f"Bearer {token}"))}
