"""The batches of a trial: those that were sent, or new ones drawn as the workload describes them."""

from __future__ import annotations

from dataclasses import replace

from fxlib.batches import draw
from fxlib.workload import Batch, Workload


def batches_of(workload: Workload) -> tuple[Batch, ...]:
    """Return the workload's batches; described ones are drawn from its seed, the same in every process.

    Raises:
        WorkloadError: a description leaves open what to draw.
    """
    if workload.spec is None:
        return workload.real_batches
    return draw(workload.spec, workload.seed)


def copy_of(batch: Batch) -> Batch:
    """Return the batch on storage of its own, so that a model that writes its inputs spoils no other step."""
    return replace(
        batch,
        inputs=tuple(tensor.clone() for tensor in batch.inputs),
        kwargs={name: tensor.clone() for name, tensor in batch.kwargs.items()},
    )


def samples_in(batch: Batch) -> int:
    """Return the size of the first dimension of the first input that has one; 1 if none has."""
    tensors = (*batch.inputs, *batch.kwargs.values())
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
