"""The batches of a trial: those that were sent, or new ones drawn as the workload describes them."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxlib.errors import WorkloadError
from fxlib.workload import Batch, BatchSpec, Tensors, Workload


def batches_of(workload: Workload) -> tuple[Batch, ...]:
    """Return the workload's batches; described ones are drawn from its seed, the same in every process.

    Raises:
        WorkloadError: a description leaves open what to draw.
    """
    if workload.spec is None:
        return workload.real_batches
    generator = torch.Generator().manual_seed(workload.seed)
    return tuple(_draw_batch(workload.spec, generator) for _ in range(workload.spec.count))


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


def _draw_batch(spec: BatchSpec, generator: torch.Generator) -> Batch:
    drawn = {name: _draw(name, described, generator) for name, described in spec.named.items()}
    return Batch(
        inputs=tuple(drawn[f"input.{index}"] for index in range(len(spec.inputs))),
        kwargs={name: drawn[f"kwarg.{name}"] for name in spec.kwargs},
        target=drawn.get("target"),
    )


def _draw(name: str, described: Tensors, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = described.shape, described.dtype
    if dtype.is_floating_point or dtype.is_complex:
        if described.low is None or described.high is None:
            return torch.randn(shape, generator=generator, dtype=_drawable(dtype)).to(dtype)
        span = described.high - described.low
        return (torch.rand(shape, generator=generator) * span + described.low).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if described.low is None or described.high is None:
        raise WorkloadError("integers without a range", where=f"BatchSpec {name}", hint="Give low= and high=.")
    return torch.randint(int(described.low), int(described.high), shape, generator=generator).to(dtype)


def _drawable(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype.is_complex else torch.float32
