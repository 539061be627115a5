"""The processes of one trial, which are placed by Ray, joined, called under a time limit, and ended."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from fxlib.protocol import workload_to_proto
from fxlib.reasons import Reason
from fxlib.spec.profile import Profile
from fxlib.spec.workload import Workload
from fxlib_workers.config import LOOPBACK
from fxlib_workers.exchange import ORIGINAL, REALIGNED, Arm
from fxlib_workers.process.exceptions import Raised, shorten
from fxlib_workers.trial.answers import MalformedAnswerError, ProcessFailureError, read_answer
from fxlib_workers.trial.failures import (
    CandidateError,
    InterruptedTrialError,
    LostCandidateError,
    TrialError,
    came_from_outside,
    failure_reason,
)
from fxlib_workers.trial.frames import MAKE
from fxlib_workers.trial.host import Ended
from fxlib_workers.trial.nodes import Nodes
from fxlib_workers.trial.serving import Serving, with_undescribed_servers
from fxlib_workers.trial.trainer import EncodedProgram
from fxlib_workers.trial.trial_process import ProcessConfig

_POLL_S: Final = 0.2
"""The interval in seconds at which a waiting driver checks whether it was interrupted."""

_AFTERMATH_S: Final = 2.0
"""The time in seconds after an exception within which the death of another process may be its cause."""

_STEPS_TO_SETTLE: Final = 2
"""The number of steps after which `DistributedDataParallel` has its buckets in their final order."""

_SHARED_BYTES: Final = 1 << 20
"""Size in bytes from which a call to several processes goes through Ray's object store instead of once to each."""

_END_S: Final = 10.0
"""The time in seconds that a host has to kill processes, after which it is killed itself."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a trial, forked by the host on its node.

    Attributes:
        name: its name in `torch.distributed.rpc`.
        key: the key by which its host knows it.
        node: Ray's id of the node.
        host: the Ray actor there.
    """

    name: str
    key: str
    node: str
    host: Any


class ClusterRun:
    """Trainers and parameter servers, each in its own process. They end with the context.

    Args:
        nodes: the nodes of Ray on which they run.
        workload: the servers, and the number of trainers.
        program: the program that the trainers run first.
        interrupted: a function that returns whether the trial has to end at once.
        profile: the profile from which remote functions that no process has are replayed; None if there is none.

    Attributes:
        servers: the parameter servers.
        trainers: the trainers.

    Raises:
        TrialError: Ray cannot place the processes, or they do not start.
        InterruptedTrialError: `interrupted` returned True.
    """

    def __init__(
        self,
        nodes: Nodes,
        workload: Workload,
        program: EncodedProgram,
        interrupted: Callable[[], bool],
        profile: Profile | None = None,
    ) -> None:
        workload, program, undescribed = with_undescribed_servers(workload, program, profile)
        self._nodes = nodes
        self._settings = nodes.settings
        self._interrupted = interrupted
        self._workload = workload
        self._serving = Serving(self.ask, workload, profile, undescribed, nodes.settings.start_timeout_s)
        self._processes: list[Process] = []
        self._lifelines: dict[Any, Process] = {}
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
        """Kill the processes and release their placement group."""
        ending = {
            node: processes[0].host.end.remote([each.key for each in processes])
            for node, processes in self._by_node().items()
        }
        done, _ = ray.wait(list(ending.values()), num_returns=len(ending), timeout=_END_S) if ending else ([], [])
        for node, end in ending.items():
            if end not in done or not _succeeded(end):
                self._nodes.forget(node)
        remove_placement_group(self._group)

    def prepare(self) -> None:
        """Load the original into the trainers and check that the servers can serve it.

        Raises:
            TrialError: OPAQUE_CODE, NO_SERVER, COLLECTIVES, or ORIGINAL_FAILS if it cannot be built.
        """
        limit_s = self._settings.start_timeout_s
        required = self.ask(self.trainers, "load", timeout_s=limit_s, reason=Reason.ORIGINAL_FAILS)
        self._serving.start_replay(self.servers, self.trainers, required[0])
        self._serving.check(self.servers, required[0])
        if groups := required[0].groups:
            if misfit := groups.misfit(self._workload.trainers):
                raise TrialError(Reason.COLLECTIVES, misfit, survived=True)
            if not self._collective:
                self.ask(self.trainers, "join_group", timeout_s=limit_s)
            self._collective = True
        self.ask(self.trainers, "prepare", timeout_s=limit_s, reason=Reason.NO_SERVER)
        self._reduces = bool(required[0].groups.reducing)

    def settle_buckets(self, timeout_s: float) -> None:
        """Run steps until `DistributedDataParallel` has ordered its buckets, which determine the order of its sums.

        Raises:
            CandidateError, TrialError, InterruptedTrialError: as for `ask_of`.
        """
        if self._reduces:
            self.ask_of(ORIGINAL, self.trainers, "block", 0, _STEPS_TO_SETTLE, timeout_s=_STEPS_TO_SETTLE * timeout_s)

    def switch_program(self, workload: Workload, program: EncodedProgram, profile: Profile | None) -> None:
        """Switch the trainers to another program on the same servers; `prepare` has to be called again.

        Raises:
            TrialError: NO_SERVER if its profile has servers that this trial lacks.
        """
        joined, _, undescribed = with_undescribed_servers(workload, program, profile)
        if unknown := sorted({each.name for each in joined.servers} - {each.name for each in self._workload.servers}):
            raise TrialError(Reason.NO_SERVER, f"all that the profile calls: {', '.join(unknown)}", survived=True)
        workload = replace(workload, servers=self._workload.servers)
        message = workload_to_proto(workload).message.SerializeToString()
        limit_s = self._settings.start_timeout_s
        self._workload = workload
        self._serving = Serving(self.ask, workload, profile, undescribed, limit_s)
        self.ask(self.trainers, "switch_program", replace(program, workload=message), timeout_s=limit_s)

    @property
    def step_trainers(self) -> Sequence[Process]:
        """The trainers that a step needs: the first one, or all of them if the step has collectives."""
        return self.trainers if self._collective else self.trainers[:1]

    def reset(self, timeout_s: float) -> None:
        """Reset all trainers and servers to their first state.

        Raises:
            TrialError, InterruptedTrialError: as `ask` does.
        """
        for trainer in self.trainers:
            self.ask([trainer], "reset", timeout_s=timeout_s, reason=Reason.ORIGINAL_FAILS)

    def settle_inputs(self, timeout_s: float) -> None:
        """Let all trainers know whether the model writes its inputs, as found in the steps that some have compared.

        Raises:
            TrialError, InterruptedTrialError: as `ask` does.
        """
        is_written = any(self.ask(self.step_trainers, "writes_inputs", timeout_s=timeout_s))
        self.ask(self.trainers, "note_inputs", is_written, timeout_s=timeout_s)

    def load_candidate(
        self, candidate: str, graph: bytes, values: Mapping[str, bytes], pipeline: int = 0, stale: int = 0
    ) -> None:
        """Load a candidate into the trainers and check that the servers can serve it.

        Args:
            candidate: its name.
            graph: the graph, serialized.
            values: the tensors that it holds in addition to the original's, by SHA-256.
            pipeline: the depth of the pipeline under which it runs; 0 for none.
            stale: the number of steps whose pushes a read may miss in it.

        Raises:
            CandidateError: it cannot be built, or needs something that no server has.
            LostCandidateError: a process died or hung in the meantime.
            TrialError, InterruptedTrialError: as `ask` does.
        """
        limit_s = self._settings.start_timeout_s
        given = graph, values, pipeline, stale
        required = self.ask_of(candidate, self.trainers, "load_candidate", *given, timeout_s=limit_s)
        with _attributed_to(candidate):
            self._serving.check(self.servers, required[0])

    def ask_of(self, arm: Arm, processes: Sequence[Process], method: str, *args: object, timeout_s: float) -> list[Any]:
        """Call a method of several processes for an arm, which is the first argument, and at fault for an exception.

        Raises:
            CandidateError: a candidate raised, and the processes can continue.
            LostCandidateError: a process died or hung while a candidate ran.
            TrialError, InterruptedTrialError: as `ask` does.
        """
        with _attributed_to(arm):
            return self.ask(processes, method, arm, *args, timeout_s=timeout_s, reason=failure_reason(arm))

    def ask(
        self,
        processes: Sequence[Process],
        method: str,
        *args: object,
        timeout_s: float,
        reason: Reason = Reason.TRIAL_DIED,
    ) -> list[Any]:
        """Call a method of several processes at once and return their answers.

        Args:
            processes: the processes.
            method: the method's name.
            *args: its arguments.
            timeout_s: the time after which the call counts as hung.
            reason: the reason for which the trial ends if the method raises.

        Raises:
            TrialError: a process died, hung, or raised.
            InterruptedTrialError: the worker asked for the trial to end.
        """
        call = pickle.dumps((method, args))
        sent = ray.put(call) if len(processes) > 1 and len(call) > _SHARED_BYTES else call
        what = " of ".join([method, *(repr(each) for each in args[:1] if isinstance(each, str))])
        return self._call([(each, sent) for each in processes], method, timeout_s=timeout_s, what=what, reason=reason)

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
        bundles = placement_group_table(self._group)["bundles_to_node_id"]
        self._trial = uuid.uuid4().hex
        for rank, name in enumerate(names):
            host = self._nodes.host(bundles[rank])
            self._processes.append(Process(name=name, key=f"{self._trial}/{rank}", node=bundles[rank], host=host))
        servers, limit_s = len(self._workload.servers), self._settings.start_timeout_s
        self.servers, self.trainers = self._processes[:servers], self._processes[servers:]
        self._fork()
        self._lifelines = {each.host.end_of.remote(each.key): each for each in self.servers}
        calls = []
        for rank, process in enumerate(self._processes):
            config = ProcessConfig(
                name=process.name,
                rank=rank,
                world_size=len(names),
                interface=self._settings.interface,
                allowed_modules=self._settings.allowed_modules,
                memory_bytes=self._settings.process_memory_bytes,
                file_bytes=self._settings.process_file_bytes,
                threads=self._workload.threads if rank >= servers else 1,
                concurrent_calls=self._serving.concurrent_calls(process.name),
            )
            role = "trainer" if rank >= servers else "server"
            calls.append((process, pickle.dumps((MAKE, (role, config)))))
        self._call(calls, MAKE, timeout_s=limit_s)
        self.ask(self.trainers, "switch_program", program, timeout_s=limit_s)

    def _fork(self) -> None:
        limit_s = self._settings.start_timeout_s
        deadline = time.monotonic() + limit_s
        # On loopback, a trial has a network of its own; processes on several hosts communicate over the hosts' network.
        network = self._trial if self._settings.interface == LOOPBACK else ""
        memory_bytes = self._settings.host_memory_bytes
        pending = {
            processes[0].host.fork.remote({each.key: each.name for each in processes}, network, memory_bytes): node
            for node, processes in self._by_node().items()
        }
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_S)
            for each in done:
                node = pending.pop(each)
                try:
                    ray.get(each)
                except RayError as error:
                    self._nodes.forget(node)
                    raise TrialError(Reason.TRIAL_DIED, f"no process can be started: {_in_words(error)}") from error
            if pending:
                self._check_on(deadline, "fork", limit_s)

    def _by_node(self) -> Mapping[str, Sequence[Process]]:
        found: dict[str, list[Process]] = {}
        for each in self._processes:
            found.setdefault(each.node, []).append(each)
        return found

    def _join(self) -> None:
        limit_s = self._settings.start_timeout_s
        (address,) = self.ask(self._processes[:1], "host_store", timeout_s=limit_s)
        self.ask(self._processes, "join", address, timeout_s=limit_s)
        for server, process in zip(self._workload.servers, self.servers, strict=True):
            described = (server, self._workload.trainer_optimizer, self._workload.seed)
            self.ask([process], "serve", *described, timeout_s=limit_s, reason=Reason.NO_SERVER)

    def _call(
        self,
        calls: Sequence[tuple[Process, Any]],
        method: str,
        *,
        timeout_s: float,
        what: str = MAKE,
        reason: Reason = Reason.TRIAL_DIED,
    ) -> list[Any]:
        """Send each process a call of one method and return the answers in the same order."""
        pending = {process.host.ask.remote(process.key, call): process for process, call in calls}
        found = self._await(pending, method, what, timeout_s)
        answers = [found[process.key] for process, _ in calls]
        for answer in answers:
            if isinstance(answer, Raised):
                raise self._failure(answer, reason)
        return answers

    def _await(self, pending: Mapping[Any, Process], method: str, what: str, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        left, answers = dict(pending), dict[str, Any]()
        while left:
            done, _ = ray.wait([*left, *self._lifelines], num_returns=1, timeout=_POLL_S)
            for each in done:
                if each in self._lifelines:
                    raise self._death(each, self._lifelines[each])
                process = left.pop(each)
                answers[process.key] = answer = self._answer(each, process, method)
                if left and self._collective and isinstance(answer, Raised):
                    others, _ = ray.wait(list(left), num_returns=len(left), timeout=_AFTERMATH_S)
                    if len(others) < len(left):
                        raised = replace(answer, stranded=True)
                        return answers | dict.fromkeys([each.key for each in pending.values()], raised)
            if left:
                self._check_on(deadline, what, timeout_s)
        return answers

    def _check_on(self, deadline: float, what: str, timeout_s: float) -> None:
        if self._interrupted():
            raise InterruptedTrialError
        if time.monotonic() > deadline:
            raise TrialError(Reason.TRIAL_HUNG, _timeout_detail(what, timeout_s))

    def _answer(self, call: Any, process: Process, method: str) -> object:
        """Return a process's answer to a finished call."""
        try:
            message = ray.get(call)
        except RayError as error:
            raise self._death(error, process) from error
        if isinstance(message, Ended):
            raise self._death(message, process)
        try:
            return read_answer(method, message)
        except ProcessFailureError as error:
            raise TrialError(Reason.TRIAL_DIED, str(error)) from error
        except MalformedAnswerError as error:
            detail = f"{process.name} sent a malformed answer to {method}: {error}"
            raise TrialError(Reason.TRIAL_DIED, detail) from error

    def _failure(self, raised: Raised, reason: Reason) -> TrialError:
        if error := self._out_of_memory():
            return error
        if raised.out_of_memory:
            return TrialError(Reason.OUT_OF_MEMORY, raised.text, survived=not raised.stranded)
        lifelines = list(self._lifelines)
        dead, _ = ray.wait(lifelines, num_returns=1, timeout=_AFTERMATH_S) if lifelines else ([], [])
        if dead:
            return self._death(dead[0], self._lifelines[dead[0]])
        return TrialError(reason, raised.text, survived=not raised.stranded)

    def _death(self, end: Any, process: Process) -> TrialError:
        """Return an error that says which process died and why."""
        if error := self._out_of_memory():
            return error
        who = f"server {process.name!r}" if process in self.servers else f"trainer {process.name!r}"
        if not isinstance(end, (Ended, RayError)):
            try:
                end = ray.get(end)
            except RayError as error:
                end = error
        if isinstance(end, OutOfMemoryError):
            return TrialError(Reason.OUT_OF_MEMORY, who)
        return TrialError(Reason.TRIAL_DIED, f"{who} ended: {end.how if isinstance(end, Ended) else _in_words(end)}")

    def _out_of_memory(self) -> TrialError | None:
        """Return an error if the trial's processes together wanted more memory than a host has for them.

        In that case it means nothing which process is seen to end first: the kernel chooses one, and the others fail
        without it.
        """
        asked = [processes[0].host.ran_out.remote(processes[0].key) for processes in self._by_node().values()]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_AFTERMATH_S)
        for each in answered:
            with suppress(RayError):  # nothing is known of a node that is gone
                if why := ray.get(each):
                    return TrialError(Reason.OUT_OF_MEMORY, why)
        return None


def _in_words(error: RayError) -> str:
    return shorten(str(error.cause if isinstance(error, RayTaskError) else error))


def _succeeded(call: Any) -> bool:
    try:
        ray.get(call)
    except RayError:
        return False
    return True


def _timeout_detail(what: str, timeout_s: float) -> str:
    if what == "join":
        return (
            f"its processes did not find each other within {timeout_s:.3g} s: see that their hosts reach one another "
            "over the network, and that they are not too busy to start, or raise start_timeout_s"
        )
    return f"{what} took more than {timeout_s:.3g} s"


@contextmanager
def _attributed_to(arm: Arm) -> Iterator[None]:
    """Turn a candidate's own error into a `CandidateError`, or a `LostCandidateError` if no process can continue."""
    try:
        yield
    except TrialError as error:
        if arm == ORIGINAL:
            raise
        if error.survived:
            raise CandidateError(arm, error.reason, error.detail) from error
        if arm == REALIGNED or came_from_outside(error.reason, str(error)):
            raise
        raise LostCandidateError(arm, error) from error
