"""Every idiom of `torch.distributed.rpc`, captured, computes what it computes uncaptured."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.rpc import remote, rpc_async, rpc_sync
from torch.futures import collect_all, wait_all

import fxlib
from fxlib import wire
from fxlib.errors import ContractError
from fxlib.runtime import is_call, is_issue
from fxlib.runtime.ops import create
from tests.capture import servers
from tests.capture.checks import same, targets
from tests.capture.servers import Arithmetic, Table, double

pytestmark = pytest.mark.usefixtures("world")
X = torch.zeros(3)
HELD = Arithmetic(4)
PARTIAL = functools.partial(rpc_sync, "ps0")
TABLE_OF_CALLS = {"sync": rpc.rpc_sync}


def blocking(x: torch.Tensor) -> Any:
    return rpc.rpc_sync("ps0", double, args=(x,)) + 1


def blocking_from_import(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", double, args=(x, 3.0), kwargs={"plus": 2.0}, timeout=5)


def all_by_keyword(x: torch.Tensor) -> Any:
    return rpc_sync(to="ps0", func=double, args=[x], kwargs=None, timeout=5.0)


def issued_and_waited_for(x: torch.Tensor) -> Any:
    future = rpc_async("ps0", double, args=(x,))
    return future.wait() + future.wait()


def waited_for_by_wait_all(x: torch.Tensor) -> Any:
    a, b = wait_all([rpc_async(f"ps{i}", double, args=(x, i + 2.0)) for i in range(2)])
    return a - b


def waited_for_by_collect_all(x: torch.Tensor) -> Any:
    futures = [rpc.rpc_async(f"ps{i}", double, args=(x, i + 2.0)) for i in range(2)]
    return [future.value() for future in torch.futures.collect_all(futures).wait()]


def collected_and_waited_for(x: torch.Tensor) -> Any:
    return sum(future.wait() for future in collect_all([rpc_async("ps1", double, (x,))]).wait())


def left_on_the_server_and_fetched(x: torch.Tensor) -> Any:
    return remote("ps1", double, args=(x,)).to_here()


def fetched_with_a_timeout(x: torch.Tensor) -> Any:
    return rpc.remote("ps1", double, args=(x,)).to_here(timeout=5.0)


def methods_of_what_was_left(x: torch.Tensor) -> Any:
    rref = rpc.remote("ps1", double, args=(x,))
    later = rref.rpc_async().mul(2)
    return rref.rpc_sync().add(x) + later.wait() + rref.remote().sub(1).to_here()


def an_rref_as_an_argument_of_a_call(x: torch.Tensor) -> Any:
    rref = rpc.remote("ps1", double, args=(x,))
    return rpc_sync(rref.owner(), servers.call_method, args=(torch.Tensor.add, rref, 1))


def a_helper_of_another_module(x: torch.Tensor) -> Any:
    return servers.helped(x)


def a_closure_and_a_default(x: torch.Tensor) -> Any:
    return servers.made_by_closure("ps0")(x)


def a_partial_of_the_call(x: torch.Tensor) -> Any:
    return PARTIAL(double, args=(x,))


def a_table_of_calls(x: torch.Tensor) -> Any:
    return TABLE_OF_CALLS["sync"]("ps0", double, (x,))


def a_partial_function(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", functools.partial(double, by=3.0), args=(x,))


def a_static_method(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", Arithmetic.triple, args=(x,)) + rpc_sync("ps1", HELD.triple, args=(x,))


def a_class_method(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", Arithmetic.named, args=(x,))


def a_bound_method(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", HELD.times, args=(x,))


def builtins_and_operators(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", operator.add, args=(x, 1)), rpc_sync("ps0", max, args=(3, 4)), rpc_sync("ps0", abs, (x,))


def torch_functions(x: torch.Tensor) -> Any:
    return (
        rpc_sync("ps0", torch.add, args=(x, x), kwargs={"alpha": 3}),
        rpc_sync("ps1", torch.nn.functional.relu, args=(x,)),
        rpc_sync("ps1", torch.Tensor.mul, args=(x, 3)),
        rpc_sync("ps1", torch.full, args=((2,), 3.0)),
    )


def no_traced_argument(x: torch.Tensor) -> Any:
    return x + rpc_sync("ps0", torch.full, args=((3,), 2.0)) + rpc_sync("ps0", double, args=(torch.ones(3),))


def nested_arguments(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", torch.cat, args=([x, x + 1],)), rpc_sync("ps0", operator.getitem, args=((x, [x]), 1))


def a_destination_by_worker_info(x: torch.Tensor) -> Any:
    return rpc_sync(rpc.get_worker_info("ps1"), double, args=(x,)) + rpc_sync(1, double, args=(x,))


def a_future_that_is_returned_waited_for_later(x: torch.Tensor) -> Any:
    def start(value: torch.Tensor) -> Any:
        return rpc_async("ps0", double, args=(value,))

    first = start(x)
    y = torch.relu(x)
    return first.wait() + y


def fire_and_forget(x: torch.Tensor) -> Any:
    rpc_async("ps0", double, args=(x,))
    return x + 1


def an_undeclared_pair_unpacked(x: torch.Tensor) -> Any:
    a, b = rpc_sync("ps0", servers.pair, args=(x,))
    return a + b


def a_declared_structure(x: torch.Tensor) -> Any:
    first, (second, third), last = rpc_sync("ps0", servers.several, args=(x,))
    result = rpc_async("ps0", servers.several, args=(x,)).wait()
    total = first + second + third + last["last"] + result[1][-1] + result[-1]["last"]
    for index, value in enumerate(result[1]):
        total = total + value * index
    total = total + sum(value for _, value in result[2].items()) + len(result) + sum(result[0:1])
    return total + sum(x for x in reversed([*result[1]])) + dict(**result[2])["last"]


IDIOMS: list[Callable[..., Any]] = [
    value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__ and callable(value)
]


@pytest.mark.parametrize("forward", IDIOMS, ids=lambda forward: forward.__name__)
def test_a_captured_idiom_computes_what_the_idiom_does(forward: Callable[..., Any]) -> None:
    captured = same(forward, X)

    assert targets(captured)
    assert all(node.meta["source"].startswith(__file__) for node in captured.graph.nodes if "call" in node.meta) or (
        forward in (a_helper_of_another_module, a_closure_and_a_default)
    )


class Holder(nn.Module):
    """RRefs as attributes, in lists and in dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = rpc.remote("ps0", Table)
        self.tables = [rpc.remote(f"ps{i % 2}", Table, args=(10 + i,)) for i in range(3)]
        self.named = {"user": rpc.remote("ps1", Table, args=(20,))}
        self.child = nn.Module()
        self.child.table = self.tables[0]
        self.scale = nn.Linear(3, 3)

    def forward(self, rows: torch.Tensor) -> Any:
        looked_up = [table.rpc_sync().forward(rows) for table in self.tables]
        futures = [table.rpc_async().rows(rows, scale=2.0) for table in self.tables]
        pulled = self.named["user"].remote().rows(rows).to_here()
        helped = servers.remote_method(Table.rows, self.table, rows, scale=3.0)
        waited = wait_all(futures)
        owner = self.table.owner_name() if self.table.is_owner() is False else "trainer"
        named = (
            rpc_sync(owner, servers.call_method, args=(Table.forward, self.child.table, rows)) if owner == "-" else 0
        )
        return self.scale(sum(looked_up) + sum(waited) + pulled + helped + named)


@pytest.mark.slow
def test_rrefs_of_a_module_are_read_where_the_module_holds_them() -> None:
    model = Holder()

    captured = same(model, torch.zeros(4, dtype=torch.long))

    reads = [node.target for node in captured.graph.nodes if node.op == "get_attr"]
    assert reads == ["child.table", "tables_1", "tables_2", "named_user", "table"]
    assert not any(name.startswith(("tables_", "named_")) for name in model.__dict__)
    assert captured.state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
def test_constant_destinations_stay_constant_and_classes_behind_rrefs_bring_contracts() -> None:
    captured = fxlib.capture(Holder())

    calls = [node for node in captured.graph.nodes if is_call(node) or is_issue(node) or node.target is create]
    declared = [node.args[1] for node in calls if "contract" in node.meta]

    assert declared == [".rows"] * 3 + [".rows", f"{servers.NAME}:call_method"]
    assert next(node for node in calls if ":call_method" in str(node.args[1])).args[0] == "ps0"


class Argument(nn.Module):
    def forward(self, table: "rpc.RRef[Table]", rows: torch.Tensor) -> Any:
        return (
            table.rpc_sync().rows(rows) + table.rpc_async(timeout=3.0).forward(rows).wait() + table.to_here().weight[0]
        )


def test_an_rref_that_is_an_argument() -> None:
    captured = same(Argument(), rpc.remote("ps1", Table), torch.zeros(4, dtype=torch.long))

    assert targets(captured) == ["remote_call", "issue_call", "wait", "fetch"]


def test_remote_results_take_gradients_that_are_pushed_in_program_order() -> None:
    def forward(x: torch.Tensor) -> Any:
        return (rpc_sync("ps0", servers.embed, (x,)) * rpc_async("ps0", servers.embed, (x + 1,)).wait()).sum()

    captured = fxlib.capture(forward)
    loss = captured(torch.ones(2))
    loss.backward()
    fxlib.push_gradients(captured)

    assert loss.item() == 100.0
    assert [each.tolist() for each in rpc_sync("ps0", servers.pushed)] == [[10.0, 10.0], [5.0, 5.0]]
    assert targets(captured) == ["remote_call", "track_gradient", "start_call", "wait", "track_gradient"]


def test_a_remote_error_is_the_blocking_one() -> None:
    captured = fxlib.capture(lambda x: rpc_sync("ps0", double, (x, "two")))
    with pytest.raises(TypeError):
        captured(X)


@pytest.mark.slow
def test_a_remote_module() -> None:
    class Hybrid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding: Any = RemoteModule("ps1", nn.EmbeddingBag, (10, 3))
            self.top = nn.Linear(3, 2)

        def forward(self, rows: torch.Tensor) -> Any:
            return self.top(self.embedding(rows)) + self.top(self.embedding.forward_async(rows).wait())

    captured = same(Hybrid(), torch.zeros(4, 2, dtype=torch.long))

    assert [node.args[1] for node in captured.graph.nodes if is_call(node) or is_issue(node)] == [".forward"] * 2


def issues_what_cannot_be(x: torch.Tensor) -> Any:
    future = rpc_async("nowhere", servers.lookup, ("a", x))
    rpc_sync("ps0", servers.push, (x, x))
    return future.wait()


def fails_before(x: torch.Tensor) -> Any:
    first = rpc_sync("ps1", servers.lookup, ("a", "no rows"))
    return first + issues_what_cannot_be(x * 2)


@pytest.mark.parametrize("forward, error", [(issues_what_cannot_be, RuntimeError), (fails_before, TypeError)])
def test_an_issue_of_the_programs_own_raises_where_it_stands(forward: Any, error: type[Exception]) -> None:
    captured = fxlib.capture(forward)
    decoded = wire.decode(wire.encode(captured).graph, root=captured)
    for form in (forward, captured, fxlib.optimize(captured), decoded):
        with pytest.raises(error):
            form(torch.ones(2))
        assert not rpc_sync("ps0", servers.pushed)


def a_shorter_structure(x: torch.Tensor) -> Any:
    first, second = rpc_sync("ps0", servers.too_much, (x,))
    return first + second


def other_keys(x: torch.Tensor) -> Any:
    return sum(rpc_async("ps0", servers.other_keys, (x,)).wait().values())


def what_is_there(x: torch.Tensor) -> Any:
    return rpc_sync("ps0", servers.too_much, (x,))[0]


@pytest.mark.parametrize("forward, function", [(a_shorter_structure, "too_much"), (other_keys, "other_keys")])
def test_a_result_of_another_structure_than_declared_is_an_error_of_the_run(forward: Any, function: str) -> None:
    captured = fxlib.capture(forward)
    decoded = wire.decode(wire.encode(captured).graph, root=captured)
    for form in (captured, fxlib.optimize(captured), decoded):
        with pytest.raises(ContractError, match=f"{function}: the contract declares"):
            form(torch.ones(2))


def test_a_part_of_a_structure_is_taken_without_a_check() -> None:
    same(what_is_there, X)
