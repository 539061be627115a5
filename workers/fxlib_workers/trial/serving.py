"""Whether the servers of a trial can serve what graphs need: by code that they have, or by replay of a profile."""

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
from fxlib_workers.trial.objects import Needs
from fxlib_workers.trial.replay.plan import Line, Script, lines_of, strangers_of
from fxlib_workers.trial.trainer import Material

_HINT_PROFILE: Final = "measure the job with fxlib.profile(...) and pass that as profile=, so that it can be replayed"
_HINT_ANEW: Final = "the profile records no call of this; measure the graph anew with fxlib.profile(...)"

_HINT_RREFS: Final = "name its owner and class in Workload.rrefs"

UNKNOWN_CLASS: Final = ""
"""Of an object of which nobody has said what it is: it can only be replayed."""

_LEAST_THREADS: Final = 16
"""As many as an RPC agent has by default."""

_MOST_THREADS: Final = 64


class Ask(Protocol):
    """Calls a method of several processes at once: see `World.ask`."""

    def __call__(
        self, members: Sequence[Any], method: str, *args: object, timeout_s: float, blame: Reason = ...
    ) -> list[Any]:
        """Return their answers."""


class Serving:
    """Knows which server has what.

    Args:
        ask: calls processes of the trial.
        workload: names the servers.
        profile: what to replay from, if anything; `with_strangers` has joined its servers to the workload.
        strangers: servers that the profile alone knows.
        timeout_s: of each question.
    """

    def __init__(
        self, ask: Ask, workload: Workload, profile: Profile | None, strangers: Iterable[str], timeout_s: float
    ) -> None:
        self._ask = ask
        self._workload = workload
        self._profile = profile
        self._strangers = frozenset(strangers)
        self._timeout_s = timeout_s
        self._script: Script | None = None

    def stage(self, servers: Sequence[Any], trainers: Sequence[Any], needs: Needs) -> None:
        """Have replayed what the original needs and nobody has, as far as there is a profile.

        Raises:
            TrialError: NO_SERVER, where the profile cannot be replayed.
        """
        missing = frozenset(function for _, function in self._missing(servers, needs))
        objects = self._unmade(servers)
        if self._profile is None or not (missing or objects or self._strangers):
            return
        script = self._script = Script(
            lines=_lines_of(self._profile, needs.created),
            functions=missing,
            strangers=self._strangers,
            objects=objects,
            makers=frozenset(function for function, fetches in needs.created.items() if not fetches) & missing,
            contracts={**needs.contracts, **self._workload.contracts},
            servers=self._profile.server_by_name,
            seed=self._workload.seed,
        )
        for members in (servers, trainers):
            self._ask(members, "replay", script, timeout_s=self._timeout_s, blame=Reason.NO_SERVER)
        names = [server.name for server in self._workload.servers]
        self._ask(trainers[:1], "calibrate", names, timeout_s=self._timeout_s, blame=Reason.NO_SERVER)

    def check(self, servers: Sequence[Any], needs: Needs) -> None:
        """See that all that a graph needs is there.

        Raises:
            TrialError: OPAQUE_CODE or NO_SERVER.
        """
        if needs.opaque:
            raise TrialError(Reason.OPAQUE_CODE, ", ".join(needs.opaque), survived=True)
        refused = [self._refusal(*each) for each in self._missing(servers, needs) if not self._replays(*each)]
        if self._script is None:
            refused += [f"the object behind {name!r}" for name in sorted(self._unmade(servers))]
        if refused:
            hint = _HINT_PROFILE if self._profile is None else _HINT_ANEW
            raise TrialError(Reason.NO_SERVER, f"{', '.join(dict.fromkeys(refused))} ({hint})", survived=True)

    def _replays(self, server: str, function: str) -> bool:
        return self._script is not None and self._is_there(server) and self._script.serves(function)

    def _refusal(self, server: str, function: str) -> str:
        if not self._is_there(server):
            return f"calls to {server!r}, which is none of the workload's servers"
        return f"{function!r} on {server or 'any server'!r}"

    def _is_there(self, server: str) -> bool:
        """Whether there is a server of this name; no name stands for whichever the run will tell."""
        return not server or server in [each.name for each in self._workload.servers]

    def _missing(self, servers: Sequence[Any], needs: Needs) -> list[tuple[str, str]]:
        """Return server and function of what no code here serves; all functions of a server that is not there."""
        names = [server.name for server in self._workload.servers]
        missing: list[tuple[str, str]] = []
        for server, functions in needs.functions.items():
            if not self._is_there(server):
                missing += [(server, function) for function in functions]
                continue
            asked = servers if not server else [servers[names.index(server)]]
            for refused in self._ask(asked, "not_served", list(functions), timeout_s=self._timeout_s):
                missing += [(server, function) for function in refused]
        return missing

    def _unmade(self, servers: Sequence[Any]) -> frozenset[str]:
        """Return the RRefs whose objects nobody can make."""
        if not self._workload.rrefs or not servers:
            return frozenset()
        (unmade,) = self._ask(servers[:1], "not_made", self._workload.rrefs, timeout_s=self._timeout_s)
        return frozenset(unmade)


def with_strangers(
    workload: Workload, material: Material, profile: Profile | None
) -> tuple[Workload, Material, tuple[str, ...]]:
    """Join to a workload, and to the material that carries it, what it does not describe itself.

    That are the objects behind RRefs that the model holds, and the servers that only these or a profile know; the
    latter are returned by name, too.

    Raises:
        TrialError: NO_SERVER, where they are too many, have no names, or are the trainer itself.
    """
    trainers = [f"trainer{rank}" for rank in range(workload.trainers)]
    known = [server.name for server in workload.servers]
    held = _held_objects(workload, material)
    owners = sorted({each.owner for each in held.values()} - {*known, *trainers})
    recorded = () if profile is None else strangers_of(profile, [*known, *trainers])
    strangers = tuple(sorted({*owners, *recorded}))
    if not strangers and not held:
        return workload, material, ()
    try:
        joined = replace(
            workload,
            servers=(*workload.servers, *(Server(name=name) for name in strangers)),
            rrefs={**held, **workload.rrefs},
        )
        message = workload_to_proto(joined).message
    except FxlibError as error:
        raise TrialError(Reason.NO_SERVER, f"all that the profile calls: {error}") from error
    return joined, replace(material, workload=message.SerializeToString()), strangers


def _held_objects(workload: Workload, material: Material) -> dict[str, RemoteObject]:
    """Return what lies behind the RRefs that the model holds and the workload does not speak of: who owns it."""
    held = wire.handles_in(wire.parse(material.original))
    unknown = {name: rref for name, rref in held.items() if name not in workload.rrefs}
    if own := [name for name, rref in unknown.items() if rref.is_owner() or not rref.owner_name()]:
        detail = f"the RRef {own[0]!r} leads to an object in the launcher itself, which no server of a trial has"
        raise TrialError(Reason.NO_SERVER, f"{detail} ({_HINT_RREFS})")
    return {name: RemoteObject(owner=rref.owner_name(), cls=UNKNOWN_CLASS) for name, rref in unknown.items()}


def calls_at_once(profile: Profile | None, server: str) -> int:
    """Return how many threads a server needs for the calls that it works on at once."""
    recorded = profile.server_by_name.get(server) if profile is not None else None
    return max(_LEAST_THREADS, min(_MOST_THREADS, recorded.concurrency if recorded else 0))


def _lines_of(profile: Profile, created: Mapping[str, Iterable[str]]) -> Mapping[str, Mapping[str, Line]]:
    try:
        return lines_of(profile, created)
    except FxlibError as error:
        raise TrialError(Reason.NO_SERVER, f"what the profile records: {error}") from error
