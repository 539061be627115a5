"""How one step of the user's job runs: everything that a trial needs to repeat it.

A job may also call its model in other ways, its variants: evaluation, for example, or batches without a mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict

import torch
from torch.fx import GraphModule
from typing_extensions import Unpack

from fxlib.errors import WorkloadError
from fxlib.spec.contract import Contract
from fxlib.spec.inputs import Batch, BatchSpec, Range, Tensors, describe, draw, normalize, samples_in
from fxlib.spec.servers import Dense, RemoteObject, Server, Table

MAX_VARIANTS = 7
"""Maximum number of variants of one workload; a module has the main graph besides."""

_EVALUATION = "evaluation"
MAIN = "main"
"""Name of a workload's own step, and of its graph."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,62}")
__all__ = [
    "LOSSES",
    "OPTIMIZERS",
    "Batch",
    "BatchSpec",
    "Dense",
    "LayerRange",
    "Mode",
    "Optimizer",
    "RemoteObject",
    "Server",
    "Table",
    "Tensors",
    "Variant",
    "Workload",
]

Mode = Literal["forward", "local", "distributed"]
Assume = Literal["", "reads", "pure"]

LOSSES = ("mean", "sum", "mse", "bce_with_logits", "cross_entropy")
LOSSES_WITH_TARGET = ("mse", "bce_with_logits", "cross_entropy")
MAX_ACCUMULATION = 1024
MAX_PROCESSES = 256
"""Maximum number of trainers and servers of one trial."""

MAX_THREADS = 1024
MAX_DEPTH = 64
"""Maximum number of batches that a pipeline pulls ahead of their step."""

MAX_CALIBRATION = 8
"""Batches of which the ranges of int8 layers are taken."""

OPTIMIZERS = ("none", "sgd", "adagrad", "adam", "adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """The range of what one layer on int8 weights takes, or of a value between such layers.

    It is observed where the data are: ranges leave the job, values do not. Both ends are infinite if a value was not
    finite.
    """

    weights: tuple[str, ...]
    """Names of the module's tensors behind the layer's weights, sorted; empty for a value between layers."""
    use: int = 0
    """Number of layers with the same weights, or of values between layers, that come before it in the graph."""
    least: float
    most: float
    values: int
    """Number of values observed."""
    too_far: str = ""
    """Why the layer stays in float although its range is known, as in `Reason.ERROR_BOUND`; empty if it need not."""
    shape: tuple[int, ...] = ()
    """Its sizes, which say what can be added up without a copy; empty if they are unknown."""

    @property
    def problem(self) -> str:
        """The problem with it, as words that follow "range"; empty if there is none."""
        finite = math.isfinite(self.least) and math.isfinite(self.most)
        if not finite and (self.least, self.most) != (-math.inf, math.inf):
            return f"{self.least} to {self.most} is none"
        if not self.least <= 0.0 <= self.most:
            return f"{self.least} to {self.most} does not hold zero"
        return "of less than no values" if min(self.values, self.use, *self.shape) < 0 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One more way in which a job calls its model, with a different program than the workload's own step.

    Args:
        name: up to 63 letters, digits, spaces, or ._-
        training: the training flag of all modules: False as after `model.eval()`; None leaves the model as it is.
        grad: whether gradients are recorded. Without them its step is the forward alone, under `torch.no_grad()`.
        batches: its batches, as in a `Workload`; None: the workload's own. An argument that they leave out, and whose
            default is None, True or False, has that value in the variant's graph.
        targets: one target per batch, unless each `Batch` carries its own.

    Raises:
        WorkloadError: the name or the batches are not valid.
    """

    name: str
    training: bool | None = None
    grad: bool = True
    batches: Sequence[object] | BatchSpec | None = None
    targets: Sequence[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        """Check the name, and normalize batches and targets."""
        if not _NAME.fullmatch(self.name) or self.name == MAIN:
            raise WorkloadError(
                f"{self.name!r} is not a valid name of a variant",
                where="Variant.name",
                hint=f"Up to 63 letters, digits, spaces or ._-, and not {MAIN!r}.",
            )
        if self.batches is not None and not isinstance(self.batches, BatchSpec):
            object.__setattr__(self, "batches", normalize(self.batches, self.targets))
            object.__setattr__(self, "targets", None)
        elif self.targets is not None:
            raise WorkloadError(
                "the variant has no batches of its own", where="Variant.targets", hint="Pass batches= as well."
            )

    @property
    def real_batches(self) -> tuple[Batch, ...]:
        """Its own real batches; empty if they are described, or are the workload's."""
        return () if self.batches is None or isinstance(self.batches, BatchSpec) else normalize(self.batches, None)

    def described(self, *, count: int, ranges: Mapping[str, Range]) -> Variant:
        """Return the variant with its own batches described; `ranges` may name tensors that they do not have.

        Raises:
            WorkloadError: an integer tensor is empty and has no range.
        """
        if not (batches := self.real_batches):
            return self
        known = {name: bounds for name, bounds in ranges.items() if name in batches[0].named}
        spec = describe(batches, count=count, ranges=known)
        return Variant(name=self.name, training=self.training, grad=self.grad, batches=spec)


def check_names(variants: Sequence[Variant]) -> None:
    """Check the number of variants, and that their names differ.

    Raises:
        WorkloadError: there are too many, or two have the same name.
    """
    if len(variants) > MAX_VARIANTS:
        raise WorkloadError(f"must be at most {MAX_VARIANTS}", where="Workload.variants")
    names = [each.name for each in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WorkloadError(f"two variants are called {twice[0]!r}", where="Workload.variants")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The trainer's optimizer. `name` is one of OPTIMIZERS.

    Raises:
        WorkloadError: the name is unknown, or a figure is negative or not finite.
    """

    name: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Check name and figures."""
        if self.name not in OPTIMIZERS:
            raise WorkloadError(
                f"unknown optimizer {self.name!r}", where="Workload.optimizer", hint=f"One of {', '.join(OPTIMIZERS)}."
            )
        for figure in ("lr", "momentum", "weight_decay"):
            if not (math.isfinite(getattr(self, figure)) and getattr(self, figure) >= 0):
                raise WorkloadError("must be finite and not negative", where=f"Workload.optimizer.{figure}")


class StepFields(TypedDict, total=False):
    """The fields of a `Workload` other than its batches."""

    targets: Sequence[torch.Tensor] | None
    loss: str | GraphModule
    optimizer: str | Optimizer
    mode: Mode
    accumulation: int
    clip_norm: float | None
    loss_scale: float | None
    threads: int
    trainers: int
    servers: Sequence[Server]
    rrefs: Mapping[str, RemoteObject]
    contracts: Mapping[str, Contract]
    assume: Assume
    seed: int
    variants: Sequence[Variant]
    evaluation: bool
    pipeline: int
    stale: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The user's step: inputs, loss, optimizer, autograd mode, and the processes around the trainer.

    Args:
        batches: real batches (each a tensor, a tuple or dict of inputs, or a `Batch`), or a `BatchSpec`. Inputs are
            tensors, numbers, flags, strings, None, and nested containers of them. Real batches leave the job;
            `Workload.describe` sends their description instead.
        targets: one target per batch, unless each `Batch` carries its own.
        loss: a name from LOSSES ("mean" and "sum" of the output; the others compare it with the target), or a
            captured graph (output, target) -> scalar.
        optimizer: a name from OPTIMIZERS, or an `Optimizer`.
        mode: "forward", "local" (autograd in the trainer, gradients pushed) or "distributed" (distributed autograd).
        accumulation: number of forwards and backwards, each with a batch of its own, for each optimizer step and push.
        clip_norm: the norm to which the gradients of all parameters together are clipped before the optimizer; None: no
            clipping.
        loss_scale: the factor by which each loss is multiplied before backward and the gradients of parameters are
            divided before the optimizer; None: 1.
        threads: intra-op threads of each trainer process.
        trainers: number of trainer processes.
        servers: the parameter servers.
        rrefs: the object behind each RRef, by the name of its placeholder or attribute in the graph.
        contracts: contracts by remote function, for functions that declare none.
        assume: "reads" or "pure" for every remote function without a contract; it is recorded as the user's word.
        seed: the seed for weights that were not sent, described batches and server state; 0 to 2**63 - 1.
        variants: the other ways in which the job calls the model. Each is captured, planned and measured in the same
            job, with a graph and a decision of its own.
        evaluation: adds a variant, "evaluation": eval mode, no gradients, the workload's own batches.
        pipeline: depth of the `fxlib.pipeline` under which the launcher's loop runs, like its `depth=`; 0: it runs
            none.
        stale: number of steps whose pushes a read may miss in that loop, like its `stale=`. Above 0 it is measured with
            stale reads, too, if `max_relative_error` allows more than rounding.
        calibration: real batches that stay in this process: if int8 is requested, the client takes the ranges of
            layers' inputs from them, and sends only these. `Workload.describe` keeps its first ones, for forwards
            alone.
        ranges: such ranges.

    Raises:
        WorkloadError: a field does not describe a step that can run.
    """

    batches: Sequence[object] | BatchSpec
    targets: Sequence[torch.Tensor] | None = None
    loss: str | GraphModule = "mean"
    optimizer: str | Optimizer = "sgd"
    mode: Mode = "local"
    accumulation: int = 1
    clip_norm: float | None = None
    loss_scale: float | None = None
    threads: int = 1
    trainers: int = 1
    servers: Sequence[Server] = ()
    rrefs: Mapping[str, RemoteObject] = field(default_factory=dict)
    contracts: Mapping[str, Contract] = field(default_factory=dict)
    assume: Assume = ""
    seed: int = 0
    variants: Sequence[Variant] = ()
    evaluation: bool = False
    pipeline: int = 0
    stale: int = 0
    calibration: Sequence[Batch] = field(default=(), repr=False, compare=False)
    ranges: Sequence[LayerRange] = ()

    def __post_init__(self) -> None:
        """Normalize batches, targets, optimizer and servers; check the rest."""
        optimizer = Optimizer(name=self.optimizer) if isinstance(self.optimizer, str) else self.optimizer
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "servers", tuple(self.servers))
        if not isinstance(self.batches, BatchSpec):
            object.__setattr__(self, "batches", normalize(self.batches, self.targets))
            object.__setattr__(self, "targets", None)
        elif self.targets is not None:
            raise WorkloadError("a description carries its own target", where="Workload.targets")
        if self.calibration:  # whatever `batches` takes
            object.__setattr__(self, "calibration", normalize(self.calibration, None)[:MAX_CALIBRATION])
        if self.evaluation:
            object.__setattr__(
                self, "variants", (Variant(name=_EVALUATION, training=False, grad=False), *self.variants)
            )
            object.__setattr__(self, "evaluation", False)
        self._check_choices()
        self._check_loss()
        self._check_gradients()
        self._check_processes()
        self._check_variants()
        self._check_ranges()

    @classmethod
    def describe(
        cls,
        batches: Sequence[object],
        *,
        count: int = 4,
        ranges: Mapping[str, Range] | None = None,
        **step: Unpack[StepFields],
    ) -> Workload:
        """Make a workload that describes its batches by shape, dtype and index range, so that no value leaves the job.

        For integers, the description also says which share repeats from batch to batch and how unevenly they occur, so
        that a trial's generated batches do the same: pass consecutive batches.

        Args:
            batches: real batches, as for `Workload`; the first gives the shapes.
            count: how many different batches a trial draws.
            ranges: [low, high) by tensor (`input.0`, `kwarg.NAME`, `target`). Without an entry an integer tensor has
                the range of its values in `batches`, and a float tensor is drawn from N(0, 1).
            **step: the other fields of a `Workload`.

        Raises:
            WorkloadError: the batches differ in structure, a range names no tensor, or another field is wrong.
        """
        real, ranges = cls(batches=batches, **step), ranges or {}
        variants = [each.described(count=count, ranges=ranges) for each in real.variants]
        described = describe(real.real_batches, count=count, ranges=ranges)
        kept = real.real_batches[:MAX_CALIBRATION] if real.mode == "forward" else ()
        return replace(real, batches=described, variants=variants, calibration=kept)

    @property
    def spec(self) -> BatchSpec | None:
        """The description of the batches; None if they are real."""
        return self.batches if isinstance(self.batches, BatchSpec) else None

    @property
    def real_batches(self) -> tuple[Batch, ...]:
        """The real batches; empty if they are described."""
        return () if isinstance(self.batches, BatchSpec) else normalize(self.batches, None)

    @property
    def drawn_batches(self) -> tuple[Batch, ...]:
        """The real batches, or batches drawn from their description and the seed, which are the same in every process.

        Raises:
            WorkloadError: the description does not determine what to draw.
        """
        return self.real_batches if self.spec is None else draw(self.spec, self.seed)

    @property
    def samples(self) -> tuple[Batch, ...]:
        """The real batches, or one drawn from their description.

        Raises:
            WorkloadError: the description does not determine what to draw.
        """
        spec = self.spec
        return self.real_batches if spec is None else draw(replace(spec, count=1), self.seed)

    @property
    def samples_per_step(self) -> float:
        """The mean number of samples in a batch.

        Raises:
            WorkloadError: the description does not determine what to draw.
        """
        counts = [samples_in(batch) for batch in self.samples]
        return sum(counts) / len(counts)

    @property
    def trainer_optimizer(self) -> Optimizer:
        """The trainer's optimizer, given by name or as an `Optimizer`."""
        return Optimizer(name=self.optimizer) if isinstance(self.optimizer, str) else self.optimizer

    def of(self, variant: Variant) -> Workload:
        """Return the workload of one of the variants.

        Raises:
            WorkloadError: the variant's batches lack the target that the loss needs.
        """
        batches = self.batches if variant.batches is None else variant.batches
        if variant.grad:
            return replace(self, batches=batches, variants=())
        return replace(
            self,
            batches=batches,
            mode="forward",
            accumulation=1,
            clip_norm=None,
            loss_scale=None,
            optimizer="none",
            pipeline=0,
            stale=0,
            variants=(),
        )

    def _check_variants(self) -> None:
        object.__setattr__(self, "variants", tuple(self.variants))
        check_names(self.variants)
        for each in self.variants:
            if each.grad and self.mode == "forward":
                raise WorkloadError(
                    "records gradients, and the workload's steps do not",
                    where=f"Workload.variants {each.name!r}",
                    hint="Pass grad=False, or make training the workload's own step.",
                )
            self.of(each)

    def _check_choices(self) -> None:
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise WorkloadError(
                f"unknown loss {self.loss!r}",
                where="Workload.loss",
                hint=f"One of {', '.join(LOSSES)}, or a captured graph.",
            )
        if self.mode not in ("forward", "local", "distributed"):
            raise WorkloadError(
                f"unknown mode {self.mode!r}", where="Workload.mode", hint='"forward", "local" or "distributed".'
            )
        if self.assume not in ("", "reads", "pure"):
            raise WorkloadError(
                f"unknown assumption {self.assume!r}", where="Workload.assume", hint='"reads" or "pure".'
            )
        if not 0 <= self.pipeline <= MAX_DEPTH:
            raise WorkloadError(f"must be 0 to {MAX_DEPTH}", where="Workload.pipeline")
        if not 0 <= self.stale <= MAX_DEPTH:
            raise WorkloadError(f"must be 0 to {MAX_DEPTH}", where="Workload.stale")
        if self.stale and not self.pipeline:
            raise WorkloadError(
                "no read is stale in a loop without a pipeline",
                where="Workload.stale",
                hint="Give its depth by pipeline=.",
            )
        if self.pipeline and self.mode == "distributed":
            raise WorkloadError(
                "no call may run ahead of its step's distributed autograd context",
                where="Workload.pipeline",
                hint="Leave it out.",
            )
        if not 0 <= self.seed < 2**63:
            raise WorkloadError(f"{self.seed} is out of range", where="Workload.seed", hint="0 to 2**63 - 1.")

    def _check_loss(self) -> None:
        sample = self.batches if isinstance(self.batches, BatchSpec) else self.real_batches[0]
        if self.mode != "forward" and self.loss in LOSSES_WITH_TARGET and sample.target is None:
            raise WorkloadError(
                f"the loss {self.loss!r} needs a target", where="Workload.targets", hint="Pass targets=[...]."
            )

    def _check_gradients(self) -> None:
        if not 1 <= self.accumulation <= MAX_ACCUMULATION:
            raise WorkloadError(f"must be 1 to {MAX_ACCUMULATION}", where="Workload.accumulation")
        for name in ("clip_norm", "loss_scale"):
            figure = getattr(self, name)
            if figure is not None and not (math.isfinite(figure) and figure > 0):
                raise WorkloadError("must be finite and positive", where=f"Workload.{name}", hint="Use None for none.")
        plain = self.accumulation == 1 and self.clip_norm is None and self.loss_scale is None
        if self.mode != "local" and not plain:
            raise WorkloadError(
                "accumulation, clip_norm and loss_scale apply to steps of local autograd",
                where="Workload.mode",
                hint='Use mode="local", or leave them out.',
            )

    def _check_ranges(self) -> None:
        for each in self.ranges:
            if problem := each.problem:
                raise WorkloadError(f"the range {problem}", where=f"Workload.ranges[{', '.join(each.weights)}]")

    def _check_processes(self) -> None:
        for name in ("threads", "trainers"):
            if getattr(self, name) < 1:
                raise WorkloadError("must be at least 1", where=f"Workload.{name}")
        if self.threads > MAX_THREADS:
            raise WorkloadError(f"must be at most {MAX_THREADS}", where="Workload.threads")
        if self.trainers + len(self.servers) > MAX_PROCESSES:
            raise WorkloadError(
                f"trainers and servers must be at most {MAX_PROCESSES} together", where="Workload.servers"
            )
        names = [server.name for server in self.servers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise WorkloadError(f"two servers are called {twice[0]!r}", where="Workload.servers")
        for name in self.contracts:
            if ":" not in name and "." not in name:
                raise WorkloadError(
                    f"{name!r} does not name a remote function",
                    where="Workload.contracts",
                    hint='Write "package.module:function", ".method" or "attribute.method".',
                )
