"""The trainer of a trial: it holds the original and its candidates, and runs their steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.distributed import rpc
from torch.fx import GraphModule

from fxlib import wire
from fxlib.profiling.measure import measure
from fxlib.profiling.runs import STEPS
from fxlib.protocol import workload_from_proto
from fxlib.runtime.ops.record import record
from fxlib.spec.profile import Profile
from fxlib.spec.report import Timeline
from fxlib.spec.workload import Batch
from fxlib.v1 import workload_pb2
from fxlib_workers.exchange.candidate import MOVED, ORIGINAL, Arm
from fxlib_workers.process.exceptions import tells
from fxlib_workers.trial import process_group as peers
from fxlib_workers.trial import servers
from fxlib_workers.trial.actor import Member, Place
from fxlib_workers.trial.alignment import elsewhere
from fxlib_workers.trial.digests import digest, results, tensors
from fxlib_workers.trial.objects import Bound, Needs, bind, needs_of
from fxlib_workers.trial.replay.calibration import calibrate
from fxlib_workers.trial.replay.call_ids import as_captured, stand_in
from fxlib_workers.trial.replay.clients import make_remote_calls
from fxlib_workers.trial.replay.plan import Script
from fxlib_workers.trial.state import State
from fxlib_workers.trial.step import Outcome, Step, batches_of, copy_of, drain, optimizer_of, samples_in
from fxlib_workers.trial.tolerance_check import Nearness

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")

Trace = Mapping[str, str]
"""Digests of all that one step left behind, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a trial begins with: the graph, the workload, and the blobs that these name, by SHA-256."""

    original: bytes
    workload: bytes
    blobs: Mapping[str, bytes]


class Trainer(Member):
    """One trainer process. A method whose code is the user's returns `Raised` in place of raising."""

    def __init__(self, place: Place, material: Material) -> None:
        super().__init__(place)
        self._material = material
        self._script = Script(lines={})
        self._nearness = Nearness()
        self._measured_s = self._waited_s = 0.0

    def turn_to(self, material: Material) -> None:
        """Be ready to load another program; the one before it is forgotten."""
        self._material = material
        self._script = Script(lines={})
        self._nearness = Nearness()
        self._measured_s = self._waited_s = 0.0

    @tells
    def load(self) -> Needs:
        """Build the original; return what it needs of the trial's world."""
        material = self._material
        message = workload_pb2.Workload.FromString(material.workload)
        self._workload = workload_from_proto(message, material.blobs)
        self._batches = batches_of(self._workload)
        self._writes_inputs = False
        original = wire.decode(wire.parse(material.original), blobs=material.blobs, seed=self._workload.seed)
        self._clients = wire.client_functions(original)
        make_remote_calls([original])
        self._modules: dict[Arm, GraphModule] = {ORIGINAL: original}
        self._state = State(original)
        return needs_of([original], self._workload)

    def replay(self, script: Script) -> None:
        """Have stand-ins called for what is replayed, from the next graph on that is made ready."""
        self._script = script

    @tells
    def gather(self) -> None:
        """Become one of the ranks that collectives run over."""
        rank = self._place.rank - len(self._workload.servers)
        peers.gather(self._meeting_point(), rank, self._workload.trainers, self._place.interface)
        peers.wrap(self._modules[ORIGINAL])

    @tells
    def calibrate(self, servers: list[str]) -> None:
        """Tell servers that replay what the trial's own network takes for calls of this process."""
        calibrate(self._script, servers)

    @tells
    def prepare(self) -> None:
        """Have the servers make the objects behind RRefs, and get ready for steps of the original."""
        self._rrefs = {
            name: rpc.remote(described.owner, servers.create, (name, described))
            for name, described in self._workload.rrefs.items()
        }
        for rref in self._rrefs.values():
            # Known before the first call: a call that has to ask for the type first is issued from another thread.
            rref._get_type(blocking=False).wait()
        stand_in(self._modules[ORIGINAL], self._script)
        self._bound: dict[Arm, Bound] = {ORIGINAL: bind(self._modules[ORIGINAL], self._rrefs)}
        self._renew_steps()

    @tells
    def admit(self, arm: Arm, graph: bytes, values: Mapping[str, bytes]) -> Needs:
        """Build a candidate on the original's parameters; return what it needs of the trial's world."""
        root = self._modules[ORIGINAL]
        candidate = wire.decode(wire.parse(graph), blobs=values, root=root, functions=self._clients)
        make_remote_calls([candidate])
        needs = needs_of([candidate], self._workload)
        stand_in(candidate, self._script)
        self._modules[arm] = candidate
        self._bound[arm] = bind(candidate, self._rrefs)
        self._renew_steps()
        return needs

    def samples_per_step(self) -> float:
        """Return the mean number of samples in a batch."""
        return sum(map(samples_in, self._batches)) / len(self._batches)

    @tells
    def reset(self) -> None:
        """Bring parameters, buffers, optimizers, generators and all servers back to where they began."""
        drain()
        for server in self._workload.servers:
            rpc.rpc_sync(server.name, servers.reset)
        self._state.restore()
        torch.manual_seed(self._workload.seed)
        self._renew_steps()

    @tells
    def profile(self, seconds: float) -> Profile:
        """Measure steps of the original for about so long, and then its servers, for not much longer.

        It leaves parameters and servers as training steps do.
        """
        self._trace(ORIGINAL, 0)  # warms up, and tells whether the model writes its inputs
        inputs = itertools.count()

        def step() -> None:
            self._steps[ORIGINAL](self._input(next(inputs)))

        start = time.perf_counter()
        step()
        steps = peers.fewest(max(1, min(STEPS, int(seconds / (time.perf_counter() - start)))))
        found = measure(
            self._bound[ORIGINAL].module,
            step,
            steps=steps,
            warmups=min(1, steps - 1),
            contracts=self._workload.contracts,
            probing_s=seconds if self._is_first else 0.0,  # a server is tried out by one at a time
            recorded=self._workload.mode == "distributed",
        )
        drain()
        return found

    @tells
    def trace(self, arm: Arm, index: int, numeric: bool = False) -> Trace:
        """Run one step on batch `index` and return digests of all that it left behind.

        Where a comparison is to be `numeric`, the original's values are kept, and a candidate's are compared with them.
        """
        return self._trace(arm, index, numeric=numeric)

    @tells
    def errors(self, arm: Arm) -> Mapping[str, float]:
        """Return how far what a candidate left behind was from what the original did, by name."""
        return self._nearness.errors(arm)

    def _trace(self, arm: Arm, index: int, *, numeric: bool = False) -> Trace:
        batch = copy_of(self._batches[index % len(self._batches)])
        before = {name: digest(value) for name, value in batch.named.items()}
        if arm == MOVED:
            held = [*State(self._modules[ORIGINAL]).named().values(), *tensors(batch.named)]
            with elsewhere(held):
                outcome = self._steps[ORIGINAL](batch, inspect=True)
                drain()
        else:
            outcome = self._steps[arm](batch, inspect=True)
            drain()
        peers.meet()  # what the others have sent to servers is there, too
        values = self._values(arm, outcome) | {f"input {name}": value for name, value in batch.named.items()}
        values["containers of the inputs"] = batch.structure
        digests = {name: digest(value) for name, value in values.items()}
        self._writes_inputs |= {name: digests[f"input {name}"] for name in batch.named} != before
        if numeric and arm == ORIGINAL:
            self._nearness.keep(index, values, digests)
        elif numeric:
            self._nearness.compare(arm, index, values)
        return {**digests, **self._on_servers(outcome)}

    @tells
    def block(self, arm: Arm, steps: int) -> float:
        """Run so many steps, one after another, and return their seconds, calls left pending drained included."""
        step, start, waited = self._steps[arm], time.perf_counter(), waited_s()
        for index in range(steps):
            step(self._input(index))
        drain()
        seconds = time.perf_counter() - start
        self._measured_s, self._waited_s = self._measured_s + seconds, self._waited_s + waited_s() - waited
        return seconds

    def share_waited(self) -> float:
        """Return for which share of the time of all blocks this trainer waited for a core."""
        return self._waited_s / self._measured_s if self._measured_s else 0.0

    @tells
    def timelines(self, arm: Arm, steps: int) -> list[Timeline]:
        """Run so many steps, recorded."""
        recorded = []
        for index in range(steps):
            batch = self._input(index)
            with record() as recording:
                self._steps[arm](batch)
            drain()
            recorded.append(as_captured(recording.timeline))
        return recorded

    @property
    def _is_first(self) -> bool:
        return self._place.rank == len(self._workload.servers)

    def _input(self, index: int) -> Batch:
        batch = self._batches[index % len(self._batches)]
        return copy_of(batch) if self._writes_inputs else batch

    def _renew_steps(self) -> None:
        # One optimizer for all arms: they train the same parameters.
        optimizer = optimizer_of(self._modules[ORIGINAL], self._workload)
        self._steps = {arm: Step(bound, self._workload, optimizer) for arm, bound in self._bound.items()}

    def _values(self, arm: Arm, outcome: Outcome) -> dict[str, object]:
        """Return what a step left behind in this process; of the module, what the original has, too."""
        found: dict[str, object] = results("output", outcome.output)
        if outcome.loss is not None:
            found["loss"] = outcome.loss
        found |= {f"gradient of {name}": value for name, value in outcome.gradients.items()}
        own = State(self._modules[ORIGINAL]).named()
        held = own if arm == MOVED else State(self._modules[arm]).named()
        found |= {name: held[name] for name in own if name in held}
        found["random generator"] = torch.get_rng_state()
        return found

    def _on_servers(self, outcome: Outcome) -> dict[str, str]:
        found = {f"gradients on server {name}": value for name, value in outcome.server_gradients.items()}
        for server in self._workload.servers:
            told: Mapping[str, str] = rpc.rpc_sync(server.name, servers.state_digests)
            found |= {f"server {server.name}: {name}": value for name, value in told.items()}
        return found


def waited_s(schedstat: Path = _SCHEDSTAT) -> float:
    """Return the seconds for which this thread has stood in a queue for a core; 0 where the kernel does not tell."""
    try:
        _, nanoseconds, _ = schedstat.read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(nanoseconds) / 1e9
