"""The context that servicers have of a call: its caller and its deadline. It is None in tests without a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from fxlib.protocol import LEASE
from fxlib_service.job import Job
from fxlib_service.roles import OWNER, Caller


class Clock(Protocol):
    """The part of gRPC's call context that knows the deadline and the metadata."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline, or None if there is none."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the metadata that the caller sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that was admitted.

    Attributes:
        caller: the authenticated caller.
        clock: knows the caller's deadline.
        peer: the source of the call, as gRPC writes it: "ipv4:127.0.0.1:1234", "unix:".
        facts: facts about the call's job for the audit log, by name; see `note`.
    """

    caller: Caller
    clock: Clock
    peer: str = ""
    facts: dict[str, object] = field(default_factory=dict)


Context = Call | None


def caller_of(context: Context) -> Caller:
    """Return the caller, which is the owner if there is no network."""
    return OWNER if context is None else context.caller


def seconds_left(context: Context, otherwise: float) -> float:
    """Return the seconds until the caller's deadline, but at most `otherwise`."""
    remaining = context.clock.time_remaining() if context is not None else None
    return otherwise if remaining is None else min(otherwise, remaining)


def lease_of(context: Context) -> str:
    """Return the token of the lease under which a worker makes the call, or "" if it names none."""
    sent = () if context is None else context.clock.invocation_metadata() or ()
    return next((str(value) for name, value in sent if name == LEASE), "")


def note(context: Context, job: Job, **more: object) -> None:
    """Record for the audit log's line of a call which job it concerned, and what became of the job."""
    if context is not None:
        known = {"model": job.name, "of_namespace": job.namespace, "asked_by": job.asked_by, "state": job.state.value}
        context.facts.update({**known, **more})
