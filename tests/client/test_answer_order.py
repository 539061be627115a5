"""A rewritten graph does in the original's order what others may tell: modes, collectives, calls that may write."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn.parallel import DistributedDataParallel

from fxlib.client.answer_policy import screen
from fxlib.errors import WireError
from fxlib.runtime.ops import issue_call, remote_call, wait
from fxlib.runtime.ops.collectives import collective
from fxlib.spec.contract import Contract
from tests.client.test_answer_policy import SCHEDULE, Build, ask, of
from tests.shared.process_group import process_group


def modes(*values: bool) -> Build:
    return lambda graph: [graph.call_function(torch._C._set_grad_enabled, (each,)) for each in values]


def autocast(*left: int) -> Build:
    def build(graph: Graph) -> Any:
        enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
        entered = [graph.call_function(enter, ("cpu", torch.bfloat16, True, None)) for _ in range(2)]
        return [graph.call_function(leave, (entered[each],)) for each in left]

    return build


def test_grad_mode_and_autocast_change_as_in_the_original() -> None:
    screen(of(modes(False, True)), of(modes(False, True)))
    screen(of(autocast(1, 0)), of(autocast(1, 0)))
    for given, own in (
        *((modes(False), modes()), (modes(False), modes(False, True)), (modes(True, False), modes(False, True))),
        *((autocast(1), autocast(1, 0)), (autocast(1, 1), autocast(1, 0)), (autocast(), modes())),
    ):
        with pytest.raises(WireError, match="grad mode or autocast"):
            screen(of(given), of(own))


def test_a_nested_graph_changes_grad_mode_as_often_as_in_the_original() -> None:
    nested = of(modes(False))

    def outer(count: int) -> GraphModule:
        return of(lambda graph: [graph.call_module("inner") for _ in range(count)], inner=nested)

    screen(outer(1), outer(1))
    with pytest.raises(WireError, match="grad mode or autocast"):
        screen(outer(2), outer(1))


parallel: dict[str, nn.Module] = {}


def reducing(*names: str) -> Build:
    def build(graph: Graph) -> Any:
        x = graph.placeholder("x")
        return tuple([graph.call_function(collective, ("all_reduce", (x, name, "0"))) for name in names])

    return build


def wrapped(*names: str) -> GraphModule:
    def build(graph: Graph) -> Any:
        x = graph.placeholder("x")
        return tuple([graph.call_module(name, (x,)) for name in names])

    return of(build, **parallel)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(tmp_path_factory.mktemp("group")):
        parallel.update(one=DistributedDataParallel(nn.Linear(2, 2)), other=DistributedDataParallel(nn.Linear(2, 2)))
        yield
        parallel.clear()


def test_ranks_meet_in_the_order_of_the_original_and_as_often() -> None:
    screen(of(reducing("sum", "max")), of(reducing("sum", "max")))
    for given in (("max", "sum"), ("sum",), ("sum", "max", "sum")):
        with pytest.raises(WireError, match="in another order"):
            screen(of(reducing(*given)), of(reducing("sum", "max")))


def test_gradients_are_reduced_in_the_order_of_the_original() -> None:
    original = wrapped("one", "other")
    screen(wrapped("one", "other"), original)
    for given in (("other", "one"), ("one",)):
        with pytest.raises(WireError, match="in another order"):
            screen(wrapped(*given), original)


def writing(*steps: str) -> GraphModule:
    """A graph that issues calls in this order and waits for them: "a" issues, "a." waits, "A" is a blocking call.

    The function a reads and b to d write: b and c the same state, d another one. Of e nothing is known.
    """
    contracts = {"a": Contract(reads=frozenset({"t"})), "b": _WRITES, "c": _WRITES}
    contracts["d"] = Contract(writes=frozenset({"other"}))

    def build(graph: Graph) -> Any:
        issued: dict[str, Any] = {}
        results = []
        for step in steps:
            name = step[0].lower()
            call: tuple[Any, ...] = ("ps0", f"m:{name}", (), {}, None)
            if step.endswith("."):
                results.append(graph.call_function(wait, (issued[name],)))
                continue
            node = graph.call_function(remote_call if step.isupper() else issue_call, call)
            if name in contracts:
                node.meta["contract"] = contracts[name]
            issued[name] = node
            results.append(node)
        return [each for each in results if each.target is not issue_call]

    return of(build)


_WRITES = Contract(writes=frozenset({"t"}))


@pytest.mark.parametrize(
    "program, answer",
    [
        ("B C", "C B"),
        ("B C", "b c b. c."),  # on their way together, the server may run either first
        ("B E", "E B"),
        ("D E", "E D"),
        ("A B", "B A"),
        ("A B", "a b a. b."),
        ("B A", "A B"),
        ("E A", "A E"),
        ("B A C", "B C A"),
    ],
)
def test_calls_that_may_write_stay_in_order(program: str, answer: str) -> None:
    with pytest.raises(WireError, match="makes calls that may write in another order"):
        screen(writing(*answer.split()), writing(*program.split()), passes=SCHEDULE)


@pytest.mark.parametrize(
    "program, answer",
    [
        ("B D", "D B"),
        ("B D", "b d b. d."),
        ("A D", "d a a. d."),
        ("B C", "b b. c c."),
        ("A A B", "A B"),
        ("B A", "B A"),
    ],
)
def test_calls_that_touch_nothing_of_each_other_may_move(program: str, answer: str) -> None:
    screen(writing(*answer.split()), writing(*program.split()), passes=SCHEDULE)


def test_writes_stay_in_order_where_a_nested_graph_makes_them() -> None:
    def nested(inside: str, behind: str) -> GraphModule:
        return of(lambda graph: [graph.call_module("inner"), ask(graph, "ps0", behind)], inner=writing_one(inside))

    screen(of(lambda graph: [ask(graph, "ps0", "m:b"), ask(graph, "ps0", "m:c")]), nested("m:b", "m:c"))
    with pytest.raises(WireError, match="in another order"):
        screen(of(lambda graph: [ask(graph, "ps0", "m:c"), ask(graph, "ps0", "m:b")]), nested("m:b", "m:c"))


def writing_one(function: str) -> GraphModule:
    return of(lambda graph: ask(graph, "ps0", function))
