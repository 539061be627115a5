"""The processes of one trial on Ray, and a watch over each call into them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fxlib.protocol import workload_to_proto
from fxlib.reasons import Reason
from fxlib.spec.profile import Profile
from fxlib.spec.workload import Workload
from fxlib_workers.config import TrialSettings
from fxlib_workers.exchange.candidate import ORIGINAL, Arm
from fxlib_workers.process.exceptions import Raised, shorten
from fxlib_workers.trial.actor import Place, ServerMember
from fxlib_workers.trial.failures import CandidateError, InterruptedTrialError, TrialError, fails
from fxlib_workers.trial.serving import Serving, calls_at_once, with_strangers
from fxlib_workers.trial.trainer import Material, Trainer

_GLANCE_S: Final = 0.2
"""How often a waiting driver looks whether it is still wanted."""

_AFTERMATH_S: Final = 2.0
"""How long after an exception a death is looked for that may have caused it."""

_STEPS_TO_SETTLE: Final = 2

_OBJECT_STORE_BYTES: Final = 256 << 20
_MOST_CPUS: Final = 8
"""Ray starts an idle process for each CPU that it is told of; a trial asks for hundredths of one."""


@contextmanager
def connected(settings: TrialSettings, folder: Path) -> Iterator[None]:
    """Be connected to Ray; a Ray of one's own keeps its files in `folder`, and ends with the block.

    Raises:
        ConnectionError, RuntimeError: there is no Ray at the address, or none can be started.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_DEDUP_LOGS"] = "0"
    if settings.ray_address:
        ray.init(address=settings.ray_address, log_to_driver=False, logging_level=logging.WARNING)
    else:
        ray.init(
            address="local",
            num_cpus=min(os.cpu_count() or 1, _MOST_CPUS),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
    try:
        yield
    finally:
        ray.shutdown()


class World:
    """Trainers and parameter servers, each in a process of its own. Leaving the context ends them.

    Args:
        workload: names the servers, and counts the trainers.
        material: what the trainers run.
        settings: the operator's.
        interrupted: whether the trial is to end at once.
        profile: what remote functions that nobody here has are replayed from; None: there must be none.

    Raises:
        TrialError: Ray cannot place them, or they do not come up.
        InterruptedTrialError: `interrupted` said so.
    """

    def __init__(
        self,
        workload: Workload,
        material: Material,
        settings: TrialSettings,
        interrupted: Callable[[], bool],
        profile: Profile | None = None,
    ) -> None:
        workload, material, strangers = with_strangers(workload, material, profile)
        self._settings = settings
        self._interrupted = interrupted
        self._workload = workload
        self._profile = profile
        self._serving = Serving(self.ask, workload, profile, strangers, settings.start_timeout_s)
        self._members: list[Any] = []
        self._in_step = self._reduces = False
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
        """Load the original into the trainers, and check that the servers can serve it.

        Raises:
            TrialError: OPAQUE_CODE, NO_SERVER, COLLECTIVES, or ORIGINAL_FAILS if it cannot be built.
        """
        limit_s = self._settings.start_timeout_s
        needs = self.ask(self.trainers, "load", timeout_s=limit_s, blame=Reason.ORIGINAL_FAILS)
        self._serving.stage(self.servers, self.trainers, needs[0])
        self._serving.check(self.servers, needs[0])
        if groups := needs[0].groups:
            if misfit := groups.misfit(self._workload.trainers):
                raise TrialError(Reason.COLLECTIVES, misfit, survived=True)
            if not self._in_step:
                self.ask(self.trainers, "gather", timeout_s=limit_s)
            self._in_step = True
        self.ask(self.trainers, "prepare", timeout_s=limit_s, blame=Reason.NO_SERVER)
        self._reduces = bool(needs[0].groups.reducing)

    def settle(self, timeout_s: float) -> None:
        """Let `DistributedDataParallel` order its buckets, which it does at its second step, and sums with them.

        Raises:
            CandidateError, TrialError, InterruptedTrialError: as `ask_of` does.
        """
        if self._reduces:
            self.ask_of(ORIGINAL, self.trainers, "block", _STEPS_TO_SETTLE, timeout_s=_STEPS_TO_SETTLE * timeout_s)

    def turn_to(self, workload: Workload, material: Material, profile: Profile | None) -> None:
        """Have the trainers run another program from now on, on the same servers; it is to be prepared as the first.

        Raises:
            TrialError: NO_SERVER, where the servers that its profile knows are none of this world.
        """
        joined, _, strangers = with_strangers(workload, material, profile)
        if unknown := sorted({each.name for each in joined.servers} - {each.name for each in self._workload.servers}):
            raise TrialError(Reason.NO_SERVER, f"all that the profile calls: {', '.join(unknown)}", survived=True)
        workload = replace(workload, servers=self._workload.servers)
        message = workload_to_proto(workload).message.SerializeToString()
        limit_s = self._settings.start_timeout_s
        self._workload, self._profile = workload, profile
        self._serving = Serving(self.ask, workload, profile, strangers, limit_s)
        self.ask(self.trainers, "turn_to", ray.put(replace(material, workload=message)), timeout_s=limit_s)

    @property
    def witnesses(self) -> Sequence[Any]:
        """Trainers that run what one could run alone: the first; or all, where collectives keep them in step."""
        return self.trainers if self._in_step else self.trainers[:1]

    def reset(self, timeout_s: float) -> None:
        """Bring all trainers and servers back to where they began.

        Raises:
            TrialError, InterruptedTrialError: as `ask` does.
        """
        for trainer in self.trainers:
            self.ask([trainer], "reset", timeout_s=timeout_s, blame=Reason.ORIGINAL_FAILS)

    def admit(self, candidate: Arm, graph: bytes, values: Mapping[str, bytes]) -> None:
        """Load a candidate into the trainers, and check that the servers can serve it.

        Raises:
            CandidateError: it cannot be built, or it needs what is not there.
            TrialError, InterruptedTrialError: as `ask` does.
        """
        limit_s = self._settings.start_timeout_s
        needs = self.ask_of(candidate, self.trainers, "admit", graph, ray.put(values), timeout_s=limit_s)
        with _own_failures(candidate):
            self._serving.check(self.servers, needs[0])

    def ask_of(self, arm: Arm, members: Sequence[Any], method: str, *args: object, timeout_s: float) -> list[Any]:
        """Call a method that takes an arm first, whose fault an exception is.

        Raises:
            CandidateError: a candidate raised, and the processes can go on.
            TrialError, InterruptedTrialError: as `ask` does.
        """
        with _own_failures(arm):
            return self.ask(members, method, arm, *args, timeout_s=timeout_s, blame=fails(arm))

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
        what = " of ".join([method, *(repr(each) for each in args[:1] if isinstance(each, str))])
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
                file_bytes=self._settings.process_file_bytes,
                threads=self._workload.threads if rank >= servers else 1,
                calls_at_once=calls_at_once(self._profile, name),
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
            if left and self._in_step and (raised := _first_raised(done)):
                late, _ = ray.wait(left, num_returns=len(left), timeout=_AFTERMATH_S)
                if len(late) < len(left):
                    return [replace(raised, stranded=True)]
            if left and time.monotonic() > deadline:
                raise TrialError(Reason.TRIAL_HUNG, _late(what, timeout_s))
        try:
            answers: list[Any] = ray.get(pending)
        except RayActorError as error:
            raise self._death(error) from error
        except RayTaskError as error:
            raise TrialError(Reason.TRIAL_DIED, shorten(f"{type(error.cause).__name__}: {error.cause}")) from error
        return answers

    def _failure(self, raised: Raised, blame: Reason) -> TrialError:
        if raised.out_of_memory:
            return TrialError(Reason.OUT_OF_MEMORY, raised.text, survived=True)
        dead, _ = ray.wait(self._lifelines, num_returns=1, timeout=_AFTERMATH_S) if self._lifelines else ([], [])
        return self._death(dead[0]) if dead else TrialError(blame, raised.text, survived=not raised.stranded)

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


def _late(what: str, timeout_s: float) -> str:
    if what == "join":
        return (
            f"its processes did not find each other within {timeout_s:.3g} s: see that their hosts reach one another "
            "over the network, and that they are not too busy to start, or raise start_timeout_s"
        )
    return f"{what} took more than {timeout_s:.3g} s"


def _first_raised(done: Sequence[Any]) -> Raised | None:
    """Return the first exception among answers that are there."""
    answers = (ray.get(each) for each in done)
    return next((answer for answer in answers if isinstance(answer, Raised)), None)


@contextmanager
def _own_failures(arm: Arm) -> Iterator[None]:
    """Tell what a candidate does wrong from what ends a trial."""
    try:
        yield
    except TrialError as error:
        if arm == ORIGINAL or not error.survived:
            raise
        raise CandidateError(arm, error.reason, error.detail) from error
