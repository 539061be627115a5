"""Models that hold RRefs and remote modules, the whole way: captured, sent, planned where they lead nowhere, bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.fx import GraphModule

import fxlib
from fxlib import wire
from fxlib.errors import WireError
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule, is_issue, is_wait
from fxlib.wire import OpaqueRRef
from tests.capture.checks import same
from tests.capture.servers import Table
from tests.wire.support import over_the_wire

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("world")]
ROWS = torch.zeros(4, dtype=torch.long)


def table(index: int) -> Any:
    return rpc.remote(f"ps{index % 2}", Table, args=(10 + index, 3))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = table(0), table(1)

    def forward(self, rows: torch.Tensor) -> Any:
        return self.first.rpc_sync().rows(rows) + self.second.rpc_sync().rows(rows)


class Listed(nn.Module):
    """The loop over tables of PyTorch's RPC benchmark."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [table(index) for index in range(3)]

    def forward(self, rows: torch.Tensor) -> Any:
        found = []
        for each in self.tables:
            found.append(each.rpc_sync().rows(rows))
            joined = torch.cat(found, dim=1)
        return joined


class Twice(nn.Module):
    """One RRef in two places, of which the forward uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [table(0)]
        self.inner = nn.Module()
        self.inner.same = self.tables[0]

    def forward(self, rows: torch.Tensor) -> Any:
        return self.tables[0].rpc_sync().rows(rows)


class Named(nn.Module):
    """RRefs in a dict of tuples, in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Module()
        self.sparse.tables = {"user": (table(0), 1), "item": (table(1), 2)}  # type: ignore[assignment]

    def forward(self, rows: torch.Tensor) -> Any:
        tables: Any = self.sparse.tables
        return sum(each.rpc_sync().rows(rows) * scale for each, scale in tables.values())


class Remote(nn.Module):
    """Remote modules: as children, called in both ways, and in a list, where they are no children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = RemoteModule("ps0", nn.Embedding, args=(10, 3))
        self.inner = nn.ModuleList([RemoteModule("ps1", nn.Embedding, args=(10, 3))])
        self.more = [RemoteModule("ps0", nn.Embedding, args=(10, 3))]
        self.top = nn.Linear(3, 1)

    def forward(self, rows: torch.Tensor) -> Any:
        later = self.inner[0].forward_async(rows)  # type: ignore[operator]
        rref: Any = self.first.get_module_rref()
        found = self.first(rows) + self.first.forward(rows) + rref.rpc_sync().forward(rows)
        return self.top(found + self.more[0](rows) + later.wait())


ALL = [Attributes, Listed, Named, Remote]


def sent(module: Any) -> CapturedModule:
    """The module as a worker has it."""
    return over_the_wire(module)


def bound(module: GraphModule, captured: Any) -> CapturedModule:
    """An answer on the launcher's own objects."""
    return over_the_wire(module, root=captured)


@pytest.mark.parametrize("model", ALL)
def test_a_module_with_handles_is_planned_by_who_does_not_have_them_and_runs_on_those_of_the_launcher(
    model: Callable[[], nn.Module],
) -> None:
    original = model()
    captured = same(original, ROWS)
    planned = recipes.apply(sent(captured), "schedule").module
    answer = bound(planned, captured)

    issues = [index for index, node in enumerate(answer.graph.nodes) if is_issue(node)]
    waits = [index for index, node in enumerate(answer.graph.nodes) if is_wait(node)]
    assert len(issues) > 1
    assert max(issues) < min(waits)
    assert torch.equal(answer(ROWS), original(ROWS))
    assert answer._fxlib.broken(grad_enabled=torch.is_grad_enabled()) == ""


def test_an_answer_whose_handles_are_swapped_is_refused() -> None:
    captured = fxlib.capture(Attributes())
    graph = wire.encode(captured).graph
    handles = [
        each.value.handle for module in graph.modules for each in module.attributes if each.value.HasField("handle")
    ]
    one, other = handles[:2]
    one.slot, other.slot = other.slot, one.slot
    with pytest.raises(WireError, match=r"attribute '.*': the graph says that it is the RRef"):
        wire.decode(graph, root=captured)


def test_a_graph_tells_who_owns_what_its_rrefs_lead_to() -> None:
    message = wire.encode(fxlib.capture(Remote())).graph
    owners = {path: rref.owner_name() for path, rref in wire.handles_in(message).items()}

    assert owners == {"first.module_rref": "ps0", "inner.0.module_rref": "ps1", "more_0_module_rref": "ps0"}
    decoded = wire.decode(message)
    assert isinstance(decoded.more_0_module_rref, OpaqueRRef)
    assert not decoded.more_0_module_rref.is_owner()


def test_a_captured_module_tells_of_its_own_state_beside_remote_modules() -> None:
    model = Remote()
    captured = fxlib.capture(model)

    assert [name for name, _ in captured.named_parameters()] == ["top.weight", "top.bias"]
    assert captured.first is model.first
    assert len(captured.first.remote_parameters()) == 1


def replace_attribute(model: Any) -> None:
    model.second = table(7)


def replace_in_list(model: Any) -> None:
    model.tables[1] = table(7)


def grow_list(model: Any) -> None:
    model.tables.append(table(7))


def replace_list(model: Any) -> None:
    model.tables = [table(7)]


def replace_deeper(model: Any) -> None:
    model.sparse.tables["item"] = (table(7), 2)


def replace_other(model: Any) -> None:
    model.inner.same = table(7)


def replace_child(model: Any) -> None:
    model.first = RemoteModule("ps1", nn.Embedding, args=(10, 3))


@pytest.mark.parametrize(
    "model, replace",
    [
        (Attributes, replace_attribute),
        (Listed, replace_in_list),
        (Listed, grow_list),
        (Listed, replace_list),
        (Named, replace_deeper),
        (Twice, replace_other),
        (Remote, replace_child),
    ],
)
def test_a_handle_that_is_replaced_between_two_steps_is_the_one_that_is_called(
    model: Callable[[], Any], replace: Callable[[Any], None]
) -> None:
    original = model()
    captured = fxlib.capture(original)
    answer = bound(recipes.apply(sent(captured), "schedule").module, captured)
    before = answer(ROWS)
    replace(original)

    after = original(ROWS)
    assert replace is replace_other or before.shape != after.shape or not torch.equal(before, after)
    assert torch.equal(captured(ROWS), after)
    assert torch.equal(answer(ROWS), after)


def test_a_handle_that_is_replaced_on_the_answer_is_the_one_that_is_called() -> None:
    original = Attributes()
    captured = fxlib.capture(original)
    answer = bound(recipes.apply(sent(captured), "schedule").module, captured)
    before = answer(ROWS)
    answer.second = table(7)

    assert not torch.equal(answer(ROWS), before)
    assert torch.equal(answer(ROWS), original(ROWS))
