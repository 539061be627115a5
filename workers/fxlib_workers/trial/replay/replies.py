"""Synthetic replies: tensors of the recorded shapes, with values that a digest determines."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import rpc
from torch.utils import _pytree as pytree

from fxlib.spec.profile import Opaque, Result, TensorShape
from fxlib_workers.trial.digests import digest

SCALE: Final = 0.1
"""The standard deviation of floats, which is small so that losses and exponentials of them stay finite."""

_DRAWN: Final = 1 << 16
"""The number of values drawn for a tensor. A larger tensor repeats them, which is much faster and just as good."""

_SPREAD: Final = 0.25
"""The largest distance from 1 of the factor that scales each tensor's values, so that tensors of equal draws differ."""

_PLAIN: Final = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def call_digest(*parts: object) -> bytes:
    """Return the digest of a call, from the bits of its tensors and the text of its plain values.

    An RRef counts by the name of its object, and a function by its own name. Anything else counts only by its class,
    since its text may hold an address, which differs from run to run.
    """
    total = hashlib.blake2b(digest_size=16)
    _update(total, parts)
    return total.digest()


def combined(*parts: bytes) -> bytes:
    """Return one digest of several."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def make_reply(returns: Result, seed: bytes, *, attached: bool) -> Any:
    """Make a synthetic result; equal seeds give equal bits.

    Floats are about N(0, 0.1²); integers are 0 or 1, so that they are row indices of any table with two rows; values
    other than tensors are as recorded.

    Args:
        returns: the structure of the result.
        seed: the digest that determines the values.
        attached: whether tensors that took a gradient when recorded take one now.
    """
    return _make(returns, (combined(seed, index.to_bytes(4)) for index in count()), attached)


def attach_to(reply: Any, inputs: Sequence[torch.Tensor]) -> Any:
    """Attach those tensors of a reply that take a gradient to the autograd graph of the tensors that were sent.

    Distributed autograd waits for the gradient of each tensor that was sent, and would wait forever for one that the
    reply does not depend on.
    """
    if not inputs:
        return reply
    apply: Any = _Computed.apply
    return pytree.tree_map_only(torch.Tensor, lambda each: apply(each, *inputs) if each.requires_grad else each, reply)


class _Computed(torch.autograd.Function):
    """Returns a tensor unchanged; its backward makes a synthetic gradient for each of the inputs."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.inputs = [(each.shape, each.dtype) for each in inputs]
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (gradient,) = gradients
        share = gradient.sum() / max(1, gradient.numel())
        return (gradient, *(share.to(dtype).expand(shape).contiguous() for shape, dtype in ctx.inputs))


def _update(total: hashlib.blake2b, value: object) -> None:
    # The common cases are handled here, since `tree_flatten` alone takes as long as the rest of an answer.
    if isinstance(value, torch.Tensor):
        total.update(f"#{digest(value)}".encode())
    elif isinstance(value, _PLAIN):
        _update_text(total, f"{type(value).__qualname__} {value!r}")
    elif type(value) in {tuple, list}:
        _update_all(total, type(value).__qualname__, value)  # type: ignore[arg-type]
    elif type(value) is dict:
        _update_all(total, f"dict {list(value)!r}", list(value.values()))
    else:
        leaves, structure = pytree.tree_flatten(value)
        if structure.is_leaf():
            _update_text(total, f"{type(value).__qualname__} {_name(value)}")
        else:
            _update_all(total, str(structure), leaves)


def _name(value: object) -> str:
    if isinstance(value, rpc.PyRRef):
        held = value.local_value() if value.is_owner() else None
        return str(getattr(held, "__dict__", {}).get("_name", ""))
    if callable(value):
        return str(getattr(value, "function", None) or getattr(value, "__qualname__", ""))
    return ""


def _update_all(total: hashlib.blake2b, kind: str, values: Sequence[object]) -> None:
    _update_text(total, f"{kind} of {len(values)}")
    for each in values:
        _update(total, each)


def _update_text(total: hashlib.blake2b, text: str) -> None:
    total.update(f"{len(text)}:{text}".encode())  # the length distinguishes different sequences of texts and tensors


def _make(returns: Result, seeds: Iterator[bytes], attached: bool) -> Any:
    if isinstance(returns, TensorShape):
        return _tensor(returns, next(seeds)).requires_grad_(attached and returns.requires_grad)
    if isinstance(returns, Opaque):
        return returns.value
    if isinstance(returns, Mapping):
        return {name: _make(each, seeds, attached) for name, each in returns.items()}
    return type(returns)(_make(each, seeds, attached) for each in returns)


def _tensor(described: TensorShape, seed: bytes) -> torch.Tensor:
    size, dtype = math.prod(described.shape), described.dtype
    few = min(size, _DRAWN)
    begin, other = (int.from_bytes(seed[at : at + 4]) % _DRAWN for at in (0, 4))
    if dtype.is_floating_point or dtype.is_complex:
        drawn, floats = _pool().floats[begin : begin + few], _pool().floats
        if dtype.is_complex:
            drawn = torch.complex(drawn, floats[other : other + few])
        drawn = (drawn * (1 + _SPREAD * (int.from_bytes(seed[8:12]) / 2**31 - 1))).to(dtype)
    else:
        bits = _pool().bits  # two stretches, since their positions take 32 bits of the seed, and one position takes 16
        drawn = (bits[begin : begin + few] ^ bits[other : other + few]).to(dtype)
    if few < size:
        drawn = drawn.repeat(-(-size // few))[:size].clone()
    return drawn.view(described.shape)


def made_rows(numbers: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [len(numbers), *shape], row by row: equal numbers give equal bits.

    Args:
        numbers: the 64-bit number of each row.
        shape: the shape of a row.
        dtype: a real dtype.
    """
    indices = (numbers & (_DRAWN - 1)).unsqueeze(1) + torch.arange(math.prod(shape)) % _DRAWN
    if dtype.is_floating_point:
        factors = 1 + _SPREAD * ((numbers >> 32) & 0xFFFF).to(torch.float32) / 2**16
        made = (_pool().floats[indices] * factors.unsqueeze(1)).to(dtype)
    else:
        made = _pool().bits[indices].to(dtype)
    return made.view(len(numbers), *shape)


class _Pool(NamedTuple):
    """Values that are drawn once, identically in all processes. A tensor's values are a stretch of them."""

    floats: torch.Tensor
    bits: torch.Tensor


@cache
def _pool() -> _Pool:
    generator = torch.Generator().manual_seed(0)
    return _Pool(
        floats=torch.randn(2 * _DRAWN, generator=generator) * SCALE,
        bits=torch.randint(0, 2, (2 * _DRAWN,), generator=generator, dtype=torch.uint8),
    )
