"""Calls through handles that a model holds, stubs of gRPC, are scheduled as those of RPC are.

Those of Ray's actors are in `tests/loop/test_clients_of_their_own.py`, where there is a Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest
import torch
from torch import nn
from typing_extensions import override

import fxlib
from fxlib import wire
from fxlib.errors import OpaqueError, WireError
from fxlib.recipes import recipes
from fxlib.runtime import is_call, is_issue, is_wait
from fxlib.runtime.ops.calls import ClientFunction
from tests.capture import grpc_store
from tests.capture.grpc_store import StoreStub

ROWS = torch.tensor([3.0, 1.0, 4.0, 1.0])


class Ranker(nn.Module):
    def __init__(self, users: StoreStub, items: StoreStub) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users, self.stubs = users, [items]
        self.bottom = nn.Linear(4, 4)

    @override
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        user = grpc_store.lookup(self.users, rows)
        item = grpc_store.lookup(self.stubs[0], rows + 1.0)
        return torch.as_tensor(self.bottom(x)) + user * item


def together(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A server that answers once so many calls are with it at the same time."""
    gate = threading.Barrier(count)

    def answer(rows: torch.Tensor) -> torch.Tensor:
        gate.wait(timeout=20.0)
        return rows * 2.0

    return answer


def doubled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2.0


def test_calls_of_a_grpc_stub_are_in_flight_together_with_the_same_results() -> None:
    log: list[str] = []
    with grpc_store.serving(log, together(2)) as stub:
        model = Ranker(stub, stub)
        faster = fxlib.optimize(fxlib.capture(model))
        assert sum(map(is_issue, faster.graph.nodes)) == 2
        found = faster(torch.ones(4), ROWS)  # blocking calls would wait for each other, and time out
    assert log == ["Lookup"] * 2
    assert torch.equal(found, model.bottom(torch.ones(4)) + 2.0 * ROWS * (2.0 * (ROWS + 1.0)))


@pytest.mark.slow
def test_each_stub_is_a_destination_by_the_name_of_its_attribute() -> None:
    with grpc_store.serving([], doubled) as users, grpc_store.serving([], doubled) as items:
        captured = fxlib.capture(Ranker(users, items))
        profile = fxlib.profile(captured, [(torch.ones(4), ROWS)])
        faster = fxlib.optimize(captured, profile=profile)
    reached = [call.to for call in profile.calls]
    assert len(set(reached)) == 2
    assert not any("0x" in to for to in reached)
    assert [call.to for call in faster.meta["rewrite"].calls] == reached


def test_a_schedule_with_stubs_travels_as_data_and_is_bound_to_the_models_own() -> None:
    with grpc_store.serving([], doubled) as stub:
        model = Ranker(stub, stub)
        captured = fxlib.capture(model)
        message = wire.serialize(wire.encode(fxlib.optimize(captured), beside=captured).graph)
        bound = wire.decode(wire.parse(message), root=captured)
        assert sum(map(is_wait, bound.graph.nodes)) == 2
        assert torch.equal(bound(torch.ones(4), ROWS), model(torch.ones(4), ROWS))


def test_calls_are_scheduled_by_a_process_that_lacks_the_clients_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_store.serving([], doubled) as stub:
        captured = fxlib.capture(Ranker(stub, stub))
        sent = wire.encode(captured).graph
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("fxlib.wire.graphs.registered", dict)
            received = wire.decode(sent)
            assert all(isinstance(node.target, ClientFunction) for node in filter(is_call, received.graph.nodes))
            answer = wire.encode(recipes.apply(received, "schedule").module, beside=received).graph
        bound = wire.decode(answer, root=captured)
        assert [node.target for node in bound.graph.nodes if is_issue(node)] == [grpc_store.lookup_later] * 2
        assert torch.equal(bound(torch.ones(4), ROWS), captured(torch.ones(4), ROWS))
        with pytest.raises(OpaqueError, match="lookup' of the client 'gRPC store'"):
            received(torch.ones(4), ROWS)


@pytest.mark.parametrize(
    "field, value",
    [("function", "os.system"), ("function", ".remote"), ("issue", "a\nb"), ("to", "nobody"), ("name", '"""')],
)
def test_a_description_of_a_client_that_says_more_than_names_is_refused(field: str, value: str) -> None:
    with grpc_store.serving([], doubled) as stub:
        graph = wire.encode(fxlib.capture(Ranker(stub, stub))).graph
    setattr(graph.clients[0], field, value)
    with pytest.raises(WireError, match=r"clients\[0\]"):
        wire.decode(graph)


def test_an_error_of_a_stub_is_raised_at_the_wait() -> None:
    def fails(rows: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such row")

    with grpc_store.serving([], fails) as stub:
        faster = fxlib.optimize(fxlib.capture(Ranker(stub, stub)))
        with pytest.raises(grpc.RpcError):
            faster(torch.ones(4), ROWS)
