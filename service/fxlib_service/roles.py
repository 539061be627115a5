"""Permissions of callers: the roles, the table of methods, and the caller as the service has authenticated it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fxlib_service.errors import Code, ServiceError


class Role(StrEnum):
    """A set of things that a caller may do."""

    CLIENT = "client"
    """The role of a launcher: it submits, follows and cancels the jobs of its own namespace."""

    VIEWER = "viewer"
    """The role of a viewer: it reads jobs and changes nothing."""

    WORKER = "worker"
    """The role of a worker: it claims jobs, reads their blobs, and completes them."""

    OPERATOR = "operator"
    """The role of an operator: it does what clients do, in every namespace, and cannot complete jobs."""


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
    "OptimizerService/RetryJob": _LAUNCHERS,
    "OptimizerService/ReportLive": _LAUNCHERS,
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
"""The roles that may call each method. Nobody may call a method that is missing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One authenticated caller.

    Attributes:
        name: the principal's name in the policy, or "owner".
        roles: the roles of the caller; the owner has all.
        namespace: the only namespace whose jobs and blobs it sees; None if it sees all.
    """

    name: str
    roles: frozenset[Role]
    namespace: str | None = None

    @property
    def tenant(self) -> str:
        """The name under which its calls and bytes in flight count: its namespace or, if it has none, its own name."""
        return self.namespace or f"principal {self.name}"  # no namespace contains a space

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
        """Return whether the caller may see the jobs of a namespace."""
        return self.namespace in (None, namespace)

    def namespace_asked(self, given: str, *, otherwise: str = "") -> str:
        """Return the namespace that a request is for: the given one, else the caller's own, else `otherwise`.

        Raises:
            ServiceError: PERMISSION_DENIED if the caller belongs to a namespace other than the given one.
        """
        if self.namespace is None:
            return given or otherwise
        if given not in ("", self.namespace):
            message = f"{self.name!r} belongs to the namespace {self.namespace!r}, and asks for {given!r}"
            raise ServiceError(Code.PERMISSION_DENIED, message)
        return self.namespace


OWNER: Final = Caller(name="owner", roles=_ALL)
"""The user that runs the service, known by its Unix socket or by the owner's token."""


def _listed(roles: frozenset[Role]) -> str:
    return " or ".join(role.value for role in Role if role in roles) or "nobody"
