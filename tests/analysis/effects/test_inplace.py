"""What is said of operators that write, held against torch: the same bits, in whatever strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from fxlib.analysis.operators import operator_tables as words
from fxlib.analysis.operators.in_place import commutes, is_elementwise, is_exact, variant_of

Overload = torch._ops.OpOverload[..., Any]
SHAPE = (3, 19, 21)
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x,
    lambda x: torch.zeros(21, 19, 3, dtype=x.dtype).permute(2, 1, 0).copy_(x),
    lambda x: torch.zeros(3, 20, 22, dtype=x.dtype)[:, 1:, 1:].copy_(x),
    lambda x: torch.zeros(3, 19, 42, dtype=x.dtype)[:, :, ::2].copy_(x),
    lambda x: torch.zeros(19, 3, 23, dtype=x.dtype)[:, :, :21].transpose(0, 1).copy_(x),
)
Call = tuple[tuple[Any, ...], dict[str, Any]]


def calls(dtype: torch.dtype) -> Iterator[Call]:
    """Arguments that some operators take."""
    x, y, truth = torch.randn(SHAPE).to(dtype), torch.randn(SHAPE).to(dtype), torch.rand(SHAPE) > 0.5
    yield from (((x, *rest), {}) for rest in ((), (y,), (y, y), (1 / 3,), (3,), (0.1, 0.5), (truth, y), (truth, 0.5)))
    yield from (((x, y), {"alpha": 0.3}), ((x, y), {"rounding_mode": "floor"}), ((truth, x, y), {}))
    yield (x,), {"dtype": torch.float64}


def outcome(target: Overload, call: Call) -> torch.Tensor | None:
    try:
        result = target(*call[0], **call[1])
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return None
    return result if isinstance(result, torch.Tensor) else None


def laid(call: Call, kinds: tuple[int, ...]) -> Call:
    """The same arguments in other layouts."""
    kind = iter(kinds)
    return tuple(LAYOUTS[next(kind)](each) if isinstance(each, torch.Tensor) else each for each in call[0]), call[1]


def node_of(target: Overload, call: Call) -> Node:
    graph = Graph()
    args = tuple(
        graph.placeholder(f"x{place}") if isinstance(each, torch.Tensor) else each for place, each in enumerate(call[0])
    )
    for node, each in zip(args, call[0], strict=True):
        if isinstance(node, Node):
            node.meta["val"] = each
    return graph.call_function(target, args, call[1])


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def overloads(names: Iterator[str]) -> Iterator[Overload]:
    for name in names:
        packet = getattr(torch.ops.aten, name)
        yield from (getattr(packet, each) for each in packet.overloads())


MIXED = ((0, 0, 0), (1, 1, 1), (2, 0, 4), (3, 1, 2), (4, 2, 0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_operators_give_the_same_bits_in_every_layout_and_strides_that_are_known(dtype: torch.dtype) -> None:
    tried = set()
    for target, call in itertools.product(overloads(iter(sorted(words.EXACT))), list(calls(dtype))):
        expected = outcome(target, call)
        if expected is None or not is_exact(node_of(target, call)):
            continue
        tried.add(target)
        for kinds in MIXED:
            args, kwargs = laid(call, kinds)
            result = target(*args, **kwargs)
            assert torch.equal(bits(result), bits(expected)), (target, kinds, kwargs)
            without = tuple(
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
                if isinstance(each, torch.Tensor)
                else each
                for each in args
            )
            assert target(*without, **kwargs).stride() == result.stride(), (target, kinds, kwargs)
    assert len(tried) > 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_elementwise_operator_writes_the_bits_that_it_would_return(dtype: torch.dtype) -> None:
    names = (
        name for name in dir(torch.ops.aten) if isinstance(getattr(torch.ops.aten, name), torch._ops.OpOverloadPacket)
    )
    writers = [each for each in overloads(names) if is_elementwise(each) and variant_of(each) is not None]
    tried = set()
    for target, call in itertools.product(writers, list(calls(dtype))):
        expected = outcome(target, call)
        if expected is None or expected.dtype is not dtype or expected.shape != SHAPE or call[0][0].dtype is not dtype:
            continue
        tried.add(target)
        for kinds in MIXED:
            args, kwargs = laid(call, kinds)
            args = (args[0].clone() if kinds[0] == 0 else args[0], *args[1:])
            result = target(*args, **kwargs)
            variant = variant_of(target)
            assert variant is not None
            assert torch.equal(bits(variant(*args, **kwargs)), bits(result)), (target, kinds, kwargs)
    assert len(tried) > 30


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_commuting_operators_give_the_same_bits_swapped(dtype: torch.dtype) -> None:
    for target, call in itertools.product(overloads(iter(sorted(words.COMMUTATIVE))), list(calls(dtype))):
        if len(call[0]) == 2 and isinstance(call[0][1], torch.Tensor) and commutes(node_of(target, call)):
            one, other = call[0]
            expected, swapped = outcome(target, call), outcome(target, ((other, one), call[1]))
            assert expected is None or (swapped is not None and torch.equal(bits(expected), bits(swapped))), target
