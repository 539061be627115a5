"""A rewritten graph speaks to nobody to whom the original does not, wherever in it the call is hidden."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, GraphModule

import fxlib
from fxlib import ps
from fxlib.client.screen import screen
from fxlib.errors import WireError
from fxlib.runtime import create, functions, issue_batch, remote_call, wait_item
from tests.client.models import Clicks

Build = Callable[[Graph], Any]


def of(build: Build, **children: nn.Module) -> GraphModule:
    graph = Graph()
    graph.output(build(graph))
    return GraphModule(nn.ModuleDict(children), graph)


def ask(graph: Graph, to: Any, function: str = "fxlib.ps:lookup") -> Any:
    return graph.call_function(remote_call, (to, function, ("users",), {}, None))


def original(graph: Graph) -> Any:
    home, places = graph.placeholder("home"), graph.placeholder("places")
    made = graph.call_function(create, ("ps0", "fxlib.ps:lookup", ("users",), {}, None))
    rows = [
        ask(graph, "ps0"),
        ask(graph, home),
        ask(graph, made),
        ask(graph, graph.call_function(operator.getitem, (places, 0))),
    ]
    return tuple(rows)


def with_one_more(more: Build) -> Build:
    return lambda graph: (original(graph), more(graph))


def argument(graph: Graph, name: str) -> Any:
    return next(node for node in graph.nodes if node.target == name)


def computed(graph: Graph) -> Any:
    return ask(graph, graph.call_function(operator.add, ("ps", "0")))


def another_place(graph: Graph) -> Any:
    return ask(graph, graph.call_function(operator.getitem, (argument(graph, "places"), 1)))


def changed_place(graph: Graph) -> Any:
    graph.call_function(operator.setitem, (argument(graph, "places"), 0, "elsewhere"))
    return another_place_again(graph)


def another_place_again(graph: Graph) -> Any:
    return ask(graph, graph.call_function(operator.getitem, (argument(graph, "places"), 0)))


def looked_up(graph: Graph) -> Any:
    return graph.call_function(functions.resolve, ("fxlib.ps:create",))


def named(graph: Graph) -> Any:
    return graph.call_function(rpc.get_worker_info, ("elsewhere",))


def another_function(graph: Graph) -> Any:
    return ask(graph, "ps0", "torch:add")


def batch(graph: Graph, to: str, function: str = "fxlib.ps:lookup", form: str | None = None) -> Any:
    calls: Any = ((function, ("users",), {}),)
    return graph.call_function(wait_item, (graph.call_function(issue_batch, (to, calls, None, form)), 0))


def batch_elsewhere(graph: Graph) -> Any:
    return batch(graph, "elsewhere")


def batch_of_another_function(graph: Graph) -> Any:
    return batch(graph, "ps0", "torch:add")


def batch_by_another_form(graph: Graph) -> Any:
    return batch(graph, "ps0", form="torch:add")


def to_where_a_batch_led(graph: Graph) -> Any:
    return ask(graph, batch(graph, "ps0"))


def own_code(graph: Graph) -> Any:
    return graph.call_function(own, ("a file",))


def to_the_other_ranks(graph: Graph) -> Any:
    shared = torch.ops._c10d_functional.broadcast.default
    return graph.call_function(shared, (argument(graph, "home"), 0, "0"))


def sorted_places(graph: Graph) -> Any:
    graph.call_method("sort", (argument(graph, "places"),))
    return another_place_again(graph)


def changed_home(graph: Graph) -> Any:
    graph.call_method("fill_", (argument(graph, "home"), 1))
    return another_place_again(graph)


def own(path: str) -> str:
    return path


REFUSED = [
    *(computed, another_place, changed_place, looked_up, named, another_function, own_code),
    *(sorted_places, changed_home, to_the_other_ranks),
    *(batch_elsewhere, batch_of_another_function, batch_by_another_form, to_where_a_batch_led),
]


@pytest.mark.parametrize("more", REFUSED)
def test_what_the_original_does_not_do_is_refused(more: Build) -> None:
    with pytest.raises(WireError, match="and the original does not"):
        screen(of(with_one_more(more)), of(original))


def test_a_call_within_a_nested_graph_is_refused() -> None:
    nested = of(lambda graph: ask(graph, "elsewhere"))
    with pytest.raises(WireError, match="'elsewhere'"):
        screen(of(with_one_more(lambda graph: graph.call_module("inner")), inner=nested), of(original))


def test_a_nested_graph_that_calls_its_argument_is_given_the_same_one() -> None:
    nested = of(lambda graph: ask(graph, graph.placeholder("to")))

    def outer(name: str) -> Build:
        def build(graph: Graph) -> Any:
            arguments = {each: graph.placeholder(each) for each in ("home", "other")}
            return graph.call_module("inner", (arguments[name],))

        return build

    screen(of(outer("home"), inner=nested), of(outer("home"), inner=nested))
    with pytest.raises(WireError, match="other arguments"):
        screen(of(outer("other"), inner=nested), of(outer("home"), inner=nested))


def test_what_the_original_does_may_be_done_again() -> None:
    screen(of(with_one_more(another_place_again)), of(original))


def test_what_the_original_does_may_be_done_in_a_batch() -> None:
    screen(of(with_one_more(lambda graph: batch(graph, "ps0"))), of(original))


class Two(nn.Module):
    """Two lookups that may travel together, the second result leading to nobody."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [rpc.rpc_sync("ps0", ps.lookup, args=(table, ids)) for table in ("users", "ads")]
        return rows[0] + rows[1]


class Chain(nn.Module):
    """A server's name that is looked up, an object made there, and a table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = rpc.remote(rpc.get_worker_info("ps0"), ps.lookup, args=("users", ids))
        rows = rpc.rpc_sync("ps1", ps.lookup, args=("users", ids))
        rows[0] = 0
        return rows + made.to_here() + rpc.rpc_async(made.owner(), ps.lookup, args=("users", ids)).wait()


torch.fx.wrap("own_tensor")


def own_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


class Own(nn.Module):
    """Code of the launcher's own, given what takes a gradient."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return own_tensor(rpc.rpc_sync("ps0", ps.lookup, args=("users", ids)))


@pytest.mark.parametrize("model", [Chain, Clicks, Own, Two])
def test_a_rewritten_graph_passes(model: type[nn.Module]) -> None:
    captured = fxlib.capture(model())
    screen(fxlib.optimize(captured), captured)


def test_calls_that_a_rewrite_puts_into_a_batch_pass() -> None:
    captured = fxlib.capture(Two())
    rewritten = fxlib.optimize(captured)
    assert any(node.target is issue_batch for node in rewritten.graph.nodes)
    screen(rewritten, captured)
