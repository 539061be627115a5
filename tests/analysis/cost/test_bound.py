"""The lower bound: by brute force, no legal order of a small program is simulated to end sooner."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from fxlib.analysis.cost.bound import bound
from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.cost.simulate import predict, simulate
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Profile, ServerProfile, Spread
from tests.analysis.cost.test_simulate import MS, call, profile, server, two_lookups
from tests.analysis.sketch import WRITE, Sketch
from tests.shared.many import many

READ = Contract(reads=frozenset({"table"}), batchable=True)
PUSH = replace(WRITE, batchable=True)
SPLIT = recipes.from_passes([("split_calls", {})])
TOGETHER = recipes.from_passes([("split_calls", {}), ("coalesce_calls", {}), ("coalesce_writes", {})])
MOST_ORDERS = 400


def random_program(dice: random.Random) -> CapturedModule:
    """A few calls and some work, each on values made before."""
    program = Sketch("x", "ids")
    values = list(program.inputs)
    for place in range(dice.randint(3, 6)):
        value = dice.choice(values)
        if dice.random() < 0.5:
            contract = dice.choice([READ, READ, READ, WRITE, PUSH])
            values.append(program.call(f"c{place}", value, to=dice.choice(["ps0", "ps1"]), contract=contract))
        else:
            values.append(program.work(f"w{place}", torch.add, value, dice.choice(values)))
    return program.returns(*values[2:])


def random_profile(module: GraphModule, dice: random.Random) -> Profile:
    """Figures for everything in the program."""

    def some(most: float) -> float:
        return dice.choice([0.0, dice.random()]) * most * MS

    servers = tuple(
        ServerProfile(
            name=name,
            round_trip_s=some(1),
            concurrency=dice.choice([1, 2, 16]),
            bytes_per_s=dice.choice([1e6, 1e9]),
            per_item_s=dice.choice([None, some(2)]),
            per_call_s=some(1),
            per_turn_s=dice.choice([None, some(2)]),
        )
        for name in ("ps0", "ps1")
    )
    calls, nodes = [], []
    for node in module.graph.nodes:
        if node.name.startswith("c"):
            request, response = dice.randrange(2000), dice.randrange(2000)
            calls.append(
                CallProfile(
                    call=node.name,
                    function=f"shop:{node.name}",
                    to=str(node.args[0]),
                    request_bytes=request,
                    response_bytes=response,
                    returns=Opaque(),
                    issue_s=some(0.5),
                    wait_s=some(0.1),
                    service_s=Spread.of([some(10)]),
                )
            )
        elif node.name.startswith("w"):
            nodes.append(NodeProfile(node=node.name, seconds=some(5), output_bytes=100))
    return Profile(calls=tuple(calls), nodes=tuple(nodes), servers=servers, loss_s=some(1), backward_s=some(4))


def legal_orders(dependencies: Dependencies) -> Iterator[list[Node]]:
    """Every order of a program's nodes that keeps its dependencies."""
    nodes = dependencies.effects.nodes
    sources = [set(dependencies.sources(place)) for place in range(len(nodes))]

    def extended(order: list[int], rest: frozenset[int]) -> Iterator[list[int]]:
        if not rest:
            yield order
        for place in sorted(rest):
            if sources[place].isdisjoint(rest):
                yield from extended([*order, place], rest - {place})

    for order in extended([], frozenset(range(len(nodes)))):
        yield [nodes[place] for place in order]


def check(seed: int) -> None:
    dice = random.Random(seed)
    module = random_program(dice)
    known = random_profile(module, dice)
    least_s = bound(module, known).step_s
    assert least_s <= predict(module, known).step_s + 1e-12
    for recipe in (SPLIT, TOGETHER):
        rewritten = recipes.apply(module, recipe, profile=known).module
        costs = Costs.of(rewritten, known)
        for order in itertools.islice(legal_orders(Dependencies.of(rewritten)), MOST_ORDERS):
            found = simulate(order, costs).step_s
            assert least_s <= found + 1e-12, f"seed {seed}: bound {least_s}, {found} for {order}"
        assert least_s <= bound(rewritten, known).step_s + 1e-12 or recipe is TOGETHER


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_legal_order_beats_the_bound(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_no_legal_order_of_many_programs_beats_the_bound() -> None:
    for seed in range(many(60)):
        check(seed)


def test_calls_in_one_message_share_an_issue() -> None:
    check(349)


def test_everything_is_bound_by_the_least_that_was_seen_of_it() -> None:
    usual = profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1}, backward_s=2)
    calls = tuple(replace(each, service_s=Spread.of([4 * MS, 5 * MS, 9 * MS])) for each in usual.calls)
    found = bound(two_lookups(), replace(usual, calls=calls, least_share=0.5))
    assert (found.limiting, round(found.step_s / MS, 6)) == ("critical path", 4 + 0.5 * (1 + 2))
    assert round(found.compute_s / MS, 6) == 0.5 * (3 + 1 + 2)


def test_a_program_of_much_work_is_bound_by_it() -> None:
    found = bound(two_lookups(), profile([call("a", 5), call("b", 7)], {"dense": 30, "both": 1}))
    assert (found.limiting, round(found.step_s / MS, 6)) == ("compute", 31)


def test_a_program_of_long_calls_is_bound_by_its_critical_path() -> None:
    found = bound(two_lookups(), profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1}, backward_s=2))
    assert (found.limiting, round(found.step_s / MS, 6)) == ("critical path", 7 + 1 + 2)


def test_a_slow_server_is_a_bound_of_its_own() -> None:
    found = bound(two_lookups(), profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1}, server(concurrency=1)))
    assert (found.limiting, round(found.step_s / MS, 6)) == ("server", 12)


def lookups(
    tables: int, each: int, known: ServerProfile, dice: random.Random | None = None
) -> tuple[CapturedModule, Profile]:
    """Reads of one server's tables, each of which has a batched form, of 0.6 ms, or of what the dice give."""
    program, reads, calls = Sketch("ids"), [], []
    for table in range(tables):
        contract = replace(READ, batchable=dice is not None and dice.random() < 0.5, batched_by=f"shop:many{table}")
        for place in range(each if dice is None else dice.randint(1, each)):
            read = program.call(f"c{table}_{place}", *program.inputs, contract=contract)
            read.args = (read.args[0], f"shop:f{table}", *read.args[2:])
            reads.append(read)
            took_ms = 0.6 if dice is None else 3 * dice.random()
            calls.append(replace(call(read.name, took_ms), function=f"shop:f{table}"))
    return program.returns(*reads), profile(calls, {}, known)


def least_of(module: CapturedModule, known: Profile) -> float:
    return bound(recipes.apply(module, SPLIT, profile=known).module, known, typical=True).step_s


@pytest.mark.parametrize("tables, each", [(2, 9), (4, 9), (3, 17)])
def test_what_a_batch_moves_to_the_rpc_layer_is_no_work_of_its_server(tables: int, each: int) -> None:
    busy = server(round_trip_s=0.4 * MS, concurrency=1, per_call_s=0.4 * MS, per_item_s=0.2 * MS, per_turn_s=0.2 * MS)
    module, known = lookups(tables, each, busy)
    assert least_of(module, known) == pytest.approx(tables * each * (0.2 - 0.25 * 0.4) * MS)
    assert least_of(module, known) <= predict(recipes.apply(module, profile=known).module, known).step_s


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_of_a_busy_server_beats_the_bound(seed: int) -> None:
    dice = random.Random(seed)
    some = [dice.choice([None, dice.random() * MS]) for _ in range(3)]
    busy = replace(
        server(round_trip_s=dice.random() * MS, concurrency=dice.choice([1, 2, 4])),
        per_call_s=some[0],
        per_item_s=some[1],
        per_turn_s=some[2],
    )
    module, known = lookups(4, 10, busy, dice)
    for recipe in ("schedule", SPLIT, TOGETHER):
        found = predict(recipes.apply(module, recipe, profile=known).module, known)
        assert least_of(module, known) <= found.step_s * (1 + 1e-9)


def test_a_server_that_nothing_was_repeated_on_may_work_on_all_calls_at_once() -> None:
    program = Sketch("ids")
    issued = [program.issue(name, *program.inputs, contract=None) for name in ("a", "b")]
    module = program.returns(*(program.wait(f"wait_{each.name}", each) for each in issued))
    found = bound(module, profile([call("a", 5), call("b", 7)], {}, server(concurrency=1)))
    assert (round(found.server_s / MS, 6), round(found.step_s / MS, 6)) == (7, 7)


def test_a_narrow_link_is_a_bound_of_its_own() -> None:
    calls = [call(name, 8, size=8000) for name in ("a", "b")]
    found = bound(two_lookups(), profile(calls, {"dense": 3, "both": 1}, server(bytes_per_s=1e6)))
    assert (found.limiting, round(found.step_s / MS, 6)) == ("transfer", 16)


def test_the_bound_of_a_program_is_that_of_its_split_form() -> None:
    module, known = two_lookups(), profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1})
    assert bound(module, known).step_s == bound(recipes.apply(module, SPLIT).module, known).step_s


def program_with_peers(dice: random.Random) -> tuple[CapturedModule, Profile]:
    """A few collectives, calls, issues of the program's own, and work, each on values made before."""
    program = Sketch("x", "ids")
    values, calls, work, in_flight = list(program.inputs), [], {}, []
    for place in range(dice.randint(3, 7)):
        value, kind = dice.choice(values), dice.choice(["collective", "call", "issue", "wait", "work"])
        name, took_ms = f"{kind}{place}", 10 * dice.random()
        if kind == "collective":
            values.append(program.collective(name, value))
            calls.append(replace(call(name, took_ms, to="process group 0"), function="all_reduce"))
        elif kind == "call":
            values.append(program.call(name, value, contract=dice.choice([READ, WRITE, PUSH, None])))
            calls.append(call(name, took_ms))
        elif kind == "issue":
            in_flight.append(program.issue(name, value, contract=dice.choice([READ, WRITE, None])))
            calls.append(call(name, took_ms))
        elif kind == "wait" and in_flight:
            issue = in_flight.pop()
            values.append(program.wait(f"wait_{issue.name}", issue))
        else:
            values.append(program.work(name, torch.add, value, dice.choice(values)))
            work[name] = took_ms / 2
    values.extend(program.wait(f"wait_{issue.name}", issue) for issue in in_flight)
    return program.returns(*values[2:]), profile(calls, work, server(), server("process group 0"))


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_of_a_program_with_peers_is_that_of_its_split_form(seed: int) -> None:
    module, known = program_with_peers(random.Random(seed))
    least_s = bound(module, known).step_s
    assert least_s == pytest.approx(bound(recipes.apply(module, SPLIT, profile=known).module, known).step_s)
    for recipe in ("schedule", SPLIT, TOGETHER):
        assert least_s <= predict(recipes.apply(module, recipe, profile=known).module, known).step_s * (1 + 1e-9)


def test_a_bound_can_be_drawn() -> None:
    found = bound(two_lookups(), profile([call("a", 5), call("b", 7)], {"dense": 3, "both": 1}, backward_s=2))
    assert found.timeline.step_s == found.step_s
    assert {span.kind for span in found.timeline.spans} == {"forward", "backward", "in_flight"}
