"""The inputs of a step: real batches, or a description that holds none of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fxlib.errors import WorkloadError

Range = tuple[float, float]

MAX_COUNT = 4096
"""Different batches that a description may ask for."""

MAX_ELEMENTS = 1 << 36
"""Of all tensors of all batches that a description asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Description of one tensor of a batch.

    Floats are drawn from N(0, 1), or uniformly from [low, high) when bounds are given; integers from [low, high).

    Raises:
        WorkloadError: a size is negative, only one bound is given, or the range is empty.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        """Check sizes and bounds."""
        if any(size < 0 for size in self.shape):
            raise WorkloadError(f"negative size in {self.shape}", where="Tensors.shape")
        if (self.low is None) != (self.high is None):
            raise WorkloadError("one bound without the other", where="Tensors.low", hint="Give low= and high=.")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise WorkloadError(f"[{self.low}, {self.high}) is empty", where="Tensors.high", hint="high is exclusive.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch: positional inputs and keyword inputs of the forward, and the loss's target, as tensors."""

    inputs: tuple[torch.Tensor, ...] = ()
    kwargs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    target: torch.Tensor | None = None

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """All tensors, as `input.0`, ..., `kwarg.NAME` and `target`: their names in errors and on the wire."""
        tensors = {f"input.{index}": value for index, value in enumerate(self.inputs)}
        tensors |= {f"kwarg.{name}": value for name, value in self.kwargs.items()}
        return tensors if self.target is None else {**tensors, "target": self.target}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Batches described by shape, dtype and index range; `count` different ones are drawn from the workload's seed."""

    inputs: tuple[Tensors, ...] = ()
    kwargs: Mapping[str, Tensors] = field(default_factory=dict)
    target: Tensors | None = None
    count: int = 4

    def __post_init__(self) -> None:
        """Check that there is something to draw.

        Raises:
            WorkloadError: there is no batch, no input, or too much of it.
        """
        if not 1 <= self.count <= MAX_COUNT:
            raise WorkloadError(f"{self.count} is not in 1 to {MAX_COUNT}", where="BatchSpec.count")
        if not self.inputs and not self.kwargs:
            raise WorkloadError("no input", where="BatchSpec.inputs")
        elements = self.count * sum(math.prod(each.shape) for each in self.named.values())
        if elements > MAX_ELEMENTS:
            raise WorkloadError(f"{elements} elements are more than {MAX_ELEMENTS}", where="BatchSpec")

    @property
    def named(self) -> dict[str, Tensors]:
        """All descriptions, named as in `Batch.named`."""
        described = {f"input.{index}": value for index, value in enumerate(self.inputs)}
        described |= {f"kwarg.{name}": value for name, value in self.kwargs.items()}
        return described if self.target is None else {**described, "target": self.target}


def normalize(batches: object, targets: Sequence[torch.Tensor] | None) -> tuple[Batch, ...]:
    """Turn tensors, tuples of tensors and `Batch` objects into batches of one structure.

    Raises:
        WorkloadError: there is none, one is something else, targets do not match, or structures differ.
    """
    if not isinstance(batches, Sequence) or not batches:
        raise WorkloadError(
            "a sequence of batches is wanted", where="Workload.batches", hint="Pass [batch, ...], at least one."
        )
    if targets is not None and len(targets) != len(batches):
        raise WorkloadError(f"{len(targets)} targets for {len(batches)} batches", where="Workload.targets")
    result = [_as_batch(batch, f"Workload.batches[{index}]") for index, batch in enumerate(batches)]
    if targets is not None:
        result = [replace(batch, target=target) for batch, target in zip(result, targets, strict=True)]
    for index, batch in enumerate(result):
        _check(batch, result[0], f"Workload.batches[{index}]")
    return tuple(result)


def describe(batches: Sequence[Batch], *, count: int, ranges: Mapping[str, Range]) -> BatchSpec:
    """Describe batches by the first one's shapes and dtypes, and the range of each integer tensor over all of them.

    Args:
        batches: of one structure.
        count: how many batches a trial draws.
        ranges: [low, high) by name (`input.0`, `kwarg.NAME`, `target`), for tensors whose own range is not to be told.

    Raises:
        WorkloadError: a range names no tensor, or an integer tensor is empty and has no range.
    """
    first = batches[0]
    if unknown := sorted(ranges.keys() - first.named.keys()):
        raise WorkloadError(
            f"no tensor is called {unknown[0]!r}", where="ranges", hint=f"There are {', '.join(first.named)}."
        )
    specs = {name: _describe(name, [batch.named[name] for batch in batches], ranges.get(name)) for name in first.named}
    return BatchSpec(
        inputs=tuple(specs[f"input.{index}"] for index in range(len(first.inputs))),
        kwargs={name: specs[f"kwarg.{name}"] for name in first.kwargs},
        target=specs.get("target"),
        count=count,
    )


def draw(spec: BatchSpec, seed: int) -> tuple[Batch, ...]:
    """Draw described batches from a seed: the same ones in every process.

    Raises:
        WorkloadError: a description leaves open what to draw.
    """
    generator = torch.Generator().manual_seed(seed)
    return tuple(_draw_batch(spec, generator) for _ in range(spec.count))


def _as_batch(batch: object, where: str) -> Batch:
    if isinstance(batch, Batch):
        return batch
    if isinstance(batch, Mapping):
        return Batch(kwargs=dict(batch))
    if isinstance(batch, torch.Tensor):
        return Batch(inputs=(batch,))
    if isinstance(batch, (tuple, list)):
        return Batch(inputs=tuple(batch))
    raise WorkloadError(
        f"{type(batch).__name__} is no batch",
        where=where,
        hint="Pass a tensor, a tuple of tensors, a dict of tensors, or an fxlib.Batch.",
    )


def _check(batch: Batch, first: Batch, where: str) -> None:
    for name, value in batch.named.items():
        if not isinstance(value, torch.Tensor):
            raise WorkloadError(f"{type(value).__name__} is no tensor", where=f"{where} {name}")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise WorkloadError("only dense tensors with values can be sent", where=f"{where} {name}")
    if not batch.inputs and not batch.kwargs:
        raise WorkloadError("no input", where=where)
    if batch.named.keys() != first.named.keys():
        raise WorkloadError(f"has {', '.join(batch.named)}, and the first batch {', '.join(first.named)}", where=where)


def _describe(name: str, tensors: Sequence[torch.Tensor], bounds: Range | None) -> Tensors:
    first = tensors[0]
    if bounds is None and not (first.is_floating_point() or first.is_complex() or first.dtype == torch.bool):
        filled = [tensor for tensor in tensors if tensor.numel()]
        if not filled:
            raise WorkloadError("is empty, so its range is unknown", where=name, hint="Give it in ranges=.")
        bounds = (min(int(t.min()) for t in filled), max(int(t.max()) for t in filled) + 1)
    low, high = (None, None) if bounds is None else (float(bounds[0]), float(bounds[1]))
    return Tensors(shape=tuple(first.shape), dtype=first.dtype, low=low, high=high)


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
