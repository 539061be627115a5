"""Calls aimed outside of their tensors, made of valid ones.

Each integer becomes negative, large, and as large as an integer can be; each tensor of integers holds such; each tensor
changes its dimensions, sizes, strides and dtype, one at a time and several at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.out_of_bounds.samples import Call

Change = Callable[[Any], Any]

INTEGERS = (
    *(0, 1, -1, 2, 3, -2, -3, 5, 17, 1000, -1000, 1 << 20, -(1 << 20), (1 << 31) - 1, -(1 << 31), (1 << 31) + 7),
    *((1 << 32) + 1, (1 << 40) + 3, 1 << 62, (1 << 63) - 1, -(1 << 63)),
)
"""No multiple of the space between two guarded blocks is among them, for elements of any size."""
REALS = (0.0, -1.0, 2.0, 0.5, 1e9, -1e9, 1e30, 1e-30, float("inf"), float("-inf"), float("nan"))
TEXTS = ("sum", "mean", "none", "max", "reflect", "replicate", "constant", "bilinear", "nearest", "fro", "")
_DTYPES = (
    *(torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
    *(torch.bfloat16, torch.float16, torch.int8),
)
_STRANGE = (torch.qint8, torch.quint4x2, torch.bits8, torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.complex32)


def _fill(value: Any) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, _fit(value, tensor.dtype))

    return change


def _one(value: Any, last: bool) -> Change:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous().clone()
        tensor.view(-1)[-1 if last else 0] = _fit(value, tensor.dtype)
        return tensor

    return change


def _fit(value: Any, dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return bool(value)
    if dtype.is_floating_point or dtype.is_complex:
        return float(value)
    limits = torch.iinfo(dtype)
    return max(limits.min, min(limits.max, int(value)))


SHAPES: tuple[Change, ...] = (
    lambda tensor: tensor[0],
    lambda tensor: tensor[None],
    lambda tensor: tensor[..., None],
    lambda tensor: tensor[..., 0],
    lambda tensor: tensor[:0],
    lambda tensor: tensor[..., :0],
    lambda tensor: tensor[:1],
    lambda tensor: tensor[..., :1],
    lambda tensor: tensor[:-1],
    lambda tensor: tensor[..., :-1],
    lambda tensor: tensor[:, :-1],
    lambda tensor: tensor[:, :1],
    lambda tensor: tensor[:, :0],
    lambda tensor: tensor.reshape(-1),
    lambda tensor: tensor.reshape(-1)[0],
    lambda tensor: tensor.reshape(-1)[:1],
    lambda tensor: torch.cat([tensor, tensor]),
    lambda tensor: torch.cat([tensor, tensor], -1),
    lambda tensor: torch.cat([tensor, tensor], 1),
    lambda tensor: torch.cat([tensor, tensor[..., :1]], -1),
    lambda tensor: torch.cat([tensor] * 9),
    lambda tensor: tensor.transpose(0, -1),
    lambda tensor: tensor.reshape(-1)[:1].expand(tensor.shape),
    lambda tensor: tensor.flip(0)[::2],
    lambda tensor: tensor.expand(3, *tensor.shape),
    lambda tensor: torch.zeros((), dtype=tensor.dtype),
    lambda tensor: torch.zeros((0,), dtype=tensor.dtype),
    lambda tensor: torch.zeros((1,) * 12, dtype=tensor.dtype),
    lambda tensor: torch.zeros((1,) * 65, dtype=tensor.dtype),
    lambda tensor: torch.zeros((1 << 40, 0), dtype=tensor.dtype),
    lambda tensor: torch.zeros((1,), dtype=tensor.dtype).expand(1 << 20),
)


def _become(new: Any) -> Change:
    return lambda _: new


def changes(value: Any) -> list[Change]:  # noqa: PLR0911 - one for each class
    """Return what may become of one argument."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return []
        values = REALS if value.is_floating_point() or value.is_complex() else INTEGERS
        found = [*SHAPES, *(lambda tensor, dtype=dtype: tensor.to(dtype) for dtype in _DTYPES)]
        for each in values:
            found += [_fill(each), _one(each, True), _one(each, False)]
        return found
    if isinstance(value, bool):
        return [lambda old: not old]
    if isinstance(value, int):
        return [_become(new) for new in (*INTEGERS, value + 1, value - 1, -value - 1, 2 * value)]
    if isinstance(value, float):
        return [_become(new) for new in (*REALS, 1 << 40)]
    if isinstance(value, str):
        return [_become(new) for new in TEXTS]
    if isinstance(value, torch.dtype):
        return [_become(new) for new in (*_DTYPES, *_STRANGE)]
    if isinstance(value, (list, tuple)):
        return [
            lambda old: old[:-1],
            lambda old: (*old, *old[-1:]),
            lambda old: old[:1],
            _become(()),
            lambda old: (*old, *old),
        ]
    return []


def cases(calls: list[Call], count: int, seed: str, schema: Any = None) -> Iterator[Call]:
    """Yield up to `count` calls with something changed.

    First, in an order drawn from the seed, what can become of single arguments of the first two calls; then of several
    arguments of any.
    """
    chance = random.Random(seed)
    if schema is not None:  # arguments that have defaults are given, in half of the calls
        calls = [
            (args, kwargs | dict(chance.sample(more, min(len(more), 1 + index % 2))) if index % 2 else kwargs)
            for index, (args, kwargs) in enumerate(calls * 4)
            for more in [optional((args, kwargs), schema)]
        ]
    singles = [
        (call, path, change)
        for call in calls[: 2 if schema is None else 5]
        for path, value in _paths(call)
        for change in changes(value)
    ]
    chance.shuffle(singles)
    made = 0
    for call, path, change in singles[: 2 * count // 3]:
        if (found := _apply(call, [(path, change)])) is not None:
            made += 1
            yield found
    while made < count:
        call = chance.choice(calls)
        paths = [(path, options) for path, value in _paths(call) if (options := changes(value))]
        if not paths:
            return
        picked = chance.sample(paths, min(len(paths), chance.choice((1, 2, 2, 3, 4))))
        made += 1
        if (found := _apply(call, [(path, chance.choice(options)) for path, options in picked])) is not None:
            yield found


def optional(call: Call, schema: Any) -> list[tuple[str, Any]]:
    """Return the arguments that a call leaves at their defaults, and values of which changes may be made."""
    args, kwargs = call
    tensor = next((each for each in pytree.tree_leaves(call) if isinstance(each, torch.Tensor)), torch.ones(3))
    pool = {
        "Tensor": tensor,
        "number": 1,
        "float": 0.5,
        "int": 1,
        "SymInt": 1,
        "bool": True,
        "str": "mean",
        "Scalar": 1,
    }
    pool |= {"List[int]": [1], "List[SymInt]": [1], "ScalarType": torch.float32, "List[float]": [0.5]}
    found: list[tuple[str, Any]] = []
    for position, each in enumerate(schema.arguments):
        kind = str(each.real_type)
        kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
        if position >= len(args) and each.name not in kwargs and kind in pool:
            found.append((each.name, pool[kind]))
    return found


def _paths(call: Call) -> list[tuple[tuple[Any, ...], Any]]:
    """All values in a call: the leaves, and the lists that hold them, inner ones first."""
    found: list[tuple[tuple[Any, ...], Any]] = []

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                walk(each, (*path, key))
        elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            for index, each in enumerate(value[:8]):
                walk(each, (*path, index))
            if len(path) > 1:
                found.append((path, value))
        else:
            found.append((path, tuple(value) if isinstance(value, torch.Size) else value))

    walk(call, ())
    return found


def _apply(call: Call, made: list[tuple[tuple[Any, ...], Change]]) -> Call | None:
    def rebuild(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            value = {key: rebuild(each, (*path, key)) for key, each in value.items()}
        elif isinstance(value, (list, tuple)):
            value = (
                type(value)(rebuild(each, (*path, index)) for index, each in enumerate(value))
                if type(value) in (list, tuple)
                else tuple(value)
            )
        for where, change in made:
            if where == path:
                value = change(value)
        return value

    try:
        return rebuild(call, ())
    except (RuntimeError, IndexError, ValueError, TypeError, OverflowError):
        return None


def placed(call: Call, gradients: bool) -> Call:
    """Return the call with its tensors in new memory, of no more bytes than their elements reach."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        if 0 in value.stride():
            reach = 1 + sum(max(size - 1, 0) * step for size, step in zip(value.shape, value.stride(), strict=True))
            new = torch.zeros(reach, dtype=value.dtype)
            if value.numel():
                new.fill_(value.flatten()[:1].item())
            new = new.as_strided(value.shape, value.stride())
        else:
            new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
        return new.requires_grad_(gradients and (value.is_floating_point() or value.is_complex()))

    return pytree.tree_map(move, call)
