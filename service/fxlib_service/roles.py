"""Who may call what: roles, the one table of methods, and the caller as the service has verified it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fxlib_service.errors import Code, ServiceError


class Role(StrEnum):
    """What a caller is to the service."""

    CLIENT = "client"
    """A launcher: it submits, follows and cancels the jobs of its own namespace."""

    VIEWER = "viewer"
    """It looks at jobs, and changes nothing."""

    WORKER = "worker"
    """It claims jobs, reads what they need, and hands answers in."""

    OPERATOR = "operator"
    """It does what clients do, in every namespace; it hands no answers in."""


_LAUNCHERS: Final = frozenset({Role.CLIENT, Role.OPERATOR})
_WATCHERS: Final = _LAUNCHERS | {Role.VIEWER}
_CARRIERS: Final = _LAUNCHERS | {Role.WORKER}
_WORKERS: Final = frozenset({Role.WORKER})
_ALL: Final = frozenset(Role)

MAY_CALL: Final = {
    "OptimizerService/Optimize": _LAUNCHERS,
    "OptimizerService/GetJob": _WATCHERS,
    "OptimizerService/WatchJob": _WATCHERS,
    "OptimizerService/ListJobs": _WATCHERS,
    "OptimizerService/CancelJob": _LAUNCHERS,
    "OptimizerService/GetCapabilities": _ALL,
    "OptimizerService/ListPasses": _ALL,
    "BlobService/FindMissing": _CARRIERS,
    "BlobService/QueryWrite": _CARRIERS,
    "BlobService/Write": _CARRIERS,
    "BlobService/Read": _CARRIERS,
    "WorkerService/Claim": _WORKERS,
    "WorkerService/Heartbeat": _WORKERS,
    "WorkerService/Report": _WORKERS,
    "WorkerService/Complete": _WORKERS,
    "WorkerService/Release": _WORKERS,
}
"""The roles that each method is open to. A method that is not here is open to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One authenticated caller.

    Attributes:
        name: the principal's name in the policy, or "owner".
        roles: what it may do; the owner has all of them.
        namespace: the namespace whose jobs and blobs it sees, and no other; None: every one.
    """

    name: str
    roles: frozenset[Role]
    namespace: str | None = None

    def check(self, method: str) -> None:
        """Refuse a method that none of the caller's roles may call.

        Raises:
            ServiceError: PERMISSION_DENIED.
        """
        allowed = MAY_CALL.get(method, frozenset())
        if not self.roles & allowed:
            message = f"{method} is for {_listed(allowed)}, and {self.name!r} is {_listed(self.roles)}"
            raise ServiceError(Code.PERMISSION_DENIED, message)

    def sees(self, namespace: str) -> bool:
        """Whether jobs of a namespace exist for this caller."""
        return self.namespace in (None, namespace)

    def namespace_asked(self, given: str, *, otherwise: str = "") -> str:
        """Return the namespace that a request is about: the caller's own, where it has one and names none.

        Raises:
            ServiceError: PERMISSION_DENIED, if it names another.
        """
        if self.namespace is None:
            return given or otherwise
        if given not in ("", self.namespace):
            message = f"{self.name!r} belongs to the namespace {self.namespace!r}, and asks for {given!r}"
            raise ServiceError(Code.PERMISSION_DENIED, message)
        return self.namespace


OWNER: Final = Caller(name="owner", roles=_ALL)
"""Whoever runs the service: the user on its Unix socket, or with its token."""


def _listed(roles: frozenset[Role]) -> str:
    return " or ".join(role.value for role in Role if role in roles) or "nobody"
