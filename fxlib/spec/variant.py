"""One of the ways in which a job calls its model, besides the main one: evaluation, say, or batches without a mask."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fxlib.errors import WorkloadError
from fxlib.spec.inputs import Batch, BatchSpec, Range, describe, normalize

MAX_VARIANTS = 7
"""Variants of one workload; a module has the main graph beside them."""

EVALUATION = "evaluation"
MAIN = "main"
"""Name of a workload's own step, and of the graph that is for it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way in which a job calls its model, which is another program than that of the workload's own step.

    Args:
        name: up to 63 letters, digits, spaces, or ._-
        training: the training flag of all modules: False as after `model.eval()`; None as the model is.
        grad: whether gradients are recorded. Without them its step is the forward alone, under `torch.no_grad()`.
        batches: its batches, as those of a `Workload`; None: the workload's own. An argument that they leave out, and
            whose default is None, True or False, has that value in the variant's graph.
        targets: one target per batch, unless each `Batch` carries its own.

    Raises:
        WorkloadError: the name or the batches make no sense.
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
                f"{self.name!r} is no name of a variant",
                where="Variant.name",
                hint=f"Up to 63 letters, digits, spaces or ._-, and not {MAIN!r}.",
            )
        if self.batches is not None and not isinstance(self.batches, BatchSpec):
            object.__setattr__(self, "batches", normalize(self.batches, self.targets))
            object.__setattr__(self, "targets", None)
        elif self.targets is not None:
            raise WorkloadError("there are no batches of its own", where="Variant.targets", hint="Pass batches=, too.")

    @property
    def real_batches(self) -> tuple[Batch, ...]:
        """Its own real batches; none where they are described, or the workload's."""
        return () if self.batches is None or isinstance(self.batches, BatchSpec) else normalize(self.batches, None)

    def described(self, *, count: int, ranges: Mapping[str, Range]) -> Variant:
        """Return the same variant with its own batches described; `ranges` may name tensors that they do not have.

        Raises:
            WorkloadError: an integer tensor is empty, and has no range.
        """
        if not (batches := self.real_batches):
            return self
        known = {name: bounds for name, bounds in ranges.items() if name in batches[0].named}
        spec = describe(batches, count=count, ranges=known)
        return Variant(name=self.name, training=self.training, grad=self.grad, batches=spec)


def check_names(variants: Sequence[Variant]) -> None:
    """Check how many variants there are, and that no two are called the same.

    Raises:
        WorkloadError: they are too many, or two have one name.
    """
    if len(variants) > MAX_VARIANTS:
        raise WorkloadError(f"must be at most {MAX_VARIANTS}", where="Workload.variants")
    names = [each.name for each in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WorkloadError(f"two variants are called {twice[0]!r}", where="Workload.variants")
