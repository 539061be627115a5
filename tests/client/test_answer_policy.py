"""A rewritten graph speaks to nobody to whom the original does not, wherever in it the call is hidden."""

import copy
import functools
import operator
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, GraphModule, Node

import fxlib
from fxlib import ps, wire
from fxlib.client.answer_policy import limits_of_answer, screen
from fxlib.errors import LimitError, WireError
from fxlib.recipes import recipes
from fxlib.runtime import functions, is_wait
from fxlib.runtime.ops import create, issue_batch, remote_call, track_gradient, wait_item
from fxlib.spec.contract import Contract
from fxlib.v1 import graph_pb2
from tests.capture import feature_store
from tests.client.models import Clicks
from tests.shared.forked import printed

Build = Callable[[Graph], Any]
SCHEDULE = recipes.get("schedule").passes


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


@pytest.mark.parametrize("more", [another_place_again, lambda graph: batch(graph, "ps0")])
def test_what_the_original_does_once_is_not_done_twice(more: Build) -> None:
    with pytest.raises(WireError, match=r"\d times, and the original \d times"):
        screen(of(with_one_more(more)), of(original))


def declared(contract: Contract | None) -> Build:
    def build(graph: Graph) -> Any:
        calls = (ask(graph, "ps0"), ask(graph, "ps0"))
        for call in calls:
            call.meta["contract"] = contract
        return calls

    return build


@pytest.mark.parametrize("contract", [Contract(reads=frozenset({"rows"})), Contract(pure=True)])
def test_a_read_may_be_left_out(contract: Contract) -> None:
    screen(of(lambda graph: ask(graph, "ps0")), of(declared(contract)))


@pytest.mark.parametrize(
    "contract",
    [None, Contract(writes=frozenset({"rows"})), Contract(reads=frozenset({"rows"}), writes=frozenset({"rows"}))],
)
def test_a_call_that_may_write_is_not_left_out(contract: Contract | None) -> None:
    screen(of(declared(None)), of(declared(contract)))
    with pytest.raises(WireError, match=r"leaves out that the original calls 'fxlib.ps:lookup' on 'ps0'"):
        screen(of(lambda graph: ask(graph, "ps0")), of(declared(contract)))


def test_a_call_may_travel_in_a_batch() -> None:
    screen(of(lambda graph: batch(graph, "ps0")), of(lambda graph: ask(graph, "ps0")), passes=SCHEDULE)


def test_a_push_that_a_contract_names_is_made_once_for_each_call() -> None:
    def pushed(times: int, *given: str) -> Build:
        def build(graph: Graph) -> Any:
            made = ask(graph, "ps0")
            made.meta["contract"] = Contract(gradient="fxlib.ps:push")
            for _ in range(times):
                made = graph.call_function(track_gradient, (made, "ps0", "fxlib.ps:push", given, {}, None, 0))
            return made

        return build

    screen(of(pushed(1, "users")), of(pushed(0)), passes=SCHEDULE)
    with pytest.raises(WireError, match="2 times, and the original 1 times"):
        screen(of(pushed(2, "users")), of(pushed(0)))
    with pytest.raises(WireError, match="with other arguments"):
        screen(of(pushed(1, "admins")), of(pushed(0)))


def test_a_graph_that_calls_is_not_called_more_often() -> None:
    nested = of(lambda graph: ask(graph, "ps0"))

    def runs(times: int, module: nn.Module) -> GraphModule:
        return of(lambda graph: [graph.call_module("inner") for _ in range(times)], inner=module)

    screen(runs(2, nested), runs(2, nested))
    screen(of(lambda graph: [ask(graph, "ps0") for _ in range(2)]), runs(2, nested))
    for module in (nested, nn.Sequential(nested)):
        with pytest.raises(WireError, match="2 times, and the original 1 times"):
            screen(runs(2, module), runs(1, module))


def calling(*args: Any, **kwargs: Any) -> Build:
    """Return what builds a call with these arguments, in which a text that begins with "$" is an input."""

    def build(graph: Graph) -> Any:
        inputs = {name: graph.placeholder(name) for name in ("x", "y")}

        def value(given: Any) -> Any:
            return inputs[given[1:]] if isinstance(given, str) and given.startswith("$") else given

        given = tuple(map(value, args)), {name: value(each) for name, each in kwargs.items()}
        return graph.call_function(remote_call, ("ps0", "fxlib.ps:lookup", *given, None))

    return build


@pytest.mark.parametrize(
    "wider",
    [
        calling("users", "$x", "$y"),
        calling("users", "$x", 5),
        calling("users", ["$x"]),
        calling("users", "$x", limit=1),
        calling("admins", "$x"),
        calling("$y", "$x"),
        calling("users", "rows"),
        calling("users"),
    ],
)
def test_a_call_is_made_with_arguments_of_the_original_s_form(wider: Build) -> None:
    with pytest.raises(WireError, match="with other arguments than the original"):
        screen(of(wider), of(calling("users", "$x")))


def test_a_call_may_be_given_what_is_computed_otherwise() -> None:
    screen(of(calling("users", "$y", limit=1)), of(calling("users", "$x", limit=1)))


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


@pytest.mark.filterwarnings("ignore:no gradient is pushed")
@pytest.mark.parametrize("model", [Chain, Clicks, Own, Two])
def test_a_rewritten_graph_passes(model: type[nn.Module]) -> None:
    captured = fxlib.capture(model())
    screen(fxlib.optimize(captured), captured, passes=SCHEDULE)


def test_calls_that_a_rewrite_puts_into_a_batch_pass() -> None:
    captured = fxlib.capture(Two())
    rewritten = fxlib.optimize(captured)
    assert any(node.target is issue_batch for node in rewritten.graph.nodes)
    screen(rewritten, captured, passes=SCHEDULE)


@pytest.mark.parametrize("written", ["quantize", "quantize.default"])
def test_layers_on_int8_weights_come_from_a_recipe_that_makes_them(written: str) -> None:
    quantize: Any = functools.reduce(getattr, written.split("."), torch.ops.fxlib)

    def before(graph: Graph) -> Any:
        return graph.call_method("float", (graph.placeholder("x"),))

    def after(graph: Graph) -> Any:
        return graph.call_function(quantize, (graph.placeholder("x"), 1.0, 0))

    captured, answer = of(before), of(after)
    with pytest.raises(WireError, match="int8 weights, which the recipe does not make"):
        screen(answer, captured)
    screen(answer, captured, passes=recipes.get("int8").passes)
    screen(answer, answer)


class Stub:
    """A client object of the launcher's own, with methods that are named as those of tensors are."""

    def fetch(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def zero_(self) -> None:
        """Wipe all state."""


def held_by(stub: Stub, x: torch.Tensor) -> Any:
    return stub.fetch(x)


def holding() -> GraphModule:
    """Return the graph of a model whose own code is given an object that an attribute holds."""
    graph = Graph()
    x = graph.placeholder("x")
    made = graph.call_function(held_by, (graph.create_node("get_attr", "stub"), x))
    graph.output(graph.call_module("top", (made,)))
    model = nn.Module()
    model.stub, model.top = Stub(), nn.Linear(4, 1)  # type: ignore[assignment]
    return GraphModule(model, graph)


def with_nodes(captured: GraphModule, add: Callable[[Graph, Any, Any], Any]) -> GraphModule:
    """Return a copy whose graph also does what `add` does with the stub and what the launcher's code made of it."""
    graph = Graph()
    made: dict[Any, Any] = {}
    graph.output(graph.graph_copy(captured.graph, made))
    by_target = {old.target: new for old, new in made.items()}
    with graph.inserting_before(graph.output_node()):
        add(graph, by_target["stub"], by_target[held_by])
    return GraphModule(captured, graph)


USES: list[Callable[[Graph, Any, Any], Any]] = [
    lambda graph, stub, _: graph.call_method("zero_", (stub,)),
    lambda graph, stub, _: graph.call_function(operator.contains, (stub, 1)),
    lambda graph, stub, _: graph.call_function(operator.setitem, (stub, "k", 1)),
    lambda graph, stub, _: graph.call_function(getattr, (stub, "state")),
    lambda graph, stub, _: graph.call_module("top", (stub,)),
    lambda graph, stub, _: graph.call_method("zero_", (graph.call_function(list, ([stub],)),)),
    lambda graph, stub, _: ask(graph, stub),
    lambda graph, _, result: graph.call_method("zero_", (result,)),
    lambda graph, _, result: graph.call_function(operator.iadd, (result, 1)),
]


@pytest.mark.parametrize("add", USES)
def test_objects_of_the_launcher_are_used_only_as_the_original_uses_them(add: Callable[[Graph, Any, Any], Any]) -> None:
    captured = holding()
    with pytest.raises(WireError, match="the original"):
        screen(with_nodes(captured, add), captured)


def test_an_object_of_the_launcher_is_given_to_no_other_call() -> None:
    captured = holding()

    def asking(*given: str) -> GraphModule:
        def add(graph: Graph, stub: Any, result: Any) -> None:
            values = tuple([{"stub": stub, "result": result}[each] for each in given])
            graph.call_function(remote_call, ("ps0", "fxlib.ps:lookup", values, {}, None))

        return with_nodes(captured, add)

    screen(asking("result"), asking("result"))
    with pytest.raises(WireError, match="uses held_by, stub"):
        screen(asking("result", "stub"), asking("result"))


def test_an_object_of_the_launcher_is_used_in_no_nested_graph() -> None:
    captured = holding()
    captured.add_module("inner", of(lambda graph: graph.call_method("get", (graph.placeholder("it"), "k"))))
    answer = with_nodes(captured, lambda graph, stub, _: graph.call_module("inner", (stub,)))
    with pytest.raises(WireError, match="than the original"):
        screen(answer, captured)


def test_tensor_code_may_use_what_the_launcher_s_own_code_returns() -> None:
    captured = holding()
    more = with_nodes(captured, lambda graph, _, result: graph.call_function(torch.relu, (result,)))
    screen(more, captured, passes=None)


def test_other_tensors_beside_what_the_launcher_s_own_code_returns_may_be_computed_otherwise() -> None:
    def beside(function: Any) -> GraphModule:
        def add(graph: Graph, _: Any, result: Any) -> None:
            other = graph.call_function(function, (argument(graph, "x"),))
            graph.call_method("relu", (graph.call_function(operator.add, (result, other)),))

        return with_nodes(holding(), add)

    original, answer = beside(torch.cos), beside(torch.sin)
    for name, tensor in original.named_parameters():  # as decoding puts it on the launcher's own
        path, _, slot = name.rpartition(".")
        answer.get_submodule(path)._parameters[slot] = tensor
    screen(answer, original, passes=None)


def test_what_is_behind_an_rref_is_not_fetched_by_its_method() -> None:
    with pytest.raises(WireError, match="fetches"):
        screen(of(with_one_more(lambda graph: graph.call_method("to_here", (argument(graph, "home"),)))), of(original))


def test_an_answer_has_the_parameters_of_the_original() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    twice = nn.ModuleDict({"one": one, "other": one})

    def build(graph: Graph) -> Any:
        x = graph.placeholder("x")
        return tuple([graph.call_module(name, (x,)) for name in ("parts.one", "parts.other")])

    original = of(build, parts=nn.ModuleDict({"one": one, "other": other}))
    screen(of(build, parts=nn.ModuleDict({"one": one, "other": other})), original)
    with pytest.raises(WireError, match=r"has another 'parts\.other\.\w+' than the original"):
        screen(of(build, parts=twice), original)


def test_an_answer_packs_its_arguments_as_the_original_does() -> None:
    class Takes(nn.Module):
        def forward(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
            return parts["x"] - parts["y"]

    original = torch.export.export(Takes(), ({"x": torch.ones(2), "y": torch.zeros(2)},)).module()
    swapped = torch.export.export(Takes(), ({"y": torch.ones(2), "x": torch.zeros(2)},)).module()
    assert isinstance(original, GraphModule)
    assert isinstance(swapped, GraphModule)
    screen(original, original)
    with pytest.raises(WireError, match="takes other arguments"):
        screen(swapped, original)


class Features(nn.Module):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = feature_store.get("127.0.0.1:1", rows)
        return x.exp().sin() + found


def test_the_wait_of_a_client_is_given_what_was_issued_once_and_nothing_else() -> None:
    original = fxlib.capture(Features())

    def answer() -> tuple[GraphModule, Node]:
        module = fxlib.optimize(original)
        graph = copy.deepcopy(module.graph)
        return GraphModule(module, graph), next(node for node in graph.nodes if is_wait(node))

    screen(answer()[0], original)
    more, wait = answer()
    wait.args = (*wait.args, "more")
    again, wait = answer()
    with again.graph.inserting_after(wait):
        again.graph.create_node("call_function", wait.target, wait.args)
    for module in (more, again):
        with pytest.raises(WireError):
            screen(module, original)


@pytest.mark.parametrize("timeout_s", [None, 5.0, 0.001])
def test_a_call_keeps_its_timeout(timeout_s: float | None) -> None:
    def waiting(seconds: float | None) -> GraphModule:
        return of(lambda graph: graph.call_function(remote_call, ("ps0", "m:f", (), {}, seconds)))

    screen(waiting(timeout_s), waiting(timeout_s))
    with pytest.raises(WireError, match="with other arguments"):
        screen(waiting(timeout_s), waiting(1.5))


def bags(offsets: Callable[[Graph, Any], Any]) -> GraphModule:
    def build(graph: Graph) -> Any:
        indices, weight, starts = (graph.placeholder(name) for name in ("indices", "weight", "starts"))
        return graph.call_function(torch.embedding_bag, (weight, indices, offsets(graph, starts)))

    return of(build)


@pytest.mark.slow
def test_offsets_of_the_answer_s_own_are_checked_before_an_operator_trusts_them(tmp_path: Path) -> None:
    program = """
import torch
from fxlib.client.answer_policy import screen
from tests.client.test_answer_policy import bags
same = bags(lambda graph, starts: starts)
given = torch.tensor([1, 2]), torch.randn(4, 2), torch.tensor([0, 1])
screen(bags(lambda graph, starts: starts), same)
from fxlib.runtime import bounds
assert not bounds.install.cache_info().currsize, "a launcher that runs its own pays nothing"
answer = bags(lambda graph, starts: graph.call_function(torch.mul, (starts, 1 << 40)))
screen(answer, same, passes=None)
same(*given)
try:
    answer(*given)
except IndexError as error:
    print(error)
"""
    assert "offsets of an embedding bag reach from 0 to" in printed(program, tmp_path)


@pytest.mark.slow
def test_a_graph_that_takes_longer_than_the_deadline_is_refused_unread() -> None:
    captured = fxlib.capture(Clicks())
    graph = wire.encode(captured).graph
    size, body = graph.ByteSize(), graph.modules[-1].graph
    relu = next(node for node in body.nodes if node.op == graph_pb2.OPCODE_CALL_MODULE)
    body.nodes.extend([relu] * 300_000)
    began_s = time.monotonic()
    with pytest.raises(LimitError, match="nodes"):
        wire.decode(wire.parse(wire.serialize(graph)), root=captured, limits=limits_of_answer(captured, 1 << 30, 6.0))
    assert time.monotonic() - began_s < 6.0
    with pytest.raises(LimitError, match="bytes of a graph"):
        wire.decode(graph, root=captured, limits=limits_of_answer(captured, size))


def test_an_answer_may_be_some_times_as_large_as_its_original_and_no_larger() -> None:
    captured = fxlib.capture(Clicks())
    limits = limits_of_answer(captured, 1_000)
    nodes = len(captured.graph.nodes)
    assert nodes * 10 < limits.nodes < nodes * 10 + 10_000
    assert limits_of_answer(captured, 1_000, 0.5).nodes == 2_000
    assert limits.weights_bytes < 1 << 28
