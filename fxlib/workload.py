"""How one step of the user's job runs: what a trial needs to know to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import GraphModule

from fxlib.contracts import Contract
from fxlib.errors import WorkloadError

Mode = Literal["forward", "local", "distributed"]
LOSSES = ("mean", "sum", "mse", "bce_with_logits", "cross_entropy")
OPTIMIZERS = ("none", "sgd", "adagrad", "adam", "adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Description of one tensor of a batch.

    Floats are drawn from N(0, 1), or uniformly from [low, high) when bounds are given; integers from [low, high).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch: positional inputs and keyword inputs of the forward, and the loss's target, as tensors."""

    inputs: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    target: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Batches described by shape, dtype and index range; `count` different ones are drawn from the workload's seed."""

    inputs: tuple[Tensors, ...]
    kwargs: Mapping[str, Tensors] = field(default_factory=dict)
    target: Tensors | None = None
    count: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The trainer's own optimizer. `name` is one of OPTIMIZERS."""

    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding table of the reference server `fxlib.ps`: [rows, dim] float32, with its own sparse optimizer."""

    name: str
    rows: int
    dim: int
    optimizer: Literal["sgd", "adagrad"] = "sgd"
    lr: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A dense parameter of the reference server `fxlib.ps`."""

    name: str
    shape: tuple[int, ...]
    optimizer: Literal["sgd", "adagrad"] = "sgd"
    lr: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One parameter-server process, called `name` on the RPC wire.

    Its state is that of the reference server (`tables`, `dense`), or is set up by `setup`, a function
    "pkg.mod:function" of a module that the operator allowed, called as `function(name, seed)` before each arm.
    `service_time_s` is added to each call that the reference server answers: it stands for the network and the load
    of the real one.
    """

    name: str
    tables: tuple[Table, ...] = ()
    dense: tuple[Dense, ...] = ()
    setup: str | None = None
    service_time_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObject:
    """What lies behind an RRef that the graph reaches by name: its owner and the class "pkg.mod:Class" to build."""

    owner: str
    cls: str
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The user's step: inputs, loss, optimizer, autograd mode, and the processes around the trainer.

    Args:
        batches: real batches (each a tensor, a tuple of tensors, or a `Batch`), or a `BatchSpec`.
        targets: one target per batch, unless each `Batch` carries its own.
        loss: a name from LOSSES ("mean" and "sum" of the output; the others compare it with the target), or a
            captured graph (output, target) -> scalar.
        optimizer: a name from OPTIMIZERS, or an `Optimizer`.
        mode: "forward", "local" (autograd in the trainer, gradients pushed) or "distributed" (distributed autograd).
        threads: intra-op threads of each trainer process.
        trainers: trainer processes.
        servers: parameter servers.
        rrefs: object behind each RRef, by the name of its placeholder or attribute in the graph.
        contracts: contracts by remote function, for functions that declare none.
        assume: "reads" or "pure" for every remote function without a contract: the user's word, recorded as such.
        seed: seeds weights that were not sent, described batches and server state.

    Raises:
        WorkloadError: a field does not describe a step that can run.
    """

    batches: Sequence[object] | BatchSpec
    targets: Sequence[torch.Tensor] | None = None
    loss: str | GraphModule = "mean"
    optimizer: str | Optimizer = "sgd"
    mode: Mode = "local"
    threads: int = 1
    trainers: int = 1
    servers: tuple[Server, ...] = ()
    rrefs: Mapping[str, RemoteObject] = field(default_factory=dict)
    contracts: Mapping[str, Contract] = field(default_factory=dict)
    assume: Literal["", "reads", "pure"] = ""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check names, counts and batches; normalize batches to `Batch` objects and the optimizer to an `Optimizer`."""
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise WorkloadError(f"unknown loss {self.loss!r}", where="Workload.loss", hint=f"One of {', '.join(LOSSES)}, or a captured graph.")
        optimizer = Optimizer(name=self.optimizer) if isinstance(self.optimizer, str) else self.optimizer
        if optimizer.name not in OPTIMIZERS:
            raise WorkloadError(f"unknown optimizer {optimizer.name!r}", where="Workload.optimizer", hint=f"One of {', '.join(OPTIMIZERS)}.")
        if self.mode not in ("forward", "local", "distributed"):
            raise WorkloadError(f"unknown mode {self.mode!r}", where="Workload.mode", hint='"forward", "local" or "distributed".')
        if self.assume not in ("", "reads", "pure"):
            raise WorkloadError(f"unknown assumption {self.assume!r}", where="Workload.assume", hint='"reads" or "pure".')
        for name in ("threads", "trainers"):
            if getattr(self, name) < 1:
                raise WorkloadError("must be at least 1", where=f"Workload.{name}")
        names = [server.name for server in self.servers]
        if len(set(names)) != len(names):
            raise WorkloadError("two servers have one name", where="Workload.servers")
        object.__setattr__(self, "optimizer", optimizer)
        if not isinstance(self.batches, BatchSpec):
            object.__setattr__(self, "batches", _as_batches(self.batches, self.targets))

    @staticmethod
    def describe(batches: Sequence[object], *, targets: Sequence[torch.Tensor] | None = None, count: int = 4) -> BatchSpec:
        """Describe batches by shape, dtype and index range, so that no value leaves the job.

        Raises:
            WorkloadError: there is no batch, or the batches differ in structure.
        """
        real = _as_batches(batches, targets)
        first = real[0]
        if any(len(b.inputs) != len(first.inputs) or b.kwargs.keys() != first.kwargs.keys() for b in real):
            raise WorkloadError("batches differ in structure", where="Workload.batches")
        return BatchSpec(
            inputs=tuple(_describe([b.inputs[i] for b in real]) for i in range(len(first.inputs))),
            kwargs={name: _describe([b.kwargs[name] for b in real]) for name in first.kwargs},
            target=None if first.target is None else _describe([b.target for b in real if b.target is not None]),
            count=count,
        )


def _as_batches(batches: Sequence[object], targets: Sequence[torch.Tensor] | None) -> tuple[Batch, ...]:
    if not batches:
        raise WorkloadError("no batch given", where="Workload.batches", hint="Pass real batches, or Workload.describe(...).")
    if targets is not None and len(targets) != len(batches):
        raise WorkloadError(f"{len(targets)} targets for {len(batches)} batches", where="Workload.targets")
    result = []
    for index, batch in enumerate(batches):
        target = targets[index] if targets is not None else None
        if isinstance(batch, Batch):
            result.append(Batch(inputs=batch.inputs, kwargs=batch.kwargs, target=batch.target if target is None else target))
            continue
        inputs = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch) if isinstance(batch, (tuple, list)) else ()
        if not inputs or not all(isinstance(value, torch.Tensor) for value in inputs):
            raise WorkloadError("a batch is a tensor, a tuple of tensors, or an fxlib.Batch", where=f"Workload.batches[{index}]")
        result.append(Batch(inputs=inputs, target=target))
    return tuple(result)


def _describe(tensors: Sequence[torch.Tensor]) -> Tensors:
    first = tensors[0]
    low = high = None
    if not first.is_floating_point() and not first.is_complex() and first.dtype != torch.bool and all(t.numel() for t in tensors):
        low = float(min(int(t.min()) for t in tensors))
        high = float(max(int(t.max()) for t in tensors) + 1)
    return Tensors(shape=tuple(first.shape), dtype=first.dtype, low=low, high=high)
