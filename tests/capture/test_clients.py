"""A registered blocking client is captured, scheduled, recorded and screened as the calls of RPC are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from typing_extensions import override

import fxlib
from fxlib import wire
from fxlib.client.answer_policy import screen
from fxlib.errors import ContractError, WireError
from fxlib.reasons import Reason
from fxlib.runtime import is_call, is_issue, is_wait
from fxlib.spec.contract import Contract
from fxlib.spec.report import CallReport
from tests.capture import feature_store as features
from tests.capture.feature_store import Store, join
from tests.capture.feature_store import get as renamed

ROWS = torch.tensor([3, 1, 4, 1])
PARTIAL = functools.partial(features.get, scale=0.5)


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    with features.serving() as store:
        yield store


@pytest.fixture
def store(running: Store) -> Store:
    running.reset()
    return running


class Model(nn.Module):
    def __init__(self, host: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.host = host
        self.bottom, self.top = nn.Linear(4, 4), nn.Linear(4, 4)


class Reads(Model):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        user = features.get(self.host, rows)
        item = renamed(host=self.host, rows=rows + 1, scale=2.0)
        return self.top(self.bottom(x) + user * item) + PARTIAL(self.host, rows)


class Writes(Model):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        before = features.get(self.host, rows)
        features.put(self.host, rows)
        after = features.get(self.host, rows)
        return self.bottom(x) + before + after


class Own(Model):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        first = join(features.get_later(self.host, rows))
        y = self.bottom(x)
        second = features.get_later(self.host, rows + 1)
        second = join(second) + join(second)
        return self.top(y) + first + second


class Two(Model):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        user, item = features.get_two(rows, hosts=(self.host, self.host))
        return self.bottom(x) + user * item


class Guesses(Model):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = self.bottom(x)
        return features.guess(self.host, rows) + features.guess(self.host, rows + 1) + self.top(y)


class Fails(Model):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = self.top(self.bottom(x))
        missing = features.get(self.host, rows + 500)
        return y + features.get(self.host, rows + 900) + missing


def reports(module: GraphModule) -> tuple[CallReport, ...]:
    found: tuple[CallReport, ...] = module.meta["rewrite"].calls
    return found


def step(model: nn.Module, rows: torch.Tensor = ROWS) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(4, 4, requires_grad=True)
    out = model(x, rows)
    out.sum().backward()
    return [out, *(each.grad for each in (x, *model.parameters()) if each.grad is not None)]


def test_each_call_is_one_node_under_whatever_name_it_is_called(store: Store) -> None:
    captured = fxlib.capture(Reads(store.address))
    calls = [node for node in captured.graph.nodes if is_call(node)]
    assert [node.target for node in calls] == [features.get] * 3
    assert [node.meta["contract"] for node in calls] == [features.READS] * 3
    assert [node.kwargs.get("scale") for node in calls] == [None, 2.0, 0.5]
    assert store.log == []


@pytest.mark.parametrize("model", [Reads, Writes, Own, Two, Guesses])
def test_a_rewritten_program_computes_what_the_program_does(model: Callable[..., nn.Module], store: Store) -> None:
    original = model(store.address)
    expected = step(original)
    captured = fxlib.capture(original)
    for form in (captured, fxlib.optimize(captured)):
        store.reset()
        assert all(map(torch.equal, step(form), expected))


@pytest.mark.parametrize("model, together", [(Reads, 3), (Own, 2)])
def test_calls_are_in_flight_together_after_the_rewrite_and_one_by_one_before(
    model: Callable[..., nn.Module], together: int, store: Store
) -> None:
    captured = fxlib.capture(model(store.address))
    step(captured)
    assert store.most_in_flight == 1
    store.reset(together)
    step(fxlib.optimize(captured))
    assert store.most_in_flight == together


def test_a_read_waits_for_the_write_before_it(store: Store) -> None:
    rewritten = fxlib.optimize(fxlib.capture(Writes(store.address)))
    for _ in range(20):
        store.reset()
        out = rewritten(torch.zeros(4, 4), ROWS)
        assert (out > 900).all()
        assert store.log == ["g", "p", "g"]


def test_the_first_error_of_the_program_is_raised(store: Store) -> None:
    captured = fxlib.capture(Fails(store.address))
    for form in (captured, fxlib.optimize(captured)):
        with pytest.raises(LookupError, match="no row 504"):
            form(torch.zeros(4, 4), ROWS)


def test_reports_name_function_and_destination(store: Store) -> None:
    found = reports(fxlib.optimize(fxlib.capture(Reads(store.address))))
    assert {(each.function, each.to, each.action) for each in found} == {
        ("tests.capture.feature_store:get", store.address, "moved")
    }


def test_a_client_without_a_destination_goes_by_its_name() -> None:
    [found] = reports(fxlib.optimize(fxlib.capture(Two("127.0.0.1:1"))))
    assert found.to == "features: two"
    assert found.action == "moved"


def test_calls_that_declare_nothing_keep_their_order_and_say_what_would_free_them(store: Store) -> None:
    captured = fxlib.capture(Guesses(store.address))
    found = reports(fxlib.optimize(captured))
    assert found[0].reason is Reason.UNKNOWN_CONTRACT
    assert "fxlib.register_call" in found[0].remedy
    name = "tests.capture.feature_store:guess"
    declared = fxlib.optimize(captured, contracts={name: Contract(reads=frozenset({"features"}))})
    assert [each.action for each in reports(declared)] == ["moved", "moved"]


def test_a_request_s_contract_comes_before_the_registered_one(store: Store) -> None:
    stated = Contract(writes=frozenset({"log"}))
    captured = fxlib.capture(Reads(store.address), contracts={"tests.capture.feature_store:get": stated})
    assert {node.meta["contract"] for node in captured.graph.nodes if is_call(node)} == {stated}


def test_the_program_s_own_issues_and_waits_are_told_apart_and_move(store: Store) -> None:
    captured = fxlib.capture(Own(store.address))
    halves = [node.target for node in captured.graph.nodes if is_issue(node) or is_wait(node)]
    assert halves == [features.get_later, join, features.get_later, join]
    assert {each.action for each in reports(fxlib.optimize(captured))} == {"moved"}


def test_timelines_show_the_calls(store: Store) -> None:
    rewritten = fxlib.optimize(fxlib.capture(Reads(store.address)))
    with fxlib.runtime.record() as recording:
        rewritten(torch.zeros(4, 4), ROWS)
    spans = recording.timeline.spans
    flights = {span.name: span for span in spans if span.kind == "in_flight"}
    assert {span.to for span in flights.values()} == {store.address}
    assert flights.keys() == {span.name for span in spans if span.kind == "wait"} == {"get", "get_1", "get_2"}


# Through the wire, and back.


@pytest.mark.slow
def test_an_answer_may_issue_and_wait_for_what_the_original_calls(store: Store) -> None:
    captured = fxlib.capture(Reads(store.address))
    answer = wire.encode(fxlib.optimize(captured)).graph
    bound = wire.decode(answer, root=captured)
    screen(bound, captured)
    assert all(map(torch.equal, step(bound), step(captured)))


def test_an_answer_may_not_call_a_client_otherwise(store: Store) -> None:
    captured = fxlib.capture(Reads(store.address))
    for change in ({"host": "evil:1"}, {"scale": 3.0}):
        answer = fxlib.optimize(captured)
        issue = next(node for node in answer.graph.nodes if is_issue(node) and node.kwargs.get("scale") == 2.0)
        issue.kwargs = {**issue.kwargs, **change}
        with pytest.raises(WireError, match="calls get otherwise"):
            screen(answer, captured)


def test_an_answer_may_not_wait_for_what_it_likes(store: Store) -> None:
    captured = fxlib.capture(Own(store.address))
    answer = fxlib.optimize(captured)
    wait = next(filter(is_wait, answer.graph.nodes))
    wait.args = (next(iter(answer.graph.nodes)),)
    with pytest.raises(WireError, match="join"):
        screen(answer, captured)


def test_a_worker_that_knows_the_client_schedules_its_calls() -> None:
    received = wire.decode(wire.encode(fxlib.capture(Reads("127.0.0.1:1"))).graph)
    assert {each.action for each in reports(fxlib.optimize(received))} == {"moved"}


# Registering.


def later(host: str, rows: torch.Tensor, scale: float = 2.0) -> object:
    return host, rows, scale


def unlike(host: str) -> object:
    return host


def nothing() -> object:
    return None


class Holder:
    def method(self) -> object:
        return self


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"issue": later}, "does not take the arguments"),
    ({"issue": unlike}, "does not take the arguments"),
    ({"blocking": lambda x: x}, "top level of a module"),
    ({"wait": Holder.method}, "top level of a module"),
    ({"wait": nothing}, "one argument"),
    ({"to": "server"}, "no parameter 'server'"),
    ({"contract": Contract(reads=frozenset({"a"}), gradient="m:f")}, "gradient="),
    ({"blocking": features.put, "issue": features.put_later}, "another kind"),
]


@pytest.mark.parametrize("change, problem", MISTAKES, ids=[problem for _, problem in MISTAKES])
def test_a_registration_that_makes_no_sense_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        fxlib.register_call(
            **{"name": "odd", "blocking": features.get, "issue": features.get_later, "wait": join, **change}
        )


def test_a_wrong_call_is_an_error_at_capture() -> None:
    class Wrong(Model):
        @override
        def forward(self, x: torch.Tensor) -> Any:
            return features.get(x)  # type: ignore[call-arg, arg-type]

    with pytest.raises(fxlib.FxlibError, match="rows"):
        fxlib.capture(Wrong("127.0.0.1:1"))


@pytest.mark.parametrize("registered", [True, False])
def test_a_received_call_that_does_not_fit_its_client_is_refused(registered: bool) -> None:
    graph = wire.encode(fxlib.capture(Reads("host"))).graph
    text = "tests.capture.feature_store"
    if not registered:
        client = graph.clients[0]
        client.function = client.function.replace(text, "elsewhere")
        for name in ("blocking", "issue", "wait"):
            setattr(client, name, getattr(client, name).replace(text, "elsewhere"))
        called = next(each for each in graph.targets if each.opaque_function)
        called.opaque_function = called.opaque_function.replace(text, "elsewhere")
    call = next(node for node in graph.modules[-1].graph.nodes if node.name == "get_1")
    call.kwargs[0].name = "port"
    says = r"node 'get_1': the client's function takes \(host.*scale.*: missing a required argument: 'host'"
    with pytest.raises(WireError, match=says):
        wire.decode(graph)


def test_a_function_of_a_model_may_be_called_like_an_operator_of_fxlib() -> None:
    graph = wire.encode(fxlib.capture(Reads("host"))).graph
    del graph.clients[:]
    target = next(each for each in graph.targets if each.opaque_function)
    target.opaque_function = "fxlib.runtime.wait"
    assert "opaque_fxlib_runtime_wait" in wire.decode(graph).code
