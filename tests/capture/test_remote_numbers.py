"""Numbers, flags, strings and None that a server returns beside tensors: used in the program, and in every rewrite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rpc import rpc_async, rpc_sync

import fxlib
from fxlib.equivalence.verify import verify
from fxlib.errors import ContractError
from fxlib.runtime import is_issue, ops
from tests.wire.support import over_the_wire

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("world")]
ROWS = torch.arange(6)


def _described(rows: Tensor) -> tuple[Any, ...]:
    return torch.empty(rows.shape[0], 2), {"scale": 0.5, "count": 3, "done": True, "unit": "ms", "error": None}


@fxlib.remote(
    reads="tables",
    returns=(None, {"scale": None, "count": None, "done": None, "unit": None, "error": None}),
)
def looked_up(rows: Tensor) -> tuple[Any, ...]:
    numbers = {"scale": 0.25, "count": int(rows.sum()), "done": True, "unit": "ms", "error": None}
    return rows.float()[:, None] + torch.ones(2), numbers


class Scales(nn.Module):
    """Uses numbers of a result in arithmetic, sends one on, and decides by what the contract declares."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.decides = decides

    def forward(self, rows: Tensor) -> Tensor:
        later = rpc_async("ps1", looked_up, args=(rows + 1,))
        found, numbers = rpc_sync("ps0", looked_up, args=(rows,))
        total = found * numbers["scale"] + numbers["count"]
        if self.decides and numbers["done"] and numbers["unit"] == "ms" and numbers["error"] is None:
            total = total * 2 if rows.shape[0] > 1 else total
        other, more = later.wait()
        return total + other / (more["count"] + 1)


@pytest.mark.parametrize("how", ["trace", "export"])
def test_numbers_of_results_are_values_of_the_graph_and_of_every_rewrite(how: Any) -> None:
    model = Scales(decides=how == "export")
    contract = fxlib.Contract(reads=frozenset({"tables"}), returns=_described)
    contracts = {f"{__name__}:looked_up": contract} if how == "export" else None
    captured = fxlib.capture(model, sample_inputs=[ROWS], how=how, contracts=contracts)
    sent = over_the_wire(captured, root=captured)
    scheduled = fxlib.optimize(captured, recipe="schedule")
    assert any(node.target in (ops.issue_call, ops.start_call) for node in scheduled.graph.nodes)
    for module in (captured, sent, scheduled):
        for rows in (ROWS, ROWS + 10):
            assert torch.equal(module(rows), model(rows))
    assert verify(model, scheduled, [ROWS])


def test_a_flag_that_a_contract_declares_is_looked_at() -> None:
    contract = fxlib.Contract(
        reads=frozenset({"tables"}), returns=lambda rows: (_described(rows)[0], {**_described(rows)[1], "done": False})
    )
    captured = fxlib.capture(
        Scales(decides=True), sample_inputs=[ROWS], how="export", contracts={f"{__name__}:looked_up": contract}
    )
    with pytest.raises(ContractError, match="the contract declares False in the result, and it is True"):
        captured(ROWS)


class Tables(nn.Module):
    """Some of several tables, of whose places in the model it tells with its answer."""

    def __init__(self, *places: int) -> None:
        super().__init__()
        self.places = list(places)

    def forward(self, rows: Tensor) -> Any:
        return [rows.float() * (place + 2) for place in self.places], self.places


class Placed(nn.Module):
    """Puts what servers answer into places that they name, as DLRMs over RPC do."""

    def __init__(self, *tables: Any) -> None:
        super().__init__()
        self.tables = list(tables)

    def forward(self, rows: Tensor) -> Tensor:
        found: list[Any] = [None] * 4
        for table in self.tables:
            answers, places = table.rpc_sync().forward(rows)
            for index, place in enumerate(places):
                found[place] = answers[index]
        return torch.stack(found)


def placed(*places: int, traced: bool) -> fxlib.Contract:
    told = [fxlib.Exactly(place) for place in places]
    like = ([None, None], told) if traced else lambda rows: ([torch.empty(rows.shape[0])] * 2, told)
    return fxlib.Contract(reads=frozenset({"parameters"}), returns=like)


@pytest.mark.parametrize("how", ["trace", "export"])
def test_numbers_that_are_always_the_same_decide_by_handle_and_are_looked_at_in_each_run(how: Any) -> None:
    model = Placed(rpc.remote("ps0", Tables, (3, 0)), rpc.remote("ps1", Tables, (1, 2)))
    contracts = {
        f"tables_{server}.forward": placed(*places, traced=how == "trace")
        for server, places in enumerate([(3, 0), (1, 2)])
    }
    captured = fxlib.capture(model, sample_inputs=[ROWS], how=how, contracts=contracts)
    scheduled = fxlib.optimize(captured, recipe="schedule")
    assert sum(map(is_issue, scheduled.graph.nodes)) == 2
    sent = over_the_wire(scheduled, root=captured)
    for module in (captured, scheduled, sent):
        assert torch.equal(module(ROWS), model(ROWS))
    rpc.rpc_sync("ps1", _swap, (model.tables[1],))
    with pytest.raises(ContractError, match="the contract declares 1 in the result, and it is 2"):
        scheduled(ROWS)


def _swap(tables: Any) -> None:
    tables.local_value().places.reverse()
