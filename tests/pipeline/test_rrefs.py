"""Reads of objects behind RRefs run ahead, too: a method by itself, by a helper, and a remote module's forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.fx import GraphModule

import fxlib
from fxlib.spec.contract import Contract
from fxlib.spec.workload import Server
from tests.capture.servers import Table, remote_method
from tests.shared.rpc_world import NAMES, rpc_world

pytestmark = pytest.mark.slow

READS = Contract(reads=frozenset({"weight"}))


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with rpc_world(*(Server(name=name) for name in NAMES)):
        yield


class Bags(nn.Module):
    """Reads tables in a loop over RRefs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: Any = [rpc.remote(name, nn.EmbeddingBag, args=(10, 4)) for name in (*NAMES, *NAMES)]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([table.rpc_sync().forward(rows) for table in self.tables], dim=1)


class Helped(nn.Module):
    """Calls a method by a helper, on the owner of an RRef."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = rpc.remote("ps0", Table)

    def forward(self, rows: torch.Tensor) -> Any:
        return remote_method(Table.forward, self.table, rows)


class Remote(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = RemoteModule("ps0", nn.EmbeddingBag, (10, 4))

    def forward(self, rows: torch.Tensor) -> Any:
        return self.table(rows)


def batches(count: int = 6) -> list[torch.Tensor]:
    return [torch.tensor([[place, 1, place], [9, place, 2]]) for place in range(count)]


def halve(rref: Any) -> None:
    with torch.no_grad():
        rref.local_value().weight.mul_(0.5)


class Rows:
    """A table whose rows are looked up, and trained."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.arange(rows * 4, dtype=torch.float32).view(rows, 4).sin()

    @fxlib.remote(reads="rows", keys="ids", gradient=".push", concurrent=True)
    def look_up(self, scale: float, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids] * scale

    @fxlib.remote(writes="rows", keys="ids")
    def push(self, scale: float, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        self.rows.index_add_(0, ids, gradient * scale, alpha=-0.1)

    def held(self) -> torch.Tensor:
        return self.rows


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [rpc.remote(name, Rows, args=(50,)) for name in NAMES]
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first, second = (table.rpc_sync().look_up(2.0, ids) for table in self.tables)
        return (first * second * self.weight).sum()


@pytest.mark.parametrize("rewritten", [False, True])
def test_rows_behind_rrefs_are_trained_to_the_same_bits(rewritten: bool) -> None:
    def trained(*, ahead: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        model: Any = Trained()
        module: nn.Module = fxlib.capture(model)
        if rewritten:
            module = fxlib.optimize(module)
        steps = [torch.tensor([place, place + 1, 3, place]) for place in range(12)]
        loop = fxlib.pipeline(steps, module, trainers=1)
        losses = []
        for ids in loop if ahead else steps:
            loss = module(ids)
            loss.backward()
            fxlib.push_gradients(module)
            losses.append(loss.detach())
        return losses, [table.rpc_sync().held() for table in model.tables], loop.taken

    expected, found = trained(ahead=False), trained(ahead=True)
    assert all(map(torch.equal, found[0], expected[0]))
    assert all(map(torch.equal, found[1], expected[1]))
    assert found[2] > 0


MODELS: dict[type[nn.Module], int] = {Bags: 4, Helped: 1, Remote: 1}
"""The models, and the number of their calls."""


def captured(model: nn.Module) -> GraphModule:
    contracts = {"tests.capture.servers:Table.forward": READS} if isinstance(model, Helped) else {}
    return fxlib.capture(model, contracts=contracts)


@pytest.mark.parametrize("kind", MODELS)
def test_an_evaluation_reads_ahead_and_sees_what_it_would(kind: type[nn.Module]) -> None:
    model = kind().eval()
    with torch.no_grad():
        expected = [model(rows) for rows in batches()]
        module = fxlib.optimize(captured(model))
        loop = fxlib.pipeline(batches(), module, depth=2)
        found = [module(rows) for rows in loop]
    assert all(map(torch.equal, found, expected))
    assert (loop.taken, loop.unused) == (MODELS[kind] * 5, 0)


@pytest.mark.parametrize("kind", [Bags, Helped])
def test_what_the_loop_writes_behind_an_rref_is_seen(kind: type[nn.Module]) -> None:
    def seen(model: Any, module: nn.Module, *, ahead: bool) -> list[torch.Tensor]:
        rref, found = (model.tables[0] if isinstance(model, Bags) else model.table), []
        for rows in fxlib.pipeline(batches(), module) if ahead else batches():
            found.append(module(rows))
            rpc.rpc_sync(rref.owner(), halve, args=(rref,))
        return found

    with torch.no_grad():
        torch.manual_seed(0)
        model = kind().eval()
        module = captured(model)
        state = [weight.clone() for weight in _weights(model)]
        expected = seen(model, model, ahead=False)
        _load(model, state)
        assert all(map(torch.equal, seen(model, module, ahead=True), expected))


def test_a_method_that_the_graph_does_not_call_may_write_anything() -> None:
    model: Any = Helped().eval()
    with torch.no_grad():
        module = captured(model)
        loop = fxlib.pipeline(batches(), module)
        for rows in loop:
            module(rows)
            remote_method(Table.requires_grad_, model.table)
    assert loop.taken == 0


def test_another_rref_in_its_place_is_read_for_itself() -> None:
    model = Bags().eval()
    with torch.no_grad():
        module = fxlib.capture(model)
        for place, rows in enumerate(fxlib.pipeline(batches(), module)):
            if place == 2:
                model.tables[0] = rpc.remote("ps1", nn.EmbeddingBag, args=(10, 4))
            assert torch.equal(module(rows), model(rows))


@pytest.mark.filterwarnings("ignore:.*distributed autograd:fxlib.errors.FxlibWarning")
def test_an_evaluation_between_steps_of_distributed_autograd_reads_ahead() -> None:
    model = Bags()
    module = fxlib.capture(model)
    for rows in fxlib.pipeline(batches(3), module):
        with autograd.context() as context:
            autograd.backward(context, [module(rows).sum()])
    loop = fxlib.pipeline(batches(), module, depth=2)
    expected = [model(rows) for rows in batches()]
    assert all(map(torch.equal, [module(rows) for rows in loop], expected))
    assert loop.taken > 0


def _weight(rref: Any) -> torch.Tensor:
    found: torch.Tensor = rref.local_value().weight.detach()
    return found


def _put(rref: Any, weight: torch.Tensor) -> None:
    with torch.no_grad():
        rref.local_value().weight.copy_(weight)


def _rrefs(model: Any) -> list[Any]:
    return model.tables if isinstance(model, Bags) else [model.table]


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [rpc.rpc_sync(rref.owner(), _weight, args=(rref,)) for rref in _rrefs(model)]


def _load(model: nn.Module, weights: list[torch.Tensor]) -> None:
    for rref, weight in zip(_rrefs(model), weights, strict=True):
        rpc.rpc_sync(rref.owner(), _put, args=(rref, weight))
