"""Methods called through a helper, as in PyTorch's RPC tutorials: each call has the contract of its own method."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Node

import fxlib
from fxlib import wire
from fxlib.recipes import recipes
from fxlib.runtime import is_call, is_issue, is_wait
from fxlib.runtime.gradients.plain_forward import train_as_written
from fxlib.runtime.ops.contract_lookup import class_of_method, method_called
from tests.capture import servers
from tests.capture.checks import targets
from tests.capture.servers import Counted, Table, call_method, remote_method
from tests.wire.support import over_the_wire

pytestmark = pytest.mark.usefixtures("world")
ROWS = torch.zeros(4, dtype=torch.long)
READ = fxlib.Contract(reads=frozenset({"weight"}))


class Helped(nn.Module):
    """A module of torch, a method that declares what it does, one that does not, and one that writes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = rpc.remote("ps0", nn.Embedding, args=(10, 3))
        self.table = rpc.remote("ps0", Table)
        self.counted = rpc.remote("ps1", Counted)

    def forward(self, rows: torch.Tensor) -> Any:
        found = remote_method(nn.Embedding.forward, self.own, rows)
        found = found + remote_method(Table.rows, self.table, rows, scale=2.0)
        found = found + remote_method(Table.forward, self.table, rows)
        return found + remote_method(Counted.count, self.counted, rows)


def calls(module: torch.fx.GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if is_call(node)]


def contracts(module: torch.fx.GraphModule) -> list[fxlib.Contract | None]:
    return [node.meta.get("contract") for node in calls(module)]


def test_a_call_through_a_helper_has_the_contract_of_the_method() -> None:
    captured = fxlib.capture(Helped())
    own, rows, forward, count = contracts(captured)

    assert own is not None
    assert own.is_read
    assert rows is not None
    assert rows.reads == {"weight"}
    assert forward is None
    assert count is not None
    assert count.writes == {"count"}
    assert [node.args[1] for node in calls(captured)] == [f"{servers.NAME}:call_method"] * 4


@pytest.mark.parametrize("name", [".forward", f"{servers.NAME}:Table.forward"])
def test_a_contract_that_is_stated_for_one_method_is_that_of_its_calls_alone(name: str) -> None:
    stated = fxlib.Contract(reads=frozenset({"stated"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = fxlib.capture(Helped(), contracts={name: stated})
        recipes.apply(captured, "schedule", contracts={name: stated})

    own, rows, forward, count = contracts(captured)
    assert forward is not None
    assert forward.reads == {"stated"}
    assert own is not None
    assert (own.reads == {"stated"}) is name.startswith(".")
    assert rows is not None
    assert rows.reads == {"weight"}
    assert count is not None
    assert count.writes == {"count"}


def test_reads_through_a_helper_overlap_and_writes_stay_where_they_are() -> None:
    captured = fxlib.capture(Helped(), contracts={f"{servers.NAME}:Table.forward": READ})
    sent = over_the_wire(captured)
    rewritten = wire.decode(wire.encode(recipes.apply(sent, "schedule").module).graph, root=captured)

    nodes = list(rewritten.graph.nodes)
    issues = [place for place, node in enumerate(nodes) if is_issue(node)]
    waits = [place for place, node in enumerate(nodes) if is_wait(node)]
    assert len(issues) >= 3
    assert sorted(issues)[2] < min(waits)
    expected = captured(ROWS)
    torch.testing.assert_close(rewritten(ROWS), expected + 1)  # it counts its calls


class Pushed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counted = rpc.remote("ps1", Counted)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, rows: torch.Tensor) -> Any:
        return remote_method(Counted.read, self.counted, rows) * self.scale


def test_the_gradient_of_a_method_called_through_a_helper_is_pushed_to_a_method_of_the_same_object() -> None:
    model = Pushed()
    captured = fxlib.capture(model)
    captured(ROWS).sum().backward()
    fxlib.push_gradients(captured)

    assert targets(captured) == ["remote_call", "track_gradient"]
    ((pushed_rows, gradient),) = model.counted.rpc_sync().taken()
    assert torch.equal(pushed_rows, ROWS)
    assert torch.equal(gradient, torch.ones(4, 3))


@pytest.mark.parametrize("refused", [False, True], ids=["captured", "refused"])
def test_it_is_pushed_where_the_model_s_own_forward_runs(refused: bool) -> None:
    model = Pushed()
    trained: Any = model if refused else fxlib.capture(model)
    if refused:
        train_as_written(model, {})
    else:
        model.counted = rpc.remote("ps1", Counted)  # not the one that the graph was made for
    trained(ROWS).sum().backward()
    fxlib.push_gradients(trained)

    ((pushed_rows, gradient),) = model.counted.rpc_sync().taken()
    assert torch.equal(pushed_rows, ROWS)
    assert torch.equal(gradient, torch.ones(4, 3))


def test_what_is_stated_for_the_method_is_so_where_the_own_forward_runs(recwarn: pytest.WarningsRecorder) -> None:
    model = Pushed()
    train_as_written(model, {f"{servers.NAME}:Counted.read": fxlib.Contract(reads=frozenset({"rows"}))})
    assert not remote_result_takes_gradient(model)
    fxlib.push_gradients(model)
    assert not recwarn.list


def remote_result_takes_gradient(model: Pushed) -> bool:
    model.scale.requires_grad_(False)
    return bool(model(ROWS).requires_grad)


def logs_first(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    servers.pushed()
    return method(rref.local_value(), *args, **kwargs)


def adds_one(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs) + 1


def calls_twice(method: Any, rref: Any, *args: Any) -> Any:
    method(rref.local_value(), *args)
    return method(rref.local_value(), *args)


def swaps(method: Any, rref: Any, first: Any, second: Any) -> Any:
    return method(rref.local_value(), second, first)


@rpc.functions.async_execution
def decorated(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def on_another(rref: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


@pytest.mark.parametrize("helper", [logs_first, adds_one, calls_twice, swaps, decorated, on_another])
def test_a_helper_that_does_more_than_call_the_method_is_a_function_like_any_other(helper: Callable[..., Any]) -> None:
    rref: Any = rpc.RRef(Table())
    assert method_called(helper, (Table.rows, rref, ROWS, 1.0)) is None


def documented(function: Any, handle: Any, *inputs: Any, **options: Any) -> Any:
    """Call a method of the object behind a handle."""
    return function(handle.local_value(), *inputs, **options)


def test_a_helper_is_known_by_its_code_whatever_its_names_are() -> None:
    rref: Any = rpc.RRef(Table())
    for helper in (call_method, documented):
        found = method_called(helper, (Table.rows, rref, ROWS))
        assert found is not None
        assert found.method is Table.rows
        assert found.args == (ROWS,)


def test_a_method_that_its_class_has_no_more_has_no_class() -> None:
    assert class_of_method(Table.rows) is Table
    assert class_of_method(torch.relu) is None
    assert class_of_method(documented) is None


class Branching(nn.Module):
    """What tracing cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.table = rpc.remote("ps0", Table)
        self.top = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> Any:
        found = remote_method(Table.forward, self.table, rows)
        if found.shape[0] != rows.shape[0]:
            raise AssertionError(f"expected {rows.shape[0]}, got {found.shape[0]}")
        return self.top(found)


@pytest.mark.slow
def test_a_helper_is_exported_with_results_declared_for_the_method_alone() -> None:
    model = Branching()
    stated = fxlib.Contract(reads=frozenset({"weight"}), returns=lambda rows: torch.empty(rows.shape[0], 3))
    captured = fxlib.capture(model, how="export", sample_inputs=(ROWS,), contracts={".forward": stated})

    assert targets(captured) == ["remote_call"]
    assert torch.equal(captured(ROWS), model(ROWS))
