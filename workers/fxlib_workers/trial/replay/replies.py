"""Made-up results: tensors as they were recorded, with values that a digest decides."""

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
"""Standard deviation of floats: small, so that losses and exponentials of them stay finite."""

_DRAWN: Final = 1 << 16
"""So many values of a tensor are new; larger ones repeat them, which is as good for comparing, and much faster."""

_SPREAD: Final = 0.25
"""Values are scaled by a factor for each tensor, within this of 1: two tensors that begin at one place differ, too."""

_PLAIN: Final = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def told(*parts: object) -> bytes:
    """Return the digest of a call: of the bits of its tensors and the text of its plain values.

    An RRef counts by the name of what it leads to, and a function by its own. Anything else counts by its class alone:
    its text may hold an address, which differs from run to run.
    """
    total = hashlib.blake2b(digest_size=16)
    _tell(total, parts)
    return total.digest()


def joined(*parts: bytes) -> bytes:
    """Return one digest for several."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def reply_of(returns: Result, seed: bytes, *, attached: bool) -> Any:
    """Make up a result: equal seeds give equal bits.

    Floats are about N(0, 0.1 squared); integers are 0 or 1, so that they are rows of any table with two; what is no
    tensor is as it was recorded.

    Args:
        returns: its structure.
        seed: decides the values.
        attached: whether tensors that took a gradient take one.
    """
    return _made(returns, (joined(seed, place.to_bytes(4)) for place in count()), attached)


def computed_from(reply: Any, inputs: Sequence[torch.Tensor]) -> Any:
    """Let the tensors of a reply that take a gradient belong to the autograd graph of the tensors that were sent.

    Distributed autograd waits for the gradient of each of these: with a reply that has nothing to do with them it would
    wait for ever.
    """
    if not inputs:
        return reply
    apply: Any = _Computed.apply
    return pytree.tree_map_only(torch.Tensor, lambda each: apply(each, *inputs) if each.requires_grad else each, reply)


class _Computed(torch.autograd.Function):
    """A tensor as it is, whose backward makes up a gradient for what it is said to be computed from."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.inputs = [(each.shape, each.dtype) for each in inputs]
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (gradient,) = gradients
        share = gradient.sum() / max(1, gradient.numel())
        return (gradient, *(share.to(dtype).expand(shape).contiguous() for shape, dtype in ctx.inputs))


def _tell(total: hashlib.blake2b, value: object) -> None:
    # By hand, since these are nearly all there is: `tree_flatten` alone takes as long as all else that an answer needs.
    if isinstance(value, torch.Tensor):
        total.update(f"#{digest(value)}".encode())
    elif isinstance(value, _PLAIN):
        _tell_text(total, f"{type(value).__qualname__} {value!r}")
    elif type(value) in {tuple, list}:
        _tell_all(total, type(value).__qualname__, value)  # type: ignore[arg-type]
    elif type(value) is dict:
        _tell_all(total, f"dict {list(value)!r}", list(value.values()))
    else:
        leaves, structure = pytree.tree_flatten(value)
        if structure.is_leaf():
            _tell_text(total, f"{type(value).__qualname__} {_name(value)}")
        else:
            _tell_all(total, str(structure), leaves)


def _name(value: object) -> str:
    if isinstance(value, rpc.PyRRef):
        held = value.local_value() if value.is_owner() else None
        return str(getattr(held, "__dict__", {}).get("_name", ""))
    if callable(value):
        return str(getattr(value, "function", None) or getattr(value, "__qualname__", ""))
    return ""


def _tell_all(total: hashlib.blake2b, kind: str, values: Sequence[object]) -> None:
    _tell_text(total, f"{kind} of {len(values)}")
    for each in values:
        _tell(total, each)


def _tell_text(total: hashlib.blake2b, text: str) -> None:
    total.update(f"{len(text)}:{text}".encode())  # no two sequences of texts and tensors are written alike


def _made(returns: Result, seeds: Iterator[bytes], attached: bool) -> Any:
    if isinstance(returns, TensorShape):
        return _tensor(returns, next(seeds)).requires_grad_(attached and returns.requires_grad)
    if isinstance(returns, Opaque):
        return returns.value
    if isinstance(returns, Mapping):
        return {name: _made(each, seeds, attached) for name, each in returns.items()}
    return type(returns)(_made(each, seeds, attached) for each in returns)


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
        bits = _pool().bits  # of two stretches: their places are 32 bits of the seed, and one's alone 16
        drawn = (bits[begin : begin + few] ^ bits[other : other + few]).to(dtype)
    if few < size:
        drawn = drawn.repeat(-(-size // few))[:size].clone()
    return drawn.view(described.shape)


class _Pool(NamedTuple):
    """Drawn once, and alike in all processes; a tensor's values are a stretch of them."""

    floats: torch.Tensor
    bits: torch.Tensor


@cache
def _pool() -> _Pool:
    generator = torch.Generator().manual_seed(0)
    return _Pool(
        floats=torch.randn(2 * _DRAWN, generator=generator) * SCALE,
        bits=torch.randint(0, 2, (2 * _DRAWN,), generator=generator, dtype=torch.uint8),
    )
