"""The trainer of a trial: it holds the original and the candidate, and runs their steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed import rpc

from fxlib import wire
from fxlib.protocol import workload_from_proto
from fxlib.result import Timeline
from fxlib.runtime.record import record
from fxlib.v1 import workload_pb2
from fxlib.workload import Batch
from workers.trial import servers
from workers.trial.bits import digest, leaves
from workers.trial.failures import tells
from workers.trial.inputs import batches_of, copy_of, samples_in
from workers.trial.member import Member, Place
from workers.trial.objects import Needs, bind, needs_of
from workers.trial.state import State
from workers.trial.step import Outcome, Step, drain, optimizer_of

Arm = Literal["original", "candidate"]
Trace = Mapping[str, str]
"""Digests of all that one step left behind, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a trial runs: two graphs, the workload, and the blobs that these name, by SHA-256."""

    original: bytes
    candidate: bytes
    workload: bytes
    blobs: Mapping[str, bytes]


class Trainer(Member):
    """One trainer process. A method whose code is the user's returns `Raised` in place of raising."""

    def __init__(self, place: Place, material: Material) -> None:
        super().__init__(place)
        self._material = material

    @tells
    def load(self) -> Needs:
        """Build original and candidate, on one set of parameters; return what they need of the trial's world."""
        material = self._material
        message = workload_pb2.Workload.FromString(material.workload)
        self._workload = workload_from_proto(message, material.blobs)
        self._batches = batches_of(self._workload)
        self._writes_inputs = False
        original = wire.decode(wire.parse(material.original), blobs=material.blobs, seed=self._workload.seed)
        candidate = wire.decode(wire.parse(material.candidate), blobs=material.blobs, root=original)
        self._modules = {"original": original, "candidate": candidate}
        self._state = State(original)
        return needs_of(self._modules.values(), self._workload)

    @tells
    def prepare(self) -> None:
        """Have the servers make the objects behind RRefs, and get ready for steps."""
        rrefs = {
            name: rpc.remote(described.owner, servers.create, (name, described))
            for name, described in self._workload.rrefs.items()
        }
        for rref in rrefs.values():
            # Known before the first call: a call that has to ask for the type first is issued from another thread.
            rref._get_type(blocking=False).wait()
        self._bound = {arm: bind(module, rrefs) for arm, module in self._modules.items()}
        self._renew_steps()

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
    def trace(self, arm: Arm, index: int) -> Trace:
        """Run one step on batch `index` and return digests of all that it left behind."""
        batch = copy_of(self._batches[index % len(self._batches)])
        before = {name: digest(value) for name, value in batch.named.items()}
        outcome = self._steps[arm](batch, inspect=True)
        drain()
        after = {name: digest(value) for name, value in batch.named.items()}
        self._writes_inputs |= before != after
        return {**self._digests(arm, outcome), **{f"input {name}": each for name, each in after.items()}}

    @tells
    def block(self, arm: Arm, steps: int) -> float:
        """Run so many steps, one after another, and return their seconds, calls left pending drained included."""
        step, start = self._steps[arm], time.perf_counter()
        for index in range(steps):
            step(self._input(index))
        drain()
        return time.perf_counter() - start

    @tells
    def timelines(self, arm: Arm, steps: int) -> list[Timeline]:
        """Run so many steps, recorded."""
        recorded = []
        for index in range(steps):
            batch = self._input(index)
            with record() as recording:
                self._steps[arm](batch)
            drain()
            recorded.append(recording.timeline)
        return recorded

    def _input(self, index: int) -> Batch:
        batch = self._batches[index % len(self._batches)]
        return copy_of(batch) if self._writes_inputs else batch

    def _renew_steps(self) -> None:
        # One optimizer for both arms: they train the same parameters.
        optimizer = optimizer_of(self._modules["original"], self._workload)
        self._steps = {arm: Step(bound, self._workload, optimizer) for arm, bound in self._bound.items()}

    def _digests(self, arm: Arm, outcome: Outcome) -> dict[str, str]:
        found = {name: digest(value) for name, value in leaves("output", outcome.output).items()}
        if outcome.loss is not None:
            found["loss"] = digest(outcome.loss)
        found |= {f"gradient of {name}": digest(value) for name, value in outcome.gradients.items()}
        found |= {f"gradients on server {name}": value for name, value in outcome.server_gradients.items()}
        found |= {name: digest(value) for name, value in State(self._modules[arm]).named().items()}
        found["random generator"] = digest(torch.get_rng_state())
        for server in self._workload.servers:
            told: Mapping[str, str] = rpc.rpc_sync(server.name, servers.state_digests)
            found |= {f"server {server.name}: {name}": value for name, value in told.items()}
        return found
