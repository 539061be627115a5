"""Remote calls in programs that only export can capture: contracts say what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.rpc import rpc_async, rpc_sync
from torch.export import Dim

import fxlib
from fxlib.client.preflight import run_sample
from fxlib.equivalence.verify import verify
from fxlib.errors import CaptureError, ContractError
from fxlib.runtime import ops
from tests.capture import servers
from tests.capture.checks import assert_same, targets

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("world")]
ROWS = torch.arange(6)
EMBEDDED = fxlib.Contract(reads=frozenset({"parameters"}), returns=lambda rows: torch.empty(len(rows), 3))


def _chunks(rows: Tensor) -> list[Tensor]:
    return [torch.empty(rows.shape[0], 2), torch.empty(rows.shape[0], 2)]


@fxlib.remote(reads="tables", returns=_chunks)
def chunks(rows: Tensor) -> list[Tensor]:
    wide = rows.float()[:, None]
    return [torch.cat([wide, wide + 1], 1), torch.cat([wide + 2, wide + 3], 1)]


@fxlib.remote(reads="tables", gradient="tests.capture.servers:push", returns=lambda x: torch.empty(x.shape))
def row(x: Tensor) -> Tensor:
    return x.float() * 5


@fxlib.remote(pure=True, returns=lambda _: torch.empty(4))
def fetched(x_rref: Any) -> Tensor:
    found: Tensor = x_rref.to_here()
    return found + 1


@fxlib.remote(reads="tables", returns=lambda rows: torch.empty(len(rows), 3))
def liar(rows: Tensor) -> Tensor:
    return torch.zeros(len(rows), 2)


@fxlib.remote(writes="tables")
def note(rows: Tensor) -> None:
    pass


class Loops(nn.Module):
    """Loops over what a call returns, decides by its shape, issues a call of its own, and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        later = rpc_async("ps1", chunks, args=(rows + 1,))
        total = torch.zeros(rows.shape[0], 2)
        for chunk in rpc_sync("ps0", chunks, args=(rows,)):
            total = total + (self.top(chunk) if chunk.shape[0] > 3 else chunk)
        rpc_sync("ps0", note, args=(rows,))
        return total * later.wait()[1]


def test_loops_over_remote_results_become_the_calls_that_tracing_makes() -> None:
    model = Loops()
    captured = fxlib.capture(model, sample_inputs=[ROWS])
    assert targets(captured) == ["start_call", "remote_call", "remote_call", "wait"]
    calls = [node for node in captured.graph.nodes if node.target is ops.remote_call]
    assert [node.args[1] for node in calls] == [f"{__name__}:chunks", f"{__name__}:note"]
    assert calls[0].meta["contract"] == fxlib.Contract(
        reads=frozenset({"tables"}), batchable=True, returns=[None, None]
    )
    assert calls[0].meta["call"] == calls[0].name
    assert __file__ in calls[0].meta["source"]
    assert verify(model, captured, [ROWS])
    scheduled = fxlib.optimize(captured, recipe="schedule")
    assert any(node.target is ops.issue_call for node in scheduled.graph.nodes)
    assert verify(model, scheduled, [ROWS])


def test_sizes_that_differ_are_those_of_the_results_too() -> None:
    model = Loops()
    captured = fxlib.capture(model, sample_inputs=[ROWS], dynamic_shapes=({0: Dim("rows", min=4)},))
    for count in (4, 9):
        assert verify(model, captured, [torch.arange(count)])


def test_gradients_of_results_are_pushed() -> None:
    def step(module: Any) -> list[Tensor]:
        x = torch.arange(4.0)
        loss = module(x)
        loss.backward()
        fxlib.push_gradients(module)
        return rpc_sync("ps0", servers.pushed)

    def forward(x: Tensor) -> Tensor:
        found = rpc_sync("ps0", row, args=(x,))
        return (found * found).sum() if found.dim() == 1 else found.sum()

    captured = fxlib.capture(forward, sample_inputs=[torch.arange(4.0)])
    assert targets(captured) == ["remote_call", "track_gradient"]
    assert_same(step(captured), [2 * torch.arange(4.0) * 5])


def test_what_lives_on_a_server_is_made_and_fetched() -> None:
    def forward(x: Tensor) -> Tensor:
        made = rpc.remote("ps0", chunks, args=(x,))
        found = made.to_here()
        return found[0] if len(found) == 2 else found[1]

    captured = fxlib.capture(forward, sample_inputs=[ROWS], how="export")
    assert targets(captured) == ["create", "fetch"]
    assert_same(captured(ROWS), forward(ROWS))


def test_a_result_that_is_not_as_declared_is_an_error_of_the_run() -> None:
    captured = fxlib.capture(lambda x: rpc_sync("ps0", liar, args=(x,)), sample_inputs=[ROWS], how="export")
    with pytest.raises(ContractError, match=r"declares torch.float32 of shape \(6, 3\)"):
        captured(ROWS)


def test_a_result_that_no_contract_describes_may_only_be_ignored() -> None:
    def forward(x: Tensor) -> Tensor:
        return rpc_sync("ps0", servers.double, args=(x,)) + 1

    with pytest.raises(CaptureError, match=r"uses the result of tests.capture.servers:double") as refused:
        fxlib.capture(forward, sample_inputs=[ROWS], how="export")
    assert __file__ in refused.value.where
    with pytest.raises(CaptureError, match=r"returns the result of tests.capture.servers:double") as refused:
        fxlib.capture(lambda x: rpc_sync("ps0", servers.double, args=(x,)), sample_inputs=[ROWS], how="export")
    assert __file__ in refused.value.where
    stated = {"tests.capture.servers:double": fxlib.Contract(pure=True, returns=lambda x: torch.empty(len(x)))}
    captured = fxlib.capture(forward, sample_inputs=[ROWS.float()], how="export", contracts=stated)
    assert_same(captured(ROWS.float()), forward(ROWS.float()))


def test_an_rref_that_the_forward_makes_is_made_in_each_run() -> None:
    def forward(x: Tensor) -> Tensor:
        kept: Tensor = rpc_sync("ps0", fetched, args=(rpc.RRef(x * 2),))
        return kept if x.shape[0] > 1 else -kept

    captured = fxlib.capture(forward, sample_inputs=[torch.ones(4)], how="export")
    for x in (torch.ones(4), torch.arange(4.0)):
        assert_same(captured(x), forward(x))


class BesideATable(nn.Module):
    """Has a remote module among its own, and decides by a size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RemoteModule("ps0", nn.Embedding, args=(10, 3))
        self.top = nn.Linear(3, 1)

    def forward(self, rows: Tensor) -> Tensor:
        found = self.table.forward(rows)
        top: Tensor = self.top(found if found.shape[0] > 3 else -found)
        return top


def test_a_model_with_a_remote_module_is_exported_and_compared() -> None:
    model = BesideATable()
    captured = fxlib.capture(model, sample_inputs=[ROWS], contracts={".forward": EMBEDDED})
    assert targets(captured) == ["issue_call", "wait"]
    assert verify(model, captured, [ROWS])
    assert run_sample(captured, fxlib.Workload(batches=[ROWS], mode="forward", contracts={".forward": EMBEDDED}))
