"""Calls that a program issues itself and waits for too early: waits sink and issues rise, on real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.rpc import remote, rpc_async, rpc_sync
from torch.futures import collect_all, wait_all

import fxlib
from fxlib.runtime import CapturedModule, is_issue, is_wait
from fxlib.spec.report import CallReport
from fxlib.spec.workload import Server
from tests.capture import servers
from tests.capture.servers import Table, double, lookup
from tests.shared.rpc_world import rpc_world


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with rpc_world(Server(name="ps0"), Server(name="ps1")):
        yield


class Program(nn.Module):
    """Work before the calls and work after them, neither of which they need."""

    def __init__(self, calls: Callable[[Program, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(3, 3), nn.Linear(3, 3)
        self.table = rpc.remote("ps1", Table)
        self.calls = calls

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        found = self.calls(self, rows)
        return self.after(y).relu() + sum(found)


def an_async_call_waited_for_at_once(_: Program, rows: torch.Tensor) -> Any:
    return rpc_async("ps0", lookup, ("a", rows)).wait(), rpc_async("ps1", lookup, ("b", rows)).wait()


def a_future_kept_for_a_while(_: Program, rows: torch.Tensor) -> Any:
    future = rpc_async("ps0", lookup, ("a", rows))
    second = rpc_sync("ps1", lookup, ("b", rows))
    return future.wait(), second, future.wait()


def all_waited_for(_: Program, rows: torch.Tensor) -> Any:
    return wait_all([rpc_async(f"ps{i}", lookup, ("a", rows)) for i in range(2)])


def all_collected(_: Program, rows: torch.Tensor) -> Any:
    futures = collect_all([rpc_async(f"ps{i}", lookup, ("a", rows)) for i in range(2)]).wait()
    return [future.value() for future in futures]


def left_on_a_server_and_fetched(_: Program, rows: torch.Tensor) -> Any:
    first = remote("ps0", lookup, ("a", rows))
    return first.to_here(), remote("ps1", lookup, ("b", rows)).to_here()


def methods_in_three_styles(program: Program, rows: torch.Tensor) -> Any:
    table = program.table
    return (
        table.rpc_sync().rows(rows),
        table.rpc_async().rows(rows, scale=2.0).wait(),
        table.remote().rows(rows).to_here(),
    )


CALLS: list[Callable[[Program, torch.Tensor], Any]] = [
    *(an_async_call_waited_for_at_once, a_future_kept_for_a_while, all_waited_for, all_collected),
    *(left_on_a_server_and_fetched, methods_in_three_styles),
]
X, ROWS = torch.randn(3, 3), torch.tensor([1, 0, 2])


def reports(module: torch.fx.GraphModule) -> tuple[CallReport, ...]:
    found: tuple[CallReport, ...] = module.meta["rewrite"].calls
    return found


def by_hand(captured: CapturedModule) -> torch.fx.GraphModule:
    """Plain scheduling, one call by one: what merges and batches calls is another matter."""
    steps: list[tuple[str, dict[str, object]]] = [
        (name, {}) for name in ("dead_code", "split_calls", "overlap_calls", "fold_pairs")
    ]
    return fxlib.optimize(captured, fxlib.recipes.recipes.from_passes(steps))


@pytest.mark.slow
@pytest.mark.parametrize("calls", CALLS)
def test_both_halves_move_as_far_as_they_may(calls: Callable[[Program, torch.Tensor], Any]) -> None:
    model = Program(calls)
    captured = fxlib.capture(model)
    rewritten = by_hand(captured)

    names = [node.name for node in rewritten.graph.nodes]
    issues = [names.index(node.name) for node in rewritten.graph.nodes if is_issue(node)]
    waits = [names.index(node.name) for node in rewritten.graph.nodes if is_wait(node)]

    assert max(issues) < names.index("before") < names.index("relu") < min(waits)
    assert {each.action for each in reports(rewritten)} == {"moved"}
    for form in (captured, rewritten, fxlib.optimize(captured)):
        assert torch.equal(form(X, ROWS), model(X, ROWS))


class Refused(Program):
    """Issues what cannot be issued, after work that cannot be done."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        first = rpc_async("ps0", lookup, ("a", rows)).wait()
        y = self.before(x)
        second = rpc_async("nowhere", lookup, ("b", rows)).wait()
        return self.after(y) + first + second


@pytest.mark.parametrize("width, problem", [(3, "nowhere"), (2, "shapes")])
def test_an_issue_that_raises_at_once_raises_what_the_program_would_have(width: int, problem: str) -> None:
    captured = fxlib.capture(Refused(lambda *_: ()))
    rewritten = by_hand(captured)
    order = [node.name for node in rewritten.graph.nodes]
    assert order.index("issue_lookup_1") < order.index("before")
    errors = []
    for form in (captured, rewritten):
        with pytest.raises(RuntimeError, match=problem) as raised:
            form(torch.randn(3, width), ROWS)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


class Mixed(Program):
    """A write, between a call left on a server and its fetch; and calls that declare nothing."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        held = remote("ps0", lookup, ("a", rows))
        rpc_async("ps0", servers.push, (rows, rows)).wait()
        second = rpc_async("ps1", double, (rows,)).wait()
        return self.after(self.before(x)) + held.to_here() + second


def test_what_writes_or_declares_nothing_keeps_its_place() -> None:
    captured = fxlib.capture(Mixed(lambda *_: ()))
    rewritten = by_hand(captured)
    order = [node.name for node in rewritten.graph.nodes]
    assert order.index("create_lookup") < order.index("issue_push") < order.index("wait_push")
    assert order.index("wait_push") < order.index("issue_double")
    assert torch.equal(rewritten(X, ROWS), captured(X, ROWS))
    assert len(rpc_sync("ps0", servers.pushed)) == 2
