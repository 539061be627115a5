"""RRefs: what a capture asks of their owners, and where the graph finds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.errors import FxlibWarning
from fxlib.runtime import is_call
from tests.capture import servers
from tests.capture.checks import same
from tests.capture.servers import Table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("world")]
ROWS = torch.zeros(4, dtype=torch.long)


@contextmanager
def messages_counted() -> Iterator[list[str]]:
    """Names of the functions that this process sends, and of the questions for a class."""
    sent: list[str] = []
    invoke, ask = rpc.api._invoke_rpc, rpc.PyRRef.__dict__["_get_type"]

    def counted_invoke(to: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(function.__name__)
        return invoke(to, function, *args, **kwargs)

    def counted_ask(*args: Any, **kwargs: Any) -> Any:
        sent.append("class?")
        return ask(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc.api, "_invoke_rpc", counted_invoke)
        patch.setattr(rpc.PyRRef, "_get_type", counted_ask)
        yield sent


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = rpc.remote("ps0", Table), rpc.remote("ps1", Table)

    def forward(self, rows: torch.Tensor) -> Any:
        looked_up = [table.rpc_sync().rows(rows) for table in (self.first, self.second, self.first)]
        rpc.rpc_async(self.first.owner(), servers.push, (rows, rows))
        return sum(looked_up) + self.first.to_here().weight[0]


def test_a_capture_asks_each_owner_for_the_class_once_and_calls_nothing() -> None:
    model = Tables()
    with messages_counted() as sent:
        captured = fxlib.capture(model)

    assert sent.count("class?") == 2
    assert set(sent) <= {"class?", "_rref_typeof_on_owner"}
    assert rpc.rpc_sync("ps0", servers.pushed) == []
    assert all(
        node.meta["contract"].reads == {"weight"}
        for node in captured.graph.nodes
        if is_call(node) and "rows" in node.name
    )


def test_a_capture_asks_nothing_where_the_request_states_the_contract() -> None:
    model = Tables()
    with messages_counted() as sent:
        captured = fxlib.capture(model, contracts={".rows": fxlib.Contract(pure=True)})

    assert sent == []
    assert next(node for node in captured.graph.nodes if node.name == "rows_1").meta["contract"].pure


def test_an_rref_can_be_used_in_any_way_after_a_capture() -> None:
    model = Tables()
    fxlib.capture(model)

    assert model.first.rpc_async().rows(ROWS).wait().shape == (4, 3)
    assert model.first.remote().rows(ROWS).to_here().shape == (4, 3)
    assert model.first.owner_name() == "ps0"


def test_an_annotation_names_the_class_behind_an_argument() -> None:
    def forward(table: "rpc.RRef[Table]", rows: torch.Tensor) -> Any:
        return table.rpc_sync().rows(rows)

    captured = same(forward, rpc.remote("ps1", Table), ROWS)

    assert next(node for node in captured.graph.nodes if is_call(node)).meta["contract"].reads == {"weight"}


class Own(nn.Module):
    """An RRef to what lives in this very process."""

    def __init__(self) -> None:
        super().__init__()
        self.table = rpc.RRef(Table())

    def forward(self, rows: torch.Tensor) -> Any:
        return (
            self.table.rpc_sync().rows(rows) + self.table.local_value().rows(rows) + self.table.to_here().weight[rows]
        )


def test_an_rref_to_an_own_object() -> None:
    same(Own(), ROWS)


class Client:
    """A plain object that hides the calls."""

    def __init__(self) -> None:
        self.table = rpc.remote("ps1", Table)
        self.calls = self.table.rpc_sync()

    def rows(self, rows: torch.Tensor) -> Any:
        return self.calls.rows(rows) + self.table.rpc_sync(timeout=3).rows(rows)


class Indirect(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.client = Client()

    def forward(self, rows: torch.Tensor) -> Any:
        return self.client.rows(rows)


def test_rrefs_and_call_helpers_inside_of_plain_objects() -> None:
    model = Indirect()
    captured = same(model, ROWS)

    assert [node.target for node in captured.graph.nodes if node.op == "get_attr"] == ["client_table"]
    assert not hasattr(model, "rref")
    assert [node.args[4] for node in captured.graph.nodes if is_call(node)] == [None, 3.0]


def test_a_call_of_a_method_that_runs_later_on_the_server() -> None:
    rref = rpc.remote("ps0", servers.Averager)

    captured = same(lambda x: rref.rpc_async().later(x).wait() + rref.rpc_sync().later(x), torch.zeros(2))

    assert [str(node.args[1]) for node in captured.graph.nodes if node.args[1:2] == (".later",)] == [".later"] * 2


class Brings(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        first = rpc.remote("ps0", servers.embed, args=(x,)).to_here()
        return first + rpc.remote("ps1", servers.embed, args=(x,)).to_here()


def test_a_gradient_that_to_here_loses_is_told_once_where_gradients_are_taken() -> None:
    with pytest.warns(FxlibWarning, match=r"no gradient is pushed .*test_rrefs.py:\d+, though .*call rpc_sync") as told:
        fxlib.capture(Brings())
    assert len(told) == 1
    with torch.no_grad():
        fxlib.capture(Brings())
