"""Identifies the caller of each call by its certificate, its token, or the socket that it came through."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from fxlib_service.errors import Code, ServiceError
from fxlib_service.policy import Policy
from fxlib_service.roles import OWNER, Caller

_SCHEME: Final = "bearer "
_NAMES: Final = {"peer_uri": "uri", "peer_dns": "dns", "peer_email": "email", "peer_ip": "ip"}
"""The properties under which gRPC has a verified certificate's alternative names, and their prefixes in a policy."""


class Transport(Protocol):
    """What gRPC knows of a call before its request is read."""

    def peer(self) -> str:
        """Return where the call came from: "unix:", or "ipv4:127.0.0.1:1234"."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the properties that the transport has verified, such as the names of a certificate."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authenticator:
    """Identifies callers.

    Attributes:
        policy: the principals besides the owner; None if there are none.
        owner_tokens: SHA-256 of the tokens that make a caller the owner, in hex.
        certificates_own: whether every certificate that TLS has verified makes its bearer the owner. That is so where
            there is an authority and no policy.
    """

    policy: Policy | None = None
    owner_tokens: frozenset[str] = field(default_factory=frozenset)
    certificates_own: bool = False

    def caller(self, transport: Transport) -> Caller:
        """Return the caller of a call. Where a token is sent, it decides; otherwise the certificate does.

        Raises:
            ServiceError: UNAUTHENTICATED; the message never quotes the credentials.
        """
        if transport.peer().startswith("unix:"):  # the socket lies in a folder that only the owner can enter
            return OWNER
        token = _token(transport)
        if token is not None:
            return self.bearer(token)
        names = _alternative_names(transport)
        for name in names:
            if self.policy is not None and name in self.policy.certificates:
                return self.policy.certificates[name]
        if self.certificates_own and "x509_pem_cert" in transport.auth_context():
            return OWNER
        if names:
            raise ServiceError(Code.UNAUTHENTICATED, f"no principal of the policy has the certificate of {names[0]}")
        raise ServiceError(Code.UNAUTHENTICATED, hint="Set FXLIB_TOKEN_FILE, or show a certificate.")

    def bearer(self, token: str) -> Caller:
        """Return whom a token belongs to. All known tokens are compared, each in constant time.

        Raises:
            ServiceError: UNAUTHENTICATED.
        """
        digest, found = hashlib.sha256(token.encode()).hexdigest(), None
        known = dict.fromkeys(self.owner_tokens, OWNER) | dict(self.policy.tokens if self.policy else {})
        for each, caller in known.items():
            if hmac.compare_digest(each, digest):
                found = caller
        if found is None:
            raise ServiceError(Code.UNAUTHENTICATED, "the token that was sent belongs to no principal")
        return found


def _token(transport: Transport) -> str | None:
    """Return the bearer token; "" if the authorization header holds none, and None if there is no such header."""
    for key, value in transport.invocation_metadata() or ():
        if key.lower() == "authorization":
            text = value if isinstance(value, str) else ""
            return text[len(_SCHEME) :].strip() if text.lower().startswith(_SCHEME) else ""
    return None


def _alternative_names(transport: Transport) -> list[str]:
    context = transport.auth_context()
    return [
        f"{kind}:{value.decode('utf-8', 'replace')}" for key, kind in _NAMES.items() for value in context.get(key, ())
    ]
