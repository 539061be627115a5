"""Identifies the caller of each call by a certificate, a token, or the socket that the call came through."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from fxlib_service.errors import Code, ServiceError
from fxlib_service.policy import Policy
from fxlib_service.roles import OWNER, Caller

_SCHEME: Final = "bearer "
_NAMES: Final = {"peer_uri": "uri", "peer_dns": "dns", "peer_email": "email", "peer_ip": "ip"}
"""The properties in which gRPC holds a verified certificate's alternative names, with their prefixes in a policy."""


class Transport(Protocol):
    """The facts that gRPC has about a call before its request is read."""

    def peer(self) -> str:
        """Return where the call came from: "unix:", or "ipv4:127.0.0.1:1234"."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the properties that the transport has verified, such as the names of a certificate."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the headers of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The evidence of its caller's identity that a call carries.

    Attributes:
        local: whether it came through the socket in the folder that only the owner can open.
        token: SHA-256 of the bearer token, in hex; None if none was sent.
        names: the alternative names of the verified certificate, such as "dns:ads.example.org".
        certified: whether TLS has verified a certificate.
    """

    local: bool = False
    token: str | None = None
    names: tuple[str, ...] = ()
    certified: bool = False

    @staticmethod
    def of(transport: Transport) -> Proof:
        """Return the evidence that a call carries; gRPC must still know the call."""
        if transport.peer().startswith("unix:"):
            return Proof(local=True)
        token = _token(transport)
        if token is not None:  # a token takes precedence over the certificate
            return Proof(token=_digest(token))
        return Proof(
            names=tuple(_alternative_names(transport)),
            certified="x509_pem_cert" in transport.auth_context(),
        )


@dataclass(slots=True, kw_only=True)
class Authenticator:
    """Identifies callers. Its policy and tokens may change while the service runs.

    Attributes:
        policy: the principals besides the owner; None if there are none.
        owner_tokens: SHA-256 of the tokens that make a caller the owner, in hex.
        certificates_own: whether every certificate that TLS has verified makes its bearer the owner. It does if there
            is an authority and no policy.
    """

    policy: Policy | None = None
    owner_tokens: frozenset[str] = field(default_factory=frozenset)
    certificates_own: bool = False

    def caller(self, proof: Proof) -> Caller:
        """Return the caller of a call. A token decides if one was sent; otherwise the certificate does.

        Raises:
            ServiceError: UNAUTHENTICATED; the message never quotes the credentials.
        """
        if proof.local:
            return OWNER
        if proof.token is not None:
            return self._bearer(proof.token)
        for name in proof.names:
            if self.policy is not None and name in self.policy.certificates:
                return self.policy.certificates[name]
        if self.certificates_own and proof.certified:
            return OWNER
        if proof.names:
            message = f"no principal of the policy has the certificate of {proof.names[0]}"
            raise ServiceError(Code.UNAUTHENTICATED, message)
        raise ServiceError(Code.UNAUTHENTICATED, hint="Set FXLIB_TOKEN_FILE, or show a certificate.")

    def bearer(self, token: str) -> Caller:
        """Return the caller that a token belongs to.

        Raises:
            ServiceError: UNAUTHENTICATED.
        """
        return self._bearer(_digest(token))

    def _bearer(self, digest: str) -> Caller:
        # Digests are looked up, not tokens, so that the time taken reveals nothing about a token.
        found = OWNER if digest in self.owner_tokens else None
        if found is None and self.policy is not None:
            found = self.policy.tokens.get(digest)
        if found is None:
            raise ServiceError(
                Code.UNAUTHENTICATED,
                "the token that was sent belongs to no principal",
                hint="Send one of --policy, or the service's own: its first line names the file, as token_file.",
            )
        return found


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


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
