"""The batches of a trial: those that were sent, or new ones drawn as the workload describes them."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxlib.spec.inputs import draw
from fxlib.spec.workload import Batch, Workload
from fxlib.utils.pytree import mapped


def batches_of(workload: Workload) -> tuple[Batch, ...]:
    """Return the workload's batches; described ones are drawn from its seed, the same in every process.

    Raises:
        WorkloadError: a description leaves open what to draw.
    """
    if workload.spec is None:
        return workload.real_batches
    return draw(workload.spec, workload.seed)


def copy_of(batch: Batch) -> Batch:
    """Return the batch on storage and in containers of its own, so that a model that writes its inputs spoils no step.

    A tensor that stands in several places still does.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: object) -> object:
        return copies.setdefault(id(leaf), leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf

    inputs, kwargs = mapped(copy, (batch.inputs, dict(batch.kwargs)))
    return replace(batch, inputs=inputs, kwargs=kwargs)


def samples_in(batch: Batch) -> int:
    """Return the size of the first dimension of the first tensor among the inputs that has one; 1 if none has."""
    tensors = (tensor for name, tensor in batch.named.items() if name != "target")
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
