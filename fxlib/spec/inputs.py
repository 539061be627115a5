"""The inputs of a step: real batches, or a description without any of their values.

An input is a tensor, a number, a flag, a string or None, or any nesting of these in tuples, lists, dicts, named tuples,
dataclasses, and containers of classes that torch's pytree knows.

Keys repeat from batch to batch, some more often than others, and generated batches imitate this. Each position in the
last dimension of an integer tensor is a column of keys of its own, such as the keys of one table. The share of a
column's keys that also occur in the batch before decides how many of the rows read ahead a push changes. One exponent
describes how unevenly keys occur: that of a bounded Pareto distribution (Zipf's law, on a continuum) over the range of
the tensor, chosen such that two keys of a column coincide as often as was observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from fxlib.errors import WorkloadError
from fxlib.utils import pytree

_MAX_SKEW = 8.0
"""Largest exponent; with it, all but a few in a thousand draws give the first key."""
_LEAST_SKEW = 0.05
_HEAD = 1 << 12
"""Number of leading keys whose probabilities are added up one by one."""
_TRIES = 16
"""Maximum number of times that a key is drawn again because it repeats, or does not, against the wanted share."""
_SMALL = 1e-6
"""Distance from 1 below which an exponent counts as 1."""
Range = tuple[float, float]
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)

MAX_VALUES = 1 << 16
"""Maximum number of containers and leaves in the inputs of one batch."""

MAX_COUNT = 4096
"""Maximum number of different batches in a description."""

MAX_ELEMENTS = 1 << 36
"""Maximum number of elements in all tensors of all batches of a description."""


_DEVIATIONS = 3.0
"""Standard deviations within which a count of coincidences is left to chance."""


def repeats_in(tensors: Sequence[torch.Tensor]) -> float | None:
    """Return the share of keys that also occur in the tensor before; None if there are too few tensors."""
    columns = [_columns(each) for each in tensors]
    shares = [
        float(_is_among(following, before).double().mean())
        for before, following in pairwise(columns)
        if following.numel() and before.shape[1] == following.shape[1]
    ]
    return sum(shares) / len(shares) if shares else None


def skew_of(tensors: Sequence[torch.Tensor], size: int) -> float:
    """Return the exponent of the distribution of keys out of `size`; 0 if it is uniform."""
    same = pairs = 0
    for tensor in tensors:
        columns = _columns(tensor)
        counts = _column_ids(columns).unique(return_counts=True)[1]
        same += int((counts * (counts - 1)).sum())
        pairs += columns.numel() * (len(columns) - 1)
    if not pairs or size < 2:
        return 0.0
    if same <= pairs / size + 2 * _DEVIATIONS * math.sqrt(pairs / (2 * size)):
        return 0.0  # as uniform keys may: their pairs, each counted twice here, coincide so often by chance
    wanted, low, high = same / pairs, 0.0, _MAX_SKEW
    while high - low > _LEAST_SKEW / 4:
        middle = (low + high) / 2
        low, high = (middle, high) if _collision(middle, size) < wanted else (low, middle)
    return 0.0 if low < _LEAST_SKEW else round(low, 2)


def draw_keys(
    shape: tuple[int, ...],
    size: int,
    *,
    skew: float,
    repeats: float | None,
    before: torch.Tensor | None,
    count: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Draw keys from [0, size).

    Args:
        shape: the shape of the result.
        size: the number of keys to draw from.
        skew: see `skew_of`.
        repeats: see `repeats_in`.
        before: the keys of the batch before; None for the first batch.
        count: the number of batches, which are used in rotation. The first repeats the last only by chance, so the
            others compensate.
        generator: the random generator to draw from.
    """
    keys = _columns(_drawn(shape, size, skew, generator))
    if repeats is None or before is None or not keys.numel():
        return keys.reshape(shape)
    earlier = _columns(before)
    by_chance = float(_is_among(keys, earlier).double().mean())
    share = min(1.0, max(0.0, (repeats * count - by_chance) / (count - 1)))
    again = torch.rand(keys.shape, generator=generator).argsort(0) < round(share * len(keys))
    for _ in range(_TRIES):
        wrong = _is_among(keys, earlier) != again
        if not wrong.any():
            return keys.reshape(shape)
        keys = torch.where(wrong, _columns(_drawn(shape, size, skew, generator)), keys)
    order = torch.rand(earlier.shape, generator=generator).argsort(0)
    return torch.where(again & ~_is_among(keys, earlier), earlier.gather(0, order), keys).reshape(shape)


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    """Return keys as [rows, columns]."""
    return (tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.reshape(-1, 1)).to(torch.int64)


def _is_among(keys: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return whether each key occurs among the others of the same column."""
    own, before = _column_ids(torch.cat([keys, others])).split([len(keys), len(others)])
    return torch.isin(own, before)


def _column_ids(columns: torch.Tensor) -> torch.Tensor:
    """Return numbers that are equal exactly for equal keys of one column."""
    number = columns.unique(return_inverse=True)[1].reshape(columns.shape)
    return number * columns.shape[1] + torch.arange(columns.shape[1])


def _drawn(shape: tuple[int, ...], size: int, skew: float, generator: torch.Generator) -> torch.Tensor:
    if not skew:
        return torch.randint(0, size, shape, generator=generator)
    power, uniform = 1.0 - skew, torch.rand(shape, generator=generator, dtype=torch.float64)
    logarithm = uniform * math.log(size + 1)
    if abs(power) > _SMALL:
        logarithm = (uniform * math.expm1(power * math.log(size + 1))).log1p() / power
    return (logarithm.exp().floor().to(torch.int64) - 1).clamp(0, size - 1)


def _collision(skew: float, size: int) -> float:
    """Return the probability that two keys are equal: a sum over the first keys, an integral over the others."""
    head = min(size, _HEAD)
    whole = _integral(skew, 1.0, size + 1.0)
    singly = sum((_integral(skew, key, key + 1.0) / whole) ** 2 for key in range(1, head + 1))
    return singly + _integral(2 * skew, head + 1.0, size + 1.0) / whole**2


def _integral(skew: float, low: float, high: float) -> float:
    """Return the integral of x ** -skew."""
    power = 1.0 - skew
    if abs(power) <= _SMALL:
        return math.log(high / low)
    return math.exp(power * math.log(low)) * math.expm1(power * math.log(high / low)) / power


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Describes one tensor of a batch.

    Floats are drawn from N(0, 1), or uniformly from [low, high) if bounds are given; integers are drawn from [low,
    high), with the repetition and unevenness that the docstring of this module describes.

    Raises:
        WorkloadError: a size is negative, only one bound is given, the range is empty or does not fit the dtype, or a
            figure is out of range.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float | None = None
    high: float | None = None
    """Both bounds are sent as doubles, which are exact for integers up to 2**53."""
    repeats: float | None = None
    """Share of integers that also occur in the same column of the batch before; None leaves it to chance."""
    skew: float = 0.0
    """Exponent of the distribution of integers; 0 means uniform."""

    def __post_init__(self) -> None:
        """Check sizes and bounds."""
        if any(size < 0 for size in self.shape):
            raise WorkloadError(f"negative size in {self.shape}", where="Tensors.shape")
        if (self.low is None) != (self.high is None):
            raise WorkloadError("one bound without the other", where="Tensors.low", hint="Give low= and high=.")
        if self.low is not None and self.high is not None:
            _check_bounds(self.dtype, self.low, self.high)
        if self.repeats is not None and not 0 <= self.repeats <= 1:
            raise WorkloadError(f"{self.repeats} is not a share", where="Tensors.repeats")
        if not 0 <= self.skew <= _MAX_SKEW:
            raise WorkloadError(f"{self.skew} is not in 0 to {_MAX_SKEW:g}", where="Tensors.skew")


def _check_bounds(dtype: torch.dtype, low: float, high: float) -> None:
    try:
        least, most, widest = _limits(dtype)
    except (TypeError, RuntimeError) as error:
        raise WorkloadError(f"a range of {dtype} cannot be drawn from", where="Tensors.dtype") from error
    for name, bound in (("low", low), ("high", high)):
        if not least <= bound <= most:
            raise WorkloadError(f"{bound} does not fit {dtype}", where=f"Tensors.{name}")
    if not (dtype.is_floating_point or dtype.is_complex):
        low, high = int(low), int(high)  # as they are drawn
    if not low < high:
        raise WorkloadError(f"[{low}, {high}) is empty", where="Tensors.high", hint="high is exclusive.")
    if high - low > widest:
        raise WorkloadError(f"[{low}, {high}) is too wide to be drawn from", where="Tensors.high")


def _limits(dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the least and the greatest bound, and the greatest width; float32 and int64 are what is drawn."""
    if dtype.is_floating_point or dtype.is_complex:
        widest = torch.finfo(torch.float32).max
        most = min(torch.finfo(dtype).max, widest)
        return -most, most, widest
    integers = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
    return integers.min, integers.max + 1, torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch: positional and keyword inputs of the forward, nested as they are, and the loss's target."""

    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: torch.Tensor | None = None

    @property
    def leaves(self) -> dict[str, Any]:
        """All leaves of the inputs, and the target: `input.0`, `input.1[0]`, `kwarg.NAME.field`, `target`."""
        return _leaves(self)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """All tensors under the names from `leaves`, which errors and the wire use, too."""
        return {name: value for name, value in self.leaves.items() if isinstance(value, torch.Tensor)}

    @property
    def structure(self) -> str:
        """The containers of the inputs, as text."""
        return pytree.structure((self.inputs, dict(self.kwargs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Describes batches by shape, dtype and index range; `count` different ones are drawn from the workload's seed.

    Inputs are nested as in a `Batch`, with `Tensors` in place of each tensor. Other leaves are the same in all batches.
    """

    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Tensors | None = None
    count: int = 4

    def __post_init__(self) -> None:
        """Check that there is something to draw.

        Raises:
            WorkloadError: there is no batch, or the batches are too large.
        """
        if not 1 <= self.count <= MAX_COUNT:
            raise WorkloadError(f"{self.count} is not in 1 to {MAX_COUNT}", where="BatchSpec.count")
        _check_count(self, "BatchSpec")
        elements = self.count * sum(math.prod(each.shape) for each in self.named.values())
        if elements > MAX_ELEMENTS:
            raise WorkloadError(f"{elements} elements are more than {MAX_ELEMENTS}", where="BatchSpec")

    @property
    def named(self) -> dict[str, Tensors]:
        """All descriptions, named as in `Batch.named`."""
        return {name: value for name, value in _leaves(self).items() if isinstance(value, Tensors)}


def normalize(batches: object, targets: Sequence[torch.Tensor] | None) -> tuple[Batch, ...]:
    """Turn tensors, tuples and dicts of inputs, and `Batch` objects into batches of one structure.

    Raises:
        WorkloadError: there is none, one is something else, targets do not match, or structures differ.
    """
    if not isinstance(batches, Sequence) or not batches:
        raise WorkloadError(
            "a sequence of batches is required", where="Workload.batches", hint="Pass [batch, ...], at least one."
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
    """Describe batches by the shapes and dtypes of the first, and each integer tensor's range over all of them.

    Args:
        batches: batches of one structure.
        count: how many batches a trial draws.
        ranges: [low, high) by name (`input.0`, `kwarg.NAME`, `target`), for tensors whose own range stays private.

    Raises:
        WorkloadError: a range names no tensor, or an integer tensor is empty and has no range.
    """
    first = batches[0]
    if unknown := sorted(ranges.keys() - first.named.keys()):
        raise WorkloadError(
            f"no tensor is called {unknown[0]!r}", where="ranges", hint=f"There are {', '.join(first.named)}."
        )
    leaves = [batch.leaves for batch in batches]
    for name, value in leaves[0].items():
        others = [each[name] for each in leaves]
        is_tensor = isinstance(value, torch.Tensor)
        if any(other.dtype != value.dtype if is_tensor else repr(other) != repr(value) for other in others):
            raise WorkloadError(
                f"{'has a dtype that' if is_tensor else 'is not a tensor and'} differs between batches, which a "
                "description cannot express",
                where=name,
                hint="Pass real batches, or batches in which it is the same.",
            )
    tensors = {name: [each[name] for each in leaves] for name in first.named}
    specs = {name: _describe(name, each, ranges.get(name)) for name, each in tensors.items()}
    inputs, kwargs = _mapped(specs.get, first)
    return BatchSpec(inputs=inputs, kwargs=kwargs, target=specs.get("target"), count=count)


def with_ranges_of(spec: BatchSpec, batches: Sequence[Batch]) -> BatchSpec:
    """Return a description that draws floats without bounds from the range that they have in batches, zero included."""
    found = dict[str, Tensors]()
    for name, tensor in spec.named.items():
        values = [each.named[name] for each in batches if each.named[name].numel()]
        if not (tensor.dtype.is_floating_point and tensor.low is None and values):
            continue
        low, high = min(0.0, *(float(each.min()) for each in values)), max(0.0, *(float(each.max()) for each in values))
        if math.isfinite(low) and math.isfinite(high) and low < high:
            found[name] = replace(tensor, low=low, high=high)
    inputs, kwargs = _mapped(found.get, spec)
    return replace(spec, inputs=inputs, kwargs=kwargs)


def draw(spec: BatchSpec, seed: int) -> tuple[Batch, ...]:
    """Draw described batches from a seed; they are the same in every process.

    Raises:
        WorkloadError: a description does not determine what to draw.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Batch] = []
    for _ in range(spec.count):
        drawn.append(_draw_batch(spec, generator, drawn[-1].named if drawn else {}))
    return tuple(drawn)


def _as_batch(batch: object, where: str) -> Batch:
    if isinstance(batch, Batch):
        return _plain(batch, where)
    if isinstance(batch, Mapping):
        return _plain(Batch(kwargs=dict(batch)), where)
    if isinstance(batch, torch.Tensor):
        return Batch(inputs=(batch,))
    if isinstance(batch, (tuple, list)):
        return _plain(Batch(inputs=tuple(batch)), where)
    raise WorkloadError(
        f"{type(batch).__name__} is not a batch",
        where=where,
        hint="Pass a tensor, a tuple or a dict of inputs, or an fxlib.Batch.",
    )


def _plain(batch: Batch, where: str) -> Batch:
    """Return the batch with numbers from NumPy and enums converted to Python's own."""
    try:
        _check_count(batch, where)
        if all(pytree.python_number(leaf) is None for leaf in batch.leaves.values()):
            return batch
    except RecursionError:
        raise WorkloadError("a container holds itself, or is nested too deep", where=where) from None

    def plain(leaf: object) -> object:
        number = pytree.python_number(leaf)
        return leaf if number is None else number

    inputs, kwargs = pytree.mapped(plain, (batch.inputs, dict(batch.kwargs)))
    return replace(batch, inputs=inputs, kwargs=kwargs)


def _check_count(batch: Batch | BatchSpec, where: str) -> None:
    """Reject a batch that is too large to be sent, before walking all of it."""
    if pytree.has_more_leaves_than((batch.inputs, dict(batch.kwargs)), MAX_VALUES):
        problem = f"its inputs hold more than {MAX_VALUES:,} values"
        raise WorkloadError(problem, where=where, hint="Make tensors of long lists.")


def _leaves(batch: Batch | BatchSpec) -> dict[str, Any]:
    found = {
        name: leaf
        for prefix, values in (("input", enumerate(batch.inputs)), ("kwarg", batch.kwargs.items()))
        for key, value in values
        for name, leaf in pytree.leaves(value, f"{prefix}.{key}", is_leaf=_is_description)
    }
    return found if batch.target is None else {**found, "target": batch.target}


def _mapped(function: Callable[[str, Any], Any], batch: Batch | BatchSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs with the result of a function for the name and the value of each leaf, one after another."""
    names = iter(_leaves(batch))
    nested = batch.inputs, dict(batch.kwargs)
    return pytree.mapped(lambda leaf: function(next(names), leaf), nested, is_leaf=_is_description)


def _is_description(value: object) -> bool:
    return isinstance(value, Tensors)


def _check(batch: Batch, first: Batch, where: str) -> None:
    named = batch.named
    for name, value in batch.leaves.items():
        if not isinstance(value, torch.Tensor):
            if type(value) not in _PLAIN or name == "target":
                raise WorkloadError(
                    f"an input of type {type(value).__name__} cannot be sent",
                    where=f"{where} {name}",
                    hint="Inputs are tensors, numbers, flags, strings, None, and nested containers of them.",
                )
            continue
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise WorkloadError("only dense tensors with values can be sent", where=f"{where} {name}")
    if batch is not first and named.keys() != first.named.keys():
        raise WorkloadError(f"has {', '.join(named)}, and the first batch {', '.join(first.named)}", where=where)
    if batch is not first and batch.structure != first.structure:
        raise WorkloadError(f"is nested as {batch.structure}, and the first batch as {first.structure}", where=where)


def _describe(name: str, tensors: Sequence[torch.Tensor], bounds: Range | None) -> Tensors:
    first = tensors[0]
    if bounds is None and not (first.is_floating_point() or first.is_complex() or first.dtype == torch.bool):
        filled = [tensor.to(torch.int64) for tensor in tensors if tensor.numel()]
        if not filled:
            raise WorkloadError("is empty, so its range is unknown", where=name, hint="Give it in ranges=.")
        bounds = _around(min(int(each.min()) for each in filled), max(int(each.max()) for each in filled) + 1)
    low, high = (None, None) if bounds is None else bounds
    try:
        described = Tensors(shape=tuple(first.shape), dtype=first.dtype, low=low, high=high)
    except WorkloadError as error:
        raise WorkloadError(str(error), where=name, hint="Give its range in ranges=.") from error
    if low is None or high is None or first.is_floating_point() or first.is_complex() or name == "target":
        return described
    size = int(high) - int(low)
    repeats, skew = repeats_in(tensors), skew_of(tensors, size)
    if repeats is not None and not skew and _is_by_chance(repeats, tensors, size):
        repeats = None
    return replace(described, repeats=repeats, skew=skew)


def _around(low: int, high: int) -> Range:
    """Return the narrowest range of floats that holds a range of integers."""
    least, most = float(low), float(high)
    least = math.nextafter(least, -math.inf) if least > low else least
    most = math.nextafter(most, math.inf) if most < high else most
    return least, most


def _is_by_chance(repeats: float, tensors: Sequence[torch.Tensor], size: int) -> bool:
    """Return whether uniform keys out of `size` repeat as often from batch to batch."""
    columns = [_columns(each) for each in tensors]
    counts = [(following.numel(), len(before)) for before, following in pairwise(columns) if following.numel()]
    keys = sum(number for number, _ in counts)
    if size < 2:
        return True
    expected = sum(number * -math.expm1(rows * math.log1p(-1 / size)) for number, rows in counts) / keys
    return abs(repeats - expected) <= _DEVIATIONS * math.sqrt(expected * (1.0 - expected) / keys) + 1 / keys


def _draw_batch(spec: BatchSpec, generator: torch.Generator, before: Mapping[str, torch.Tensor]) -> Batch:
    inputs, kwargs = _mapped(
        lambda name, leaf: (
            _draw(name, leaf, generator, before.get(name), spec.count) if isinstance(leaf, Tensors) else leaf
        ),
        spec,
    )
    target = None if spec.target is None else _draw("target", spec.target, generator, None, spec.count)
    return Batch(inputs=inputs, kwargs=kwargs, target=target)


def _draw(
    name: str, described: Tensors, generator: torch.Generator, before: torch.Tensor | None, count: int
) -> torch.Tensor:
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
    low, size = int(described.low), int(described.high) - int(described.low)
    keys = draw_keys(
        shape,
        size,
        skew=described.skew,
        repeats=described.repeats,
        before=None if before is None else before.to(torch.int64) - low,
        count=count,
        generator=generator,
    )
    return (keys + low).to(dtype)


def _drawable(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype.is_complex else torch.float32


def samples_in(batch: Batch) -> int:
    """Return the size of the first dimension of the first input tensor that has one; 1 if none has."""
    tensors = (tensor for name, tensor in batch.named.items() if name != "target")
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 1)
