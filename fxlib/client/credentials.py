"""Send a client's credentials: a token from a file, over a connection that nobody else can read."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """

    def __init__(self, channel: grpc.Channel, credentials: Credentials) -> None:
        self._channel = channel
        self._credentials = credentials

    def unary_unary(self, *args: Any, **kwargs: Any) -> AuthorizedCall:
        """Return an object that calls a method of the service."""
        return AuthorizedCall(self._channel.unary_unary(*args, **kwargs), self._credentials)

    def unary_stream(self, *args: Any, **kwargs: Any) -> AuthorizedCall:
        """Return an object that calls a method of the service that answers with a stream."""
        return AuthorizedCall(self._channel.unary_stream(*args, **kwargs), self._credentials)

    def stream_unary(self, *args: Any, **kwargs: Any) -> AuthorizedCall:
        """Return an object that calls a method of the service that takes a stream."""
        return AuthorizedCall(self._channel.stream_unary(*args, **kwargs), self._credentials)


class AuthorizedCall:
    """Calls one method of a service, with the token."""

    def __init__(self, call: Any, credentials: Credentials) -> None:
        self._call = call
        self._credentials = credentials

    def __call__(self, request: Any, **options: Any) -> Any:
        """Call the method, and return its answer, or the stream of its answers."""
        return self._call(request, **self._authorized(options))

    def future(self, request: Any, **options: Any) -> Any:
        """Begin a call whose answer is asked for later."""
        return self._call.future(request, **self._authorized(options))

    def _authorized(self, options: dict[str, Any]) -> dict[str, Any]:
        token = self._credentials.token()
        if not token:
            return options
        return {**options, "metadata": (*(options.get("metadata") or ()), ("authorization", f"Bearer {token}"))}
