"""Ray, and the processes of one trial on it: they are placed, joined, called under a time limit, and ended."""

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
from fxlib_workers.trial.actor import ActorConfig, ServerActor
from fxlib_workers.trial.failures import CandidateError, InterruptedTrialError, TrialError, failure_reason
from fxlib_workers.trial.serving import Serving, concurrent_calls, with_undescribed_servers
from fxlib_workers.trial.trainer import EncodedProgram, Trainer

_POLL_S: Final = 0.2
"""The interval at which a waiting driver looks whether it was interrupted."""

_AFTERMATH_S: Final = 2.0
"""The time after an exception within which the death of another process may be its cause."""

_STEPS_TO_SETTLE: Final = 2
"""The steps after which `DistributedDataParallel` has its buckets in their final order."""

_OBJECT_STORE_BYTES: Final = 256 << 20
_MOST_CPUS: Final = 8
"""The most CPUs that Ray is told of: it starts an idle process for each, and a trial asks for hundredths of one."""


@contextmanager
def connected(settings: TrialSettings, folder: Path) -> Iterator[None]:
    """Connect to Ray for a block: to the operator's cluster, or to a Ray on this host that keeps its files in `folder`.

    Raises:
        ConnectionError, RuntimeError: there is no Ray at the address, or it cannot be started.
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


class ClusterRun:
    """Trainers and parameter servers, each in a process of its own. They end with the context.

    Args:
        workload: the servers, and the number of trainers.
        program: the program that the trainers run first.
        settings: the operator's settings.
        interrupted: a function that returns whether the trial is to end at once.
        profile: the profile from which remote functions that no process has are replayed; None if there are none.

    Attributes:
        servers: the actors of the parameter servers.
        trainers: the actors of the trainers.

    Raises:
        TrialError: Ray cannot place the processes, or they do not start.
        InterruptedTrialError: `interrupted` returned True.
    """

    def __init__(
        self,
        workload: Workload,
        program: EncodedProgram,
        settings: TrialSettings,
        interrupted: Callable[[], bool],
        profile: Profile | None = None,
    ) -> None:
        workload, program, undescribed = with_undescribed_servers(workload, program, profile)
        self._settings = settings
        self._interrupted = interrupted
        self._workload = workload
        self._profile = profile
        self._serving = Serving(self.ask, workload, profile, undescribed, settings.start_timeout_s)
        self._actors: list[Any] = []
        self._collective = self._reduces = False
        names = [server.name for server in workload.servers]
        names += [f"trainer{rank}" for rank in range(workload.trainers)]
        self._group = self._reserve(len(names))
        try:
            self._start(names, program)
            self._join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes, and release their placement group."""
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)

    def prepare(self) -> None:
        """Load the original into the trainers, and check that the servers can serve it.

        Raises:
            TrialError: OPAQUE_CODE, NO_SERVER, COLLECTIVES, or ORIGINAL_FAILS if it cannot be built.
        """
        limit_s = self._settings.start_timeout_s
        required = self.ask(self.trainers, "load", timeout_s=limit_s, blame=Reason.ORIGINAL_FAILS)
        self._serving.start_replay(self.servers, self.trainers, required[0])
        self._serving.check(self.servers, required[0])
        if groups := required[0].groups:
            if misfit := groups.misfit(self._workload.trainers):
                raise TrialError(Reason.COLLECTIVES, misfit, survived=True)
            if not self._collective:
                self.ask(self.trainers, "join_group", timeout_s=limit_s)
            self._collective = True
        self.ask(self.trainers, "prepare", timeout_s=limit_s, blame=Reason.NO_SERVER)
        self._reduces = bool(required[0].groups.reducing)

    def settle_buckets(self, timeout_s: float) -> None:
        """Run steps until `DistributedDataParallel` has ordered its buckets, on which the order of its sums depends.

        Raises:
            CandidateError, TrialError, InterruptedTrialError: as `ask_of` does.
        """
        if self._reduces:
            self.ask_of(ORIGINAL, self.trainers, "block", _STEPS_TO_SETTLE, timeout_s=_STEPS_TO_SETTLE * timeout_s)

    def switch_program(self, workload: Workload, program: EncodedProgram, profile: Profile | None) -> None:
        """Have the trainers run another program from now on, on the same servers; `prepare` is to be called again.

        Raises:
            TrialError: NO_SERVER, where its profile has servers that this trial has not.
        """
        joined, _, undescribed = with_undescribed_servers(workload, program, profile)
        if unknown := sorted({each.name for each in joined.servers} - {each.name for each in self._workload.servers}):
            raise TrialError(Reason.NO_SERVER, f"all that the profile calls: {', '.join(unknown)}", survived=True)
        workload = replace(workload, servers=self._workload.servers)
        message = workload_to_proto(workload).message.SerializeToString()
        limit_s = self._settings.start_timeout_s
        self._workload, self._profile = workload, profile
        self._serving = Serving(self.ask, workload, profile, undescribed, limit_s)
        self.ask(self.trainers, "switch_program", ray.put(replace(program, workload=message)), timeout_s=limit_s)

    @property
    def step_trainers(self) -> Sequence[Any]:
        """The trainers that a step needs: the first one, or all of them where the step has collectives."""
        return self.trainers if self._collective else self.trainers[:1]

    def reset(self, timeout_s: float) -> None:
        """Reset all trainers and servers to their first state.

        Raises:
            TrialError, InterruptedTrialError: as `ask` does.
        """
        for trainer in self.trainers:
            self.ask([trainer], "reset", timeout_s=timeout_s, blame=Reason.ORIGINAL_FAILS)

    def load_candidate(self, candidate: str, graph: bytes, values: Mapping[str, bytes]) -> None:
        """Load a candidate into the trainers, and check that the servers can serve it.

        Raises:
            CandidateError: it cannot be built, or it needs something that no server has.
            TrialError, InterruptedTrialError: as `ask` does.
        """
        limit_s = self._settings.start_timeout_s
        required = self.ask_of(candidate, self.trainers, "load_candidate", graph, ray.put(values), timeout_s=limit_s)
        with _blame_candidate(candidate):
            self._serving.check(self.servers, required[0])

    def ask_of(self, arm: Arm, actors: Sequence[Any], method: str, *args: object, timeout_s: float) -> list[Any]:
        """Call a method of several processes for an arm, which is its first argument and to blame for an exception.

        Raises:
            CandidateError: a candidate raised, and the processes can go on.
            TrialError, InterruptedTrialError: as `ask` does.
        """
        with _blame_candidate(arm):
            return self.ask(actors, method, arm, *args, timeout_s=timeout_s, blame=failure_reason(arm))

    def ask(
        self,
        actors: Sequence[Any],
        method: str,
        *args: object,
        timeout_s: float,
        blame: Reason = Reason.TRIAL_DIED,
    ) -> list[Any]:
        """Call a method of several processes at once and return their answers.

        Args:
            actors: the processes.
            method: the method's name.
            *args: its arguments.
            timeout_s: the time after which the call counts as hung.
            blame: the reason for which the trial ends if the method raises.

        Raises:
            TrialError: a process died, hung, or raised.
            InterruptedTrialError: the worker asked for the trial to end.
        """
        pending = [getattr(actor, method).remote(*args) for actor in actors]
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
        while not group.wait(_POLL_S):
            if self._interrupted() or time.monotonic() > deadline:
                remove_placement_group(group)
                if self._interrupted():
                    raise InterruptedTrialError
                free = ray.available_resources().get("CPU", 0.0)
                detail = f"{count} processes of {share:g} CPUs each are wanted, and {free:g} CPUs are free"
                raise TrialError(Reason.NO_CAPACITY, detail)
        return group

    def _start(self, names: Sequence[str], program: EncodedProgram) -> None:
        servers = len(self._workload.servers)
        shared = ray.put(program)
        for rank, name in enumerate(names):
            config = ActorConfig(
                name=name,
                rank=rank,
                world_size=len(names),
                interface=self._settings.interface,
                allowed_modules=self._settings.allowed_modules,
                memory_bytes=self._settings.process_memory_bytes,
                file_bytes=self._settings.process_file_bytes,
                threads=self._workload.threads if rank >= servers else 1,
                concurrent_calls=concurrent_calls(self._profile, name),
            )
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            options = {"num_cpus": self._settings.cpus_per_process, "scheduling_strategy": strategy}
            if rank < servers:
                # One thread for `wait_forever`, the others for calls of the driver.
                self._actors.append(ray.remote(ServerActor).options(max_concurrency=3, **options).remote(config))
            else:
                self._actors.append(ray.remote(Trainer).options(**options).remote(config, shared))
        self.servers, self.trainers = self._actors[:servers], self._actors[servers:]
        self._lifelines = [server.wait_forever.remote() for server in self.servers]

    def _join(self) -> None:
        limit_s = self._settings.start_timeout_s
        (address,) = self.ask(self._actors[:1], "host_store", timeout_s=limit_s)
        self.ask(self._actors, "join", address, timeout_s=limit_s)
        for server, actor in zip(self._workload.servers, self.servers, strict=True):
            described = (server, self._workload.trainer_optimizer, self._workload.seed)
            self.ask([actor], "serve", *described, timeout_s=limit_s, blame=Reason.NO_SERVER)

    def _await(self, pending: list[Any], what: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        left = list(pending)
        while left:
            done, _ = ray.wait([*left, *self._lifelines], num_returns=1, timeout=_POLL_S)
            if self._interrupted():
                raise InterruptedTrialError
            for each in done:
                if each in self._lifelines:
                    raise self._death(each)
                left.remove(each)
            if left and self._collective and (raised := _first_raised(done)):
                others, _ = ray.wait(left, num_returns=len(left), timeout=_AFTERMATH_S)
                if len(others) < len(left):
                    return [replace(raised, stranded=True)]
            if left and time.monotonic() > deadline:
                raise TrialError(Reason.TRIAL_HUNG, _timeout_detail(what, timeout_s))
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
        """Return an error that says which process died, and why."""
        names = [server.name for server in self._workload.servers]
        who = f"server {names[self._lifelines.index(end)]!r}" if end in self._lifelines else "a trainer"
        error = end
        if not isinstance(end, Exception):
            try:
                error = ray.get(end)
            except Exception as raised:  # noqa: BLE001 - any exception here says how the process ended
                error = raised
        if isinstance(error, OutOfMemoryError):
            return TrialError(Reason.OUT_OF_MEMORY, who)
        return TrialError(Reason.TRIAL_DIED, f"{who} ended: {shorten(str(error))}")


def _timeout_detail(what: str, timeout_s: float) -> str:
    if what == "join":
        return (
            f"its processes did not find each other within {timeout_s:.3g} s: see that their hosts reach one another "
            "over the network, and that they are not too busy to start, or raise start_timeout_s"
        )
    return f"{what} took more than {timeout_s:.3g} s"


def _first_raised(done: Sequence[Any]) -> Raised | None:
    """Return the first exception among the answers of finished calls."""
    answers = (ray.get(each) for each in done)
    return next((answer for answer in answers if isinstance(answer, Raised)), None)


@contextmanager
def _blame_candidate(arm: Arm) -> Iterator[None]:
    """Turn an error of a candidate's own, after which the processes can go on, into a `CandidateError`."""
    try:
        yield
    except TrialError as error:
        if arm == ORIGINAL or not error.survived:
            raise
        raise CandidateError(arm, error.reason, error.detail) from error
