"""The processes of one trial on Ray, and a watch over each call into them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fxlib.reasons import Reason
from fxlib.workload import Workload
from workers.config import TrialSettings
from workers.trial.failures import InterruptedTrialError, Raised, TrialError, shorten
from workers.trial.member import Place, ServerMember
from workers.trial.objects import Needs
from workers.trial.trainer import Arm, Material, Trainer

_GLANCE_S: Final = 0.2
"""How often a waiting driver looks whether it is still wanted."""

_AFTERMATH_S: Final = 2.0
"""How long after an exception a death is looked for that may have caused it."""

FAILS: Final[Mapping[Arm, Reason]] = {"original": Reason.ORIGINAL_FAILS, "candidate": Reason.CANDIDATE_FAILS}
"""What an exception in an arm's own code means."""


class World:
    """Trainers and parameter servers, each in a process of its own. Leaving the context ends them.

    Args:
        workload: names the servers, and counts the trainers.
        material: what the trainers run.
        settings: the operator's.
        interrupted: whether the trial is to end at once.

    Raises:
        TrialError: Ray cannot place them, or they do not come up.
        InterruptedTrialError: `interrupted` said so.
    """

    def __init__(
        self, workload: Workload, material: Material, settings: TrialSettings, interrupted: Callable[[], bool]
    ) -> None:
        self._settings = settings
        self._interrupted = interrupted
        self._workload = workload
        self._members: list[Any] = []
        names = [server.name for server in workload.servers]
        names += [f"trainer{rank}" for rank in range(workload.trainers)]
        self._group = self._reserve(len(names))
        try:
            self._start(names, material)
            self._join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes, and give their room back."""
        for member in self._members:
            ray.kill(member)
        remove_placement_group(self._group)

    def prepare(self) -> None:
        """Load both graphs into the trainers, and check that the servers can serve them.

        Raises:
            TrialError: OPAQUE_CODE, NO_SERVER, or ORIGINAL_FAILS if they cannot be built.
        """
        limit_s = self._settings.start_timeout_s
        needs = self.ask(self.trainers, "load", timeout_s=limit_s, blame=Reason.ORIGINAL_FAILS)
        self._check(needs[0])
        self.ask(self.trainers, "prepare", timeout_s=limit_s, blame=Reason.NO_SERVER)

    def ask(
        self,
        members: Sequence[Any],
        method: str,
        *args: object,
        timeout_s: float,
        blame: Reason = Reason.TRIAL_DIED,
    ) -> list[Any]:
        """Call a method of several processes at once and return their answers.

        Args:
            members: the processes.
            method: its name.
            *args: its arguments.
            timeout_s: after so long the call counts as hung.
            blame: what an exception means.

        Raises:
            TrialError: a process died, hung, or raised.
            InterruptedTrialError: the trial is to end.
        """
        pending = [getattr(member, method).remote(*args) for member in members]
        what = " of the ".join([method, *(str(each) for each in args if isinstance(each, str) and each in FAILS)])
        answers = self._await(pending, what, timeout_s)
        for answer in answers:
            if isinstance(answer, Raised):
                raise self._failure(answer, blame)
        return answers

    def _reserve(self, count: int) -> PlacementGroup:
        share = self._settings.cpus_per_process
        group = placement_group([{"CPU": share}] * count, strategy="SPREAD")
        deadline = time.monotonic() + self._settings.placement_timeout_s
        while not group.wait(_GLANCE_S):
            if self._interrupted() or time.monotonic() > deadline:
                remove_placement_group(group)
                if self._interrupted():
                    raise InterruptedTrialError
                free = ray.available_resources().get("CPU", 0.0)
                detail = f"{count} processes of {share:g} CPUs each are wanted, and {free:g} CPUs are free"
                raise TrialError(Reason.NO_CAPACITY, detail)
        return group

    def _start(self, names: Sequence[str], material: Material) -> None:
        servers = len(self._workload.servers)
        shared = ray.put(material)
        for rank, name in enumerate(names):
            place = Place(
                name=name,
                rank=rank,
                world_size=len(names),
                interface=self._settings.interface,
                allowed_modules=self._settings.allowed_modules,
                memory_bytes=self._settings.process_memory_bytes,
                threads=self._workload.threads if rank >= servers else 1,
            )
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            options = {"num_cpus": self._settings.cpus_per_process, "scheduling_strategy": strategy}
            if rank < servers:
                # Threads besides the one that lingers: for the calls of the driver.
                self._members.append(ray.remote(ServerMember).options(max_concurrency=3, **options).remote(place))
            else:
                self._members.append(ray.remote(Trainer).options(**options).remote(place, shared))
        self.servers, self.trainers = self._members[:servers], self._members[servers:]
        self._lifelines = [server.linger.remote() for server in self.servers]

    def _join(self) -> None:
        limit_s = self._settings.start_timeout_s
        (meeting,) = self.ask(self._members[:1], "host_meeting", timeout_s=limit_s)
        self.ask(self._members, "join", meeting, timeout_s=limit_s)
        for server, member in zip(self._workload.servers, self.servers, strict=True):
            described = (server, self._workload.trainer_optimizer, self._workload.seed)
            self.ask([member], "serve", *described, timeout_s=limit_s, blame=Reason.NO_SERVER)

    def _check(self, needs: Needs) -> None:
        if needs.opaque:
            raise TrialError(Reason.OPAQUE_CODE, ", ".join(needs.opaque))
        names = [server.name for server in self._workload.servers]
        missing = []
        for server, functions in needs.functions.items():
            if server and server not in names:
                missing.append(f"calls to {server!r}, which is none of the workload's servers")
                continue
            asked = self.servers if not server else [self.servers[names.index(server)]]
            for refused in self.ask(asked, "not_served", list(functions), timeout_s=self._settings.start_timeout_s):
                missing += [f"{name!r} on {server or 'any server'!r}" for name in refused]
        if missing:
            raise TrialError(Reason.NO_SERVER, ", ".join(dict.fromkeys(missing)))

    def _await(self, pending: list[Any], what: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        left = list(pending)
        while left:
            done, _ = ray.wait([*left, *self._lifelines], num_returns=1, timeout=_GLANCE_S)
            if self._interrupted():
                raise InterruptedTrialError
            for each in done:
                if each in self._lifelines:
                    raise self._death(each)
                left.remove(each)
            if left and time.monotonic() > deadline:
                raise TrialError(Reason.TRIAL_HUNG, f"{what} took more than {timeout_s:.3g} s")
        try:
            answers: list[Any] = ray.get(pending)
        except RayActorError as error:
            raise self._death(error) from error
        except RayTaskError as error:
            raise TrialError(Reason.TRIAL_DIED, shorten(f"{type(error.cause).__name__}: {error.cause}")) from error
        return answers

    def _failure(self, raised: Raised, blame: Reason) -> TrialError:
        if raised.out_of_memory:
            return TrialError(Reason.OUT_OF_MEMORY, raised.text)
        dead, _ = ray.wait(self._lifelines, num_returns=1, timeout=_AFTERMATH_S) if self._lifelines else ([], [])
        return self._death(dead[0]) if dead else TrialError(blame, raised.text)

    def _death(self, end: Any) -> TrialError:
        """Say which process died, and of what."""
        names = [server.name for server in self._workload.servers]
        who = f"server {names[self._lifelines.index(end)]!r}" if end in self._lifelines else "a trainer"
        error = end
        if not isinstance(end, Exception):
            try:
                error = ray.get(end)
            except Exception as raised:  # noqa: BLE001 - that it ended is what counts
                error = raised
        if isinstance(error, OutOfMemoryError):
            return TrialError(Reason.OUT_OF_MEMORY, who)
        return TrialError(Reason.TRIAL_DIED, f"{who} ended: {shorten(str(error))}")
