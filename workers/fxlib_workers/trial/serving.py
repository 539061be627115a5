"""Checks that a trial's servers can serve what graphs need, with code that they have or by replay of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from fxlib import wire
from fxlib.errors import FxlibError
from fxlib.protocol import workload_to_proto
from fxlib.reasons import Reason
from fxlib.spec.profile import Profile
from fxlib.spec.workload import RemoteObject, Server, Workload
from fxlib_workers.trial.failures import TrialError
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan, recorded_calls, undescribed_servers
from fxlib_workers.trial.requirements import Requirements
from fxlib_workers.trial.trainer import EncodedProgram

_HINT_PROFILE: Final = "measure the job with fxlib.profile(...) and pass that as profile=, so that it can be replayed"
_HINT_ANEW: Final = "the profile records no call of this; measure the graph anew with fxlib.profile(...)"

_HINT_RREFS: Final = "name its owner and class in Workload.rrefs"

UNKNOWN_CLASS: Final = ""
"""The class of an object that the workload does not describe, which can only be replayed."""

_LEAST_THREADS: Final = 16
"""The number of threads that an RPC agent has by default."""

_MOST_THREADS: Final = 64


class Ask(Protocol):
    """A function that calls a method of several processes at once; see `ClusterRun.ask`."""

    def __call__(
        self, processes: Sequence[Any], method: str, *args: object, timeout_s: float, reason: Reason = ...
    ) -> list[Any]:
        """Return the processes' answers."""


class Serving:
    """Finds out what each server can serve, and starts the replay of the rest.

    Args:
        ask: the function that calls processes of the trial.
        workload: the workload, with all servers of the trial.
        profile: the profile to replay from, if there is one.
        undescribed: the servers that only the profile knows.
        timeout_s: the time limit of each call.
    """

    def __init__(
        self, ask: Ask, workload: Workload, profile: Profile | None, undescribed: Iterable[str], timeout_s: float
    ) -> None:
        self._ask = ask
        self._workload = workload
        self._profile = profile
        self._undescribed = frozenset(undescribed)
        self._timeout_s = timeout_s
        self._plan: ReplayPlan | None = None

    def concurrent_calls(self, process: str) -> int:
        """Return the number of threads that a process needs for the calls that it answers at the same time.

        A server whose calls are all replayed needs them for calls in their latency, too, which in the job no server has
        yet, or any more. How many of them are worked on at once is decided by the latency model.
        """
        if process in self._undescribed:
            return _MOST_THREADS
        recorded = self._profile.server_by_name.get(process) if self._profile is not None else None
        return max(_LEAST_THREADS, min(_MOST_THREADS, recorded.concurrency if recorded else 0))

    def start_replay(self, servers: Sequence[Any], trainers: Sequence[Any], required: Requirements) -> None:
        """Make the servers replay what the original requires and none of them has, if there is a profile.

        Raises:
            TrialError: NO_SERVER if the profile cannot be replayed.
        """
        missing = frozenset(function for _, function in self._missing(servers, required))
        objects = self._not_made(servers)
        if self._profile is None or not (missing or objects or self._undescribed):
            return
        plan = self._plan = ReplayPlan(
            calls=_recorded_calls_of(self._profile, required.created),
            functions=missing,
            undescribed=self._undescribed,
            objects=objects,
            factories=frozenset(function for function, fetches in required.created.items() if not fetches) & missing,
            contracts={**required.contracts, **self._workload.contracts},
            servers=self._profile.server_by_name,
            seed=self._workload.seed,
        )
        for actors in (servers, trainers):
            self._ask(actors, "replay", plan, timeout_s=self._timeout_s, reason=Reason.NO_SERVER)
        names = [server.name for server in self._workload.servers]
        self._ask(trainers[:1], "calibrate", names, timeout_s=self._timeout_s, reason=Reason.NO_SERVER)

    def check(self, servers: Sequence[Any], required: Requirements) -> None:
        """Check that the servers can serve everything that a graph requires.

        Raises:
            TrialError: OPAQUE_CODE or NO_SERVER.
        """
        if required.opaque:
            raise TrialError(Reason.OPAQUE_CODE, ", ".join(required.opaque), survived=True)
        refused = [self._refusal(*each) for each in self._missing(servers, required) if not self._replays(*each)]
        if self._plan is None:
            refused += [f"the object behind {name!r}" for name in sorted(self._not_made(servers))]
        if refused:
            hint = _HINT_PROFILE if self._profile is None else _HINT_ANEW
            raise TrialError(Reason.NO_SERVER, f"{', '.join(dict.fromkeys(refused))} ({hint})", survived=True)

    def _replays(self, server: str, function: str) -> bool:
        return self._plan is not None and self._is_there(server) and self._plan.serves(function)

    def _refusal(self, server: str, function: str) -> str:
        if not self._is_there(server):
            return f"calls to {server!r}, which is none of the workload's servers"
        return f"{function!r} on {server or 'any server'!r}"

    def _is_there(self, server: str) -> bool:
        """Return whether there is a server of this name; "" stands for any, since only the run determines which."""
        return not server or server in [each.name for each in self._workload.servers]

    def _missing(self, servers: Sequence[Any], required: Requirements) -> list[tuple[str, str]]:
        """Return the server and function of each call that no server has code for."""
        names = [server.name for server in self._workload.servers]
        missing: list[tuple[str, str]] = []
        for server, functions in required.functions.items():
            if not self._is_there(server):
                missing += [(server, function) for function in functions]
                continue
            asked = servers if not server else [servers[names.index(server)]]
            for refused in self._ask(asked, "not_served", list(functions), timeout_s=self._timeout_s):
                missing += [(server, function) for function in refused]
        return missing

    def _not_made(self, servers: Sequence[Any]) -> frozenset[str]:
        """Return the RRefs whose objects no server can make."""
        if not self._workload.rrefs or not servers:
            return frozenset()
        (not_made,) = self._ask(servers[:1], "not_made", self._workload.rrefs, timeout_s=self._timeout_s)
        return frozenset(not_made)


def with_undescribed_servers(
    workload: Workload, program: EncodedProgram, profile: Profile | None
) -> tuple[Workload, EncodedProgram, tuple[str, ...]]:
    """Add to a workload, and to the program that carries it, the servers and objects that it does not describe.

    These are the objects behind RRefs that the model holds, and the servers that only these or a profile name. The
    names of these servers are also returned.

    Raises:
        TrialError: NO_SERVER if they are too many, have no valid name, or are the trainer itself.
    """
    trainers = [f"trainer{rank}" for rank in range(workload.trainers)]
    known = [server.name for server in workload.servers]
    owned = _objects_behind_rrefs(workload, program)
    owners = sorted({each.owner for each in owned.values()} - {*known, *trainers})
    recorded = () if profile is None else undescribed_servers(profile, [*known, *trainers])
    undescribed = tuple(sorted({*owners, *recorded}))
    if not undescribed and not owned:
        return workload, program, ()
    try:
        joined = replace(
            workload,
            servers=(*workload.servers, *(Server(name=name) for name in undescribed)),
            rrefs={**owned, **workload.rrefs},
        )
        message = workload_to_proto(joined).message
    except FxlibError as error:
        raise TrialError(Reason.NO_SERVER, f"all that the profile calls: {error}") from error
    return joined, replace(program, workload=message.SerializeToString()), undescribed


def _objects_behind_rrefs(workload: Workload, program: EncodedProgram) -> dict[str, RemoteObject]:
    """Return, by owner, the objects behind RRefs that the model holds and the workload does not describe."""
    handles = wire.handles_in(wire.parse(program.original))
    unknown = {name: rref for name, rref in handles.items() if name not in workload.rrefs}
    if launchers := [name for name, rref in unknown.items() if rref.is_owner() or not rref.owner_name()]:
        detail = f"the RRef {launchers[0]!r} leads to an object in the launcher itself, which no server of a trial has"
        raise TrialError(Reason.NO_SERVER, f"{detail} ({_HINT_RREFS})")
    return {name: RemoteObject(owner=rref.owner_name(), cls=UNKNOWN_CLASS) for name, rref in unknown.items()}


def _recorded_calls_of(
    profile: Profile, created: Mapping[str, Iterable[str]]
) -> Mapping[str, Mapping[str, RecordedCall]]:
    try:
        return recorded_calls(profile, created)
    except FxlibError as error:
        raise TrialError(Reason.NO_SERVER, f"what the profile records: {error}") from error
