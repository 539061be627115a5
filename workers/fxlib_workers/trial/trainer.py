"""The trainer of a trial, which loads the original and the candidates and runs their steps.

Trainers form a process group, over which the job's collectives and gradients run. They measure the cost of the trial's
own network, so that replay adds only the rest, and, for a candidate that does not promise the same bits, how far its
results are from the original's.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, cast

import torch
from torch import distributed, nn
from torch.distributed import rpc
from torch.fx import GraphModule

from fxlib import batch, wire
from fxlib.pipeline import Pipeline, pipeline
from fxlib.pipeline.choice import InTurn, MeasuredChoice
from fxlib.pipeline.module_ahead import ahead_of
from fxlib.profiling.measure import measure
from fxlib.profiling.single_call import arrival
from fxlib.profiling.step_runs import STEPS
from fxlib.protocol import workload_from_proto
from fxlib.runtime import CapturedModule
from fxlib.runtime.data_parallel import DataParallel, parallel_modules
from fxlib.runtime.ops.timeline import record
from fxlib.runtime.submodules import local_modules
from fxlib.spec.inputs import samples_in
from fxlib.spec.profile import Profile
from fxlib.spec.report import CompiledPart, Timeline
from fxlib.spec.workload import Batch
from fxlib.utils.compare import relative_error
from fxlib.utils.hardware import instructions
from fxlib.utils.pytree import tensors_in
from fxlib.v1 import workload_pb2
from fxlib_workers.exchange import ORIGINAL, REALIGNED, Arm
from fxlib_workers.process.exceptions import returns_exceptions
from fxlib_workers.trial import server_state
from fxlib_workers.trial.alignment import realigned
from fxlib_workers.trial.compiled_parts import leave_parts, time_parts
from fxlib_workers.trial.digests import ModuleSnapshot, digest, results
from fxlib_workers.trial.replay import server as replay_server
from fxlib_workers.trial.replay.latency_model import NetworkCost
from fxlib_workers.trial.replay.named_calls import as_captured, make_remote_calls, stand_in
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan
from fxlib_workers.trial.requirements import BoundModule, Requirements, bind, requirements_of
from fxlib_workers.trial.step import Step, StepResult, copy_of, drain, optimizer_of
from fxlib_workers.trial.trial_process import TrialProcess

_CALLS: Final = 15
_SLEEP_S: Final = 1e-3
"""The time in seconds that each call sleeps, since waking up delays it as it delays replayed calls."""

_ITEMS: Final = 12
"""The number of calls in a batch, which is less than a server works on at once."""

_WORTH_BYTES: Final = 1 << 16
"""Size in bytes below which a call costs as much as an empty one."""

_MOST_BYTES: Final = 1 << 24
"""Size in bytes of the largest message that is measured."""
MOST_LEAD: Final = 4
"""The largest number of steps of a loop that are recorded before the shown ones, whose reads they make."""

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")

StepDigests = Mapping[str, str]
"""Digests of everything that a step left behind, by name."""


class ToleranceCheck:
    """Keeps the original's values after each step, and compares the values of other arms with them.

    Values with equal bits are kept once, however many steps have them.
    """

    def __init__(self) -> None:
        self._digests: dict[int, Mapping[str, str]] = {}
        self._values: dict[str, object] = {}
        self._errors: dict[Arm, dict[str, float]] = {}

    def keep(self, step: int, values: Mapping[str, object], digests: Mapping[str, str]) -> None:
        """Keep the original's values after a step, unless an earlier run has provided them."""
        if step in self._digests:
            return
        self._digests[step] = {name: digests[name] for name in values}
        for name, value in values.items():
            if digests[name] not in self._values:
                self._values[digests[name]] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def compare(self, arm: Arm, step: int, values: Mapping[str, object]) -> None:
        """Record how far an arm's values after a step are from the original's."""
        errors, reference = self._errors.setdefault(arm, {}), self._digests[step]
        for name in values.keys() | reference.keys():
            both = name in values and name in reference
            error = relative_error(values[name], self._values[reference[name]]) if both else math.inf
            errors[name] = max(error, errors.get(name, 0.0))

    def errors(self, arm: Arm) -> Mapping[str, float]:
        """Return the largest relative error so far of each value of an arm, by name."""
        return self._errors.get(arm, {})


def _join(store: distributed.Store, rank: int, size: int) -> None:
    """Join the group of all ranks over TCP on the trial's interface; return when all of them have joined."""
    distributed.init_process_group("gloo", store=distributed.PrefixStore("trainers", store), rank=rank, world_size=size)


def _wrap_data_parallel(module: nn.Module) -> None:
    """Replace each placeholder in a module by `DistributedDataParallel` over the group of all ranks."""
    for path, parallel in list(parallel_modules(module)):
        if isinstance(parallel, DataParallel):
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent)._modules[name] = parallel.join()


def _barrier() -> None:
    """Wait for all ranks; return at once if there is no group."""
    if distributed.is_initialized():
        distributed.barrier()


def _all_reduce_min(count: int) -> int:
    """Return the smallest number of all ranks, or this process's own if there is no group."""
    if not distributed.is_initialized():
        return count
    least = torch.tensor(count)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return int(least)


def _calibrate(plan: ReplayPlan, servers: Iterable[str]) -> None:
    """Measure calls from this process to each server, with nothing else in flight, and send the server the result."""
    recorded = [call for calls in plan.calls.values() for call in calls.values()]
    for name in servers:
        cost = _network_cost(name, [call for call in recorded if call.to in ("", name)])
        rpc.rpc_sync(name, replay_server.set_network_cost, (cost,))


def _network_cost(server: str, recorded: list[RecordedCall]) -> NetworkCost:
    call_s, item_s = _trip_s(server, 0, 0), _item_s(server)
    request = min(_MOST_BYTES, max((call.request_bytes for call in recorded), default=0))
    response = min(_MOST_BYTES, max((call.response_bytes for call in recorded), default=0))
    if request + response < _WORTH_BYTES:
        return NetworkCost(call_s=call_s, item_s=item_s)
    loaded_s = _trip_s(server, request, response)
    return NetworkCost(call_s=call_s, byte_s=max(0.0, loaded_s - call_s) / (request + response), item_s=item_s)


def _trip_s(server: str, request_bytes: int, response_bytes: int) -> float:
    """Return the median seconds from the end of an issue to the arrival of the answer, without the sleep."""
    sent = torch.zeros(request_bytes, dtype=torch.uint8)
    trips = []
    for _ in range(_CALLS):
        future = rpc.rpc_async(server, replay_server.echo, (sent, response_bytes, _SLEEP_S))
        issued = time.perf_counter()
        arrived = arrival(future)
        assert arrived is not None  # noqa: S101 - `arrival` waits for the future
        trips.append(arrived - issued - _SLEEP_S)
    return max(0.0, median(trips))


def _item_s(server: str) -> float:
    """Return the seconds that each further call adds to a batch whose calls only sleep concurrently."""

    def trip_s(count: int) -> float:
        # Each call has its own tensor, since a tensor that several share would travel only once.
        calls: list[batch.Call] = [
            (replay_server.echo, (torch.zeros(1, dtype=torch.uint8), 1, _SLEEP_S), {}) for _ in range(count)
        ]
        begun = time.perf_counter()
        rpc.rpc_sync(server, batch.run, (calls,))
        return time.perf_counter() - begun

    trip_s(_ITEMS)  # from the first batch, the server learns how long such a call takes
    one_s, all_s = (median(trip_s(count) for _ in range(_CALLS)) for count in (1, _ITEMS))
    return max(0.0, (all_s - one_s) / (_ITEMS - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedProgram:
    """A program of the job, in the form in which it travels to the trainers.

    Attributes:
        original: the graph, serialized.
        workload: the workload's message, serialized.
        blobs: the blobs that the graph and the workload name, by SHA-256.
    """

    original: bytes
    workload: bytes
    blobs: Mapping[str, bytes]


class Trainer(TrialProcess):
    """One trainer process. Methods that run the user's code return `Raised` instead of raising."""

    def switch_program(self, program: EncodedProgram) -> None:
        """Forget the loaded program, if there is one, so that another one can be loaded."""
        self._program = program
        self._plan = ReplayPlan(calls={})
        self._tolerance = ToleranceCheck()
        self._measured_s = self._delayed_s = 0.0

    @returns_exceptions
    def load(self) -> Requirements:
        """Build the original, and return its requirements on the trial's servers."""
        program = self._program
        message = workload_pb2.Workload.FromString(program.workload)
        self._workload = workload_from_proto(message, program.blobs)
        self._batches = self._workload.drawn_batches
        self._writes_inputs: bool | None = None
        """Whether the model writes its inputs; None while that is unknown."""
        original = wire.decode(wire.parse(program.original), blobs=program.blobs, seed=self._workload.seed)
        self._clients = wire.client_functions(original)
        make_remote_calls([original])
        self._modules: dict[Arm, GraphModule] = {ORIGINAL: original}
        self._depths: dict[Arm, int] = {}
        self._stale: dict[Arm, int] = {}
        self._loops: dict[Arm, Generator[Batch, None, None]] = {}
        self._pipelines: dict[Arm, Pipeline[Batch]] = {}
        """The pipeline of each loop."""
        self._staleness: dict[Arm, Counter[int]] = {}
        self._snapshot = ModuleSnapshot(original)
        return requirements_of([original], self._workload)

    def replay(self, plan: ReplayPlan) -> None:
        """Direct replayed calls to stand-ins in each graph that is loaded from now on."""
        self._plan = plan

    @returns_exceptions
    def join_group(self) -> None:
        """Become one of the ranks that run collectives."""
        rank = self._config.rank - len(self._workload.servers)
        _join(self._store(), rank, self._workload.trainers)
        _wrap_data_parallel(self._modules[ORIGINAL])

    @returns_exceptions
    def calibrate(self, servers: list[str]) -> None:
        """Measure the cost of the trial's own network for calls of this process; send it to the replaying servers."""
        _calibrate(self._plan, servers)

    @returns_exceptions
    def prepare(self) -> None:
        """Make the servers create the objects behind RRefs, and prepare steps of the original."""
        self._rrefs = {
            name: rpc.remote(described.owner, server_state.create, (name, described))
            for name, described in self._workload.rrefs.items()
        }
        for rref in self._rrefs.values():
            # A call that first has to ask for the type would be issued from another thread.
            rref._get_type(blocking=False).wait()
        stand_in(self._modules[ORIGINAL], self._plan)
        self._bound: dict[Arm, BoundModule] = {ORIGINAL: bind(self._modules[ORIGINAL], self._rrefs)}
        self._renew_steps()

    @returns_exceptions
    def load_candidate(
        self, name: str, graph: bytes, values: Mapping[str, bytes], pipeline: int, stale: int
    ) -> Requirements:
        """Build a candidate on the original's parameters, and return its requirements on the trial's servers.

        Args:
            name: its name.
            graph: the graph, serialized.
            values: the tensors that it holds in addition to the original's, by SHA-256.
            pipeline: the depth of the pipeline under which its loop runs; 0 for none.
            stale: the number of steps whose pushes a read may miss in it.
        """
        root = self._modules[ORIGINAL]
        candidate = wire.decode(wire.parse(graph), blobs=values, root=root, functions=self._clients)
        make_remote_calls([candidate])
        required = requirements_of([candidate], self._workload)
        stand_in(candidate, self._plan)
        self._modules[name] = candidate
        self._depths[name] = pipeline
        self._stale[name] = stale
        self._bound[name] = bind(candidate, self._rrefs)
        self._renew_steps()
        return required

    @returns_exceptions
    def time_parts(self, arm: Arm, limit_s: float) -> list[CompiledPart]:
        """Compile the parts of a candidate that are for a backend within a time limit; return which are faster."""
        return time_parts(self._modules[arm], lambda: self._digest_step(arm, 0), limit_s=limit_s)

    @returns_exceptions
    def leave_parts(self, arm: Arm, first: Sequence[str]) -> None:
        """Run parts of a candidate uncompiled, given the names of their first nodes."""
        leave_parts(self._modules[arm], first)

    def writes_inputs(self) -> bool:
        """Return whether the model has written its inputs in a step whose values were digested, or in none yet."""
        return self._writes_inputs is not False

    def note_inputs(self, is_written: bool) -> None:
        """Take from other trainers whether the model writes its inputs, which are copied for each step then."""
        self._writes_inputs = is_written

    def samples(self) -> list[int]:
        """Return the number of samples in each batch."""
        return [samples_in(each) for each in self._batches]

    @returns_exceptions
    def reset(self) -> None:
        """Reset parameters, buffers, optimizers, random generators and all servers to their first state."""
        self._end_loops()
        for arm in self._modules.values():
            for _, each in local_modules(arm):
                if isinstance(each, CapturedModule):
                    each._fxlib.tape.drop()  # or the first push would send gradients of steps before the reset, too
        drain()
        for server in self._workload.servers:
            rpc.rpc_sync(server.name, server_state.reset)
        self._snapshot.restore()
        torch.manual_seed(self._workload.seed)
        self._renew_steps()

    @returns_exceptions
    def profile(self, seconds: float) -> Profile:
        """Measure steps of the original for about `seconds`, and then its servers for not much longer.

        Afterwards, parameters and servers are as training steps leave them.
        """
        self._digest_step(ORIGINAL, 0)  # warms up and finds out whether the model writes its inputs
        inputs = itertools.count()

        def step() -> None:
            self._steps[ORIGINAL](self._input(next(inputs)))

        start = time.perf_counter()
        step()
        steps = _all_reduce_min(max(1, min(STEPS, int(seconds / (time.perf_counter() - start)))))
        found = measure(
            self._bound[ORIGINAL].module,
            step,
            steps=steps,
            warmups=min(1, steps - 1),
            contracts=self._workload.contracts,
            probing_s=seconds if self._is_first else 0.0,  # one trainer at a time probes a server
            recorded=self._workload.mode == "distributed",
        )
        drain()
        return found

    @returns_exceptions
    def digest_step(self, arm: Arm, index: int, numeric: bool = False) -> StepDigests:
        """Run one step on batch `index`, and return the digests of everything that it left behind.

        With `numeric`, the original's values are kept, and the values of other arms are compared with them.
        """
        return self._digest_step(arm, index, numeric=numeric)

    @returns_exceptions
    def errors(self, arm: Arm) -> Mapping[str, float]:
        """Return the largest relative error of an arm's values, by name."""
        return self._tolerance.errors(arm)

    def _digest_step(self, arm: Arm, index: int, *, numeric: bool = False) -> StepDigests:
        if self._depths.get(arm):
            batch = self._pulled(arm, InTurn, index)
        else:
            batch = copy_of(self._batches[index % len(self._batches)])
        before = {name: digest(value) for name, value in batch.named.items()}
        if arm == REALIGNED:
            moved = [*ModuleSnapshot(self._modules[ORIGINAL]).named().values(), *tensors_in(batch.named)]
            with realigned(moved):
                result = self._steps[ORIGINAL](batch, inspect=True)
                drain()
        else:
            result = self._steps[arm](batch, inspect=True)
            drain()
        _barrier()  # afterwards, the messages of the other ranks to servers have arrived, too
        values = self._values(arm, result) | {f"input {name}": value for name, value in batch.named.items()}
        values["containers of the inputs"] = batch.structure
        digests = {name: digest(value) for name, value in values.items()}
        is_written = {name: digests[f"input {name}"] for name in batch.named} != before
        self._writes_inputs = bool(self._writes_inputs) or is_written
        if numeric and arm == ORIGINAL:
            self._tolerance.keep(index, values, digests)
        elif numeric:
            self._tolerance.compare(arm, index, values)
        return {**digests, **self._on_servers(result)}

    @returns_exceptions
    def block(self, arm: Arm, first: int, steps: int, threads: int = 0) -> float:
        """Run steps one after another; return their seconds, which include draining pending calls.

        Args:
            arm: the arm.
            first: the index of the first step, which decides on the batches.
            steps: the number of steps.
            threads: the number of threads of torch's operators in that time; 0 for the workload's.
        """
        usual = torch.get_num_threads()
        torch.set_num_threads(threads or usual)
        try:
            return self._block(arm, first, steps)
        finally:
            torch.set_num_threads(usual)

    def _block(self, arm: Arm, first: int, steps: int) -> float:
        step, start, delay_s = self._steps[arm], time.perf_counter(), run_delay_s()
        pipelined = self._depths.get(arm)
        for index in range(first, first + steps):
            step(self._pulled(arm, MeasuredChoice, index) if pipelined else self._input(index))
        self._end_loops()
        drain()
        seconds = time.perf_counter() - start
        self._measured_s += seconds
        self._delayed_s += run_delay_s() - delay_s
        return seconds

    def instructions(self) -> tuple[str, ...]:
        """Return those instructions of this process's processor on which int8 layers and compiled parts depend."""
        return instructions()

    def run_delay_share(self) -> float:
        """Return the share of the time of all blocks during which this trainer waited for a core."""
        return self._delayed_s / self._measured_s if self._measured_s else 0.0

    @returns_exceptions
    def timelines(self, arm: Arm, steps: int) -> list[Timeline]:
        """Run steps and return the timeline of each; under a pipeline, of each together with the one behind it."""
        if self._depths.get(arm):
            return self._timelines_of_loop(arm, steps)
        recorded = []
        for index in range(steps):
            with record() as recording:
                self._steps[arm](self._input(index))
            drain()
            recorded.append(as_captured(recording.timeline))
        return recorded

    def staleness(self, arm: Arm) -> Mapping[int, int]:
        """Return the number of an arm's reads that ran ahead of pushes, by the number of steps that they missed."""
        return self._staleness.get(arm, {})

    def _timelines_of_loop(self, arm: Arm, steps: int) -> list[Timeline]:
        lead = min(self._depths[arm], MOST_LEAD)
        moments = []
        with record() as recording:
            for index in range(lead + steps + 1):
                moments.append(recording.now_s)
                self._steps[arm](self._pulled(arm, MeasuredChoice, index))
            moments.append(recording.now_s)
        self._end_loops()
        drain()
        whole = recording.timeline
        pairs = zip(moments[lead:], moments[lead + 2 :], strict=False)
        return [as_captured(whole.between(begin_s, end_s, steps=2)) for begin_s, end_s in pairs]

    @property
    def _is_first(self) -> bool:
        return self._config.rank == len(self._workload.servers)

    def _input(self, index: int) -> Batch:
        batch = self._batches[index % len(self._batches)]
        return batch if self._writes_inputs is False else copy_of(batch)

    def _pulled(self, arm: Arm, choice: type[MeasuredChoice | InTurn], index: int) -> Batch:
        """Return the batch of a step from an arm's pipeline, which begins there, and stays open until `_end_loops`."""
        if arm not in self._loops:
            bound, depth = self._bound[arm], self._depths[arm]
            batches = (copy_of(self._batches[index % len(self._batches)]) for index in itertools.count(index))
            trainers = self._workload.trainers
            made = pipeline(
                batches,
                bound.module,
                inputs=bound.arguments,
                depth=depth,
                ahead=True,
                trainers=trainers,
                stale=self._stale[arm],
            )
            self._pipelines[arm] = made
            loop = iter(made)
            self._loops[arm] = cast("Generator[Batch, None, None]", loop)
            ahead_of(cast("CapturedModule", bound.module)).choose_by(choice)
        return next(self._loops[arm])

    def _end_loops(self) -> None:
        for arm, each in self._loops.items():
            each.close()
            self._staleness.setdefault(arm, Counter()).update(self._pipelines.pop(arm).staleness)
        self._loops.clear()

    def _renew_steps(self) -> None:
        # All arms train the same parameters and so share one optimizer.
        optimizer = optimizer_of(self._modules[ORIGINAL], self._workload)
        self._steps = {arm: Step(bound, self._workload, optimizer) for arm, bound in self._bound.items()}

    def _values(self, arm: Arm, result: StepResult) -> dict[str, object]:
        """Return the values that a step left behind in this process, and of the module's state the original's part."""
        found: dict[str, object] = results("output", result.output)
        if result.loss is not None:
            found["loss"] = result.loss
        found |= {f"gradient of {name}": value for name, value in result.gradients.items()}
        own = ModuleSnapshot(self._modules[ORIGINAL]).named()
        state = own if arm == REALIGNED else ModuleSnapshot(self._modules[arm]).named()
        found |= {name: state[name] for name in own if name in state}
        found["random generator"] = torch.get_rng_state()
        return found

    def _on_servers(self, result: StepResult) -> dict[str, str]:
        found = {f"gradients on server {name}": value for name, value in result.server_gradients.items()}
        for server in self._workload.servers:
            state: Mapping[str, str] = rpc.rpc_sync(server.name, server_state.state_digests)
            found |= {f"server {server.name}: {name}": value for name, value in state.items()}
        return found


def run_delay_s(schedstat: Path = _SCHEDSTAT) -> float:
    """Return the seconds for which this thread has waited for a core; 0 if the kernel does not say."""
    try:
        _, nanoseconds, _ = schedstat.read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(nanoseconds) / 1e9
