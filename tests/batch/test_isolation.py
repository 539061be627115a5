"""What shares memory within one value does so after a batch; what two values share is copied, whatever holds it."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import rpc

from fxlib.batch import KnownRows
from fxlib.batch.isolation import _nothing_twice, isolated

Pair = namedtuple("Pair", "whole, part")  # noqa: PYI024 - as a server might return


def test_what_overlaps_in_one_value_overlaps_in_its_copy() -> None:
    x = torch.zeros(8)
    _, (whole, part) = isolated([(x,), (x, x[2:4])])
    part.add_(1.0)
    assert whole.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert x.tolist() == [0.0] * 8


@pytest.mark.parametrize("view", [lambda x: x[:, :1].expand(3, 4), lambda x: x[1:, 1:3], lambda x: x.t()])
def test_a_copy_lies_in_memory_as_what_it_is_a_copy_of(view: Any) -> None:
    x = torch.arange(12.0).view(3, 4)
    _, copied = isolated([x, view(x)])
    assert copied.stride() == view(x).stride()
    assert torch.equal(copied, view(x))


def test_values_in_named_tuples_share_nothing() -> None:
    x = torch.zeros(4)
    first, second = isolated([Pair(x, x[1:]), Pair(x, x[1:])])
    first.whole.add_(1.0)
    assert second.whole.tolist() == [0.0] * 4
    assert second.part.data_ptr() == second.whole[1:].data_ptr()
    assert type(second) is Pair


@dataclass
class Request:
    """As a program sends keys."""

    keys: Any


class Held:
    """As a server returns what it keeps; nobody looks into it."""

    def __init__(self) -> None:
        self.rows = torch.zeros(2)


SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "a dataclass": (lambda: Request(torch.zeros(2)), lambda x: x.keys.add_(1), lambda x: x.keys.tolist()),
    "an object": (Held, lambda x: x.rows.add_(1), lambda x: x.rows.tolist()),
    "an array": (lambda: np.zeros(2), lambda x: np.add(x, 1, out=x), lambda x: x.tolist()),
    "a set": (lambda: {0}, lambda x: x.add(1), sorted),
    "bytes": (lambda: bytearray(2), lambda x: x.append(1), list),
    "objects in a list": (lambda: [Held()], lambda x: x[0].rows.add_(1), lambda x: x[0].rows.tolist()),
    "known rows": (lambda: KnownRows(rows=torch.zeros(2)), lambda x: x.rows.add_(1), lambda x: x.rows.tolist()),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_one_does_to_an_object_no_other_sees(name: str) -> None:
    make, write, read = SHARED[name]
    shared = make()
    before = read(shared)
    first, second = isolated([(shared,), (shared,)])
    write(first[0])
    assert read(second[0]) == before
    assert type(second[0]) is type(shared)


@pytest.mark.parametrize("object_first", [True, False])
def test_an_object_does_not_share_its_tensor_with_the_bare_one(object_first: bool) -> None:
    x = torch.zeros(2)
    values: list[Any] = [Request(x), x] if object_first else [x, Request(x)]
    found = isolated(values)
    held = next(each for each in found if isinstance(each, Request))
    bare = next(each for each in found if isinstance(each, torch.Tensor))
    bare.add_(1)
    assert torch.equal(held.keys + 1, bare)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("bare_first", [True, False])
def test_a_sparse_tensor_shares_its_values_with_no_other_value(layout: torch.layout, *, bare_first: bool) -> None:
    values, places = torch.ones(3), torch.arange(3)
    sparse = (
        torch.sparse_coo_tensor(places[None], values, (3,), check_invariants=True)
        if layout is torch.sparse_coo
        else torch.sparse_csr_tensor(torch.tensor([0, 3]), places, values, (1, 3), check_invariants=True)
    )
    found = isolated([values, sparse, sparse] if bare_first else [sparse, values, sparse])
    values.zero_()
    assert [float(each.to_dense().sum()) for each in found if each is not values] == [3.0, 3.0]


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag])
def test_a_copy_is_as_lazy_as_what_it_is_a_copy_of(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.complex(torch.ones(2), torch.arange(2.0))
    _, copied = isolated([x, view(x)])
    assert (copied.is_conj(), copied.is_neg()) == (view(x).is_conj(), view(x).is_neg()) != (False, False)
    assert torch.equal(copied, view(x))
    x.zero_()
    assert copied.abs().sum() > 0


def test_what_an_object_holds_twice_stays_one() -> None:
    x = torch.zeros(2)
    first, _ = isolated([(Request(x), Request(x)), (Request(x),)])
    first[0].keys.add_(1)
    assert first[1].keys.tolist() == [1.0, 1.0]


def test_what_nobody_can_write_to_stays_the_same_object() -> None:
    for each in (torch.float32, torch.Size([2]), rpc.WorkerInfo, len, isolated, b"rows"):
        first, second = isolated([[each], [each]])
        assert first[0] is each
        assert second[0] is each


def test_tuples_that_hold_one_another_many_times_are_looked_at_once() -> None:
    x = torch.zeros(2)
    nested: tuple[Any, ...] = (x,)
    for _ in range(60):
        nested = (nested, nested)
    first, second = isolated([nested, nested])
    while isinstance(first, tuple):
        assert first[0] is first[-1]
        first, second = first[0], second[0]
    first.add_(1)
    assert second.tolist() == [0.0, 0.0]


def test_calls_without_arguments_have_nothing_in_common() -> None:
    values: list[Any] = [((), {}), ((), {})]
    assert _nothing_twice(values)
    assert not _nothing_twice([((1,), values), ((1,), values)])
