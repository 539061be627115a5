"""Which memory, servers and generators a node touches."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxlib.analysis import Effects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import GENERATOR, PEERS, PROCESS, ServerState, Storage
from fxlib.spec.contract import PURE, Contract
from tests.analysis.sketch import READ, WRITE, Sketch


def conflict(module: GraphModule, one: Node, other: Node) -> bool:
    """Whether one of the nodes writes memory that the other touches."""
    effects = Effects.of(module)
    first, second = effects[one], effects[other]
    return bool(first.writes & (second.reads | second.writes) or second.writes & first.reads)


def test_a_write_through_a_view_is_a_write_to_the_base() -> None:
    program = Sketch("x")
    base = program.work("base", torch.sin, program.inputs[0])
    reader = program.work("reader", torch.cos, base)
    view = program.work("view", "view", base, -1)
    writer = program.work("writer", "add_", view, 1)
    assert conflict(program.returns(reader, writer), reader, writer)


def test_a_write_to_fresh_memory_leaves_its_source_alone() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    reader = program.work("reader", torch.cos, x)
    fresh = program.work("fresh", torch.sin, x)
    writer = program.work("writer", "add_", fresh, 1)
    assert not conflict(program.returns(reader, writer), reader, writer)


def test_a_container_shares_the_memory_of_what_it_holds() -> None:
    program = Sketch("x")
    parts = program.work("parts", torch.chunk, program.work("base", torch.sin, program.inputs[0]), 2)
    first = program.work("first", operator.getitem, parts, 0)
    second = program.work("second", operator.getitem, parts, 1)
    reader = program.work("reader", torch.cos, first)
    writer = program.work("writer", "add_", second, 1)
    assert conflict(program.returns(reader, writer), reader, writer)


def test_dicts_that_are_joined_hold_the_same_tensors() -> None:
    for joined in ("answer", "own"):
        program = Sketch("x")
        answer = program.call("answer", contract=Contract(reads=frozenset({"table"}), returns={"rows": None}))
        own = program.work("own", dict, [("rows", program.work("sine", torch.sin, program.inputs[0]))])
        both = program.work("both", operator.or_, answer, own)
        part = program.work("part", operator.getitem, {"answer": answer, "own": own}[joined], "rows")
        reader = program.work("reader", torch.cos, part)
        writer = program.work("writer", "add_", program.work("again", operator.getitem, both, "rows"), 1)
        assert conflict(program.returns(reader, writer), reader, writer)


def test_an_item_counted_from_the_end_is_the_same_item() -> None:
    program = Sketch("x")
    several = program.work("several", torch.ops.aten.topk.default, program.inputs[0], 2)
    reader = program.work("reader", torch.cos, program.work("first", operator.getitem, several, 0))
    writer = program.work("writer", "add_", program.work("again", operator.getitem, several, -2), 1)
    assert conflict(program.returns(reader, writer), reader, writer)


def test_a_sequence_put_together_with_plus_shares_the_memory_of_its_parts() -> None:
    for together in (
        lambda parts, more: (operator.add, parts, (more,)),
        lambda parts, more: (operator.add, [more], parts),
        lambda parts, _: (operator.add, parts, parts),
        lambda parts, _: (operator.mul, 2, parts),
    ):
        program = Sketch("x")
        base = program.work("base", torch.sin, program.inputs[0])
        parts = program.work("parts", "chunk", base, 2)
        both = program.work("both", *together(parts, base))
        twice = program.work("twice", operator.add, program.work("rest", operator.getitem, both, slice(1, None)), both)
        reader = program.work("reader", torch.cos, program.work("item", operator.getitem, twice, 0))
        writer = program.work("writer", "add_", base, 1)
        assert conflict(program.returns(reader, writer), reader, writer)


def test_a_sum_of_tensors_has_memory_of_its_own() -> None:
    program = Sketch("x", "y")
    x, y = program.inputs
    reader = program.work("reader", torch.cos, x)
    fresh = program.work("fresh", operator.add, x, program.work("product", operator.mul, y, 2))
    writer = program.work("writer", "add_", fresh, 1)
    assert not conflict(program.returns(reader, writer), reader, writer)


def test_the_methods_behind_pythons_operators_write_as_the_operators_do() -> None:
    for method, *arguments in (("__setitem__", 0, 1), ("__iadd__", 1), ("__idiv__", 2), ("__iand__", 1)):
        program = Sketch("x")
        base = program.work("base", torch.sin, program.inputs[0])
        reader = program.work("reader", torch.cos, base)
        writer = program.work("writer", method, base, *arguments)
        assert conflict(program.returns(reader, writer), reader, writer)


@pytest.mark.slow
def test_every_method_of_a_tensor_has_effects_that_are_known_or_unknown() -> None:
    for name in filter(torch.Tensor.__dict__.__contains__, dir(torch.Tensor)):
        program = Sketch("x")
        node = program.work("node", name, program.inputs[0])
        assert Effects.of(program.returns(node))[node].part in (Part.LOCAL, Part.FENCE)


def test_inputs_may_share_memory_with_one_another() -> None:
    program = Sketch("x", "y")
    x, y = program.inputs
    reader, writer = program.work("reader", torch.cos, y), program.work("writer", "add_", x, 1)
    assert conflict(program.returns(reader, writer), reader, writer)


def test_a_buffer_that_is_written_may_be_an_input() -> None:
    root = nn.Module()
    root.register_buffer("seen", torch.zeros(2))
    program = Sketch("x", root=root)
    reader = program.work("reader", torch.cos, program.inputs[0])
    writer = program.work("writer", "add_", program.state("seen"), 1)
    assert conflict(program.returns(reader, writer), reader, writer)


def test_running_statistics_are_written_and_are_no_input() -> None:
    root = nn.Module()
    root.norm = nn.BatchNorm1d(2)
    program = Sketch("x", root=root)
    (x,) = program.inputs
    reader = program.work("reader", torch.cos, x)
    norm = program.module("norm", "norm", x)
    sender = program.call("sender", program.state("norm.running_mean"))
    module = program.returns(reader, norm, sender)
    assert not conflict(module, reader, norm)
    assert conflict(module, norm, sender)


def test_tied_weights_are_one_memory() -> None:
    root = nn.Module()
    root.one = nn.Parameter(torch.zeros(2))
    root.other = root.one
    program = Sketch(root=root)
    reader = program.work("reader", torch.cos, program.state("one"))
    writer = program.work("writer", "add_", program.work("plain", "detach", program.state("other")), 1)
    assert conflict(program.returns(reader, writer), reader, writer)


def test_both_halves_of_a_call_hold_its_arguments() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    issue = program.issue("issue", x)
    wait = program.wait("wait", issue)
    writer = program.work("writer", "add_", x, 1)
    module = program.returns(wait, writer)
    assert conflict(module, issue, writer)
    assert conflict(module, wait, writer)


def test_contracts_say_what_a_call_does_to_which_server() -> None:
    program = Sketch("to")
    clock = Contract(reads=frozenset({"clock"}), writes=frozenset({"log"}))
    calls = [
        program.call("read", contract=READ),
        program.call("written", to=program.inputs[0], contract=WRITE),
        program.call("pure", contract=PURE),
        program.call("both", contract=clock),
        program.call("unknown", contract=None),
    ]
    effects = Effects.of(program.returns(*calls))
    read, written, pure, both, unknown = (effects[call] for call in calls)
    assert read.reads == {ServerState("ps0", "table")}
    assert written.writes == {ServerState(None, "table")}
    assert not pure.reads | pure.writes
    assert both.reads == {ServerState("ps0", "clock")}
    assert both.writes == {ServerState("ps0", "log")}
    assert unknown.writes == {ServerState(), PROCESS, PEERS}
    assert GENERATOR in unknown.reads
    assert [effects[call].commits for call in calls] == [False, True, False, True, True]


def test_a_call_sends_an_argument_as_a_call_to_this_very_process_may_have_left_it() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    unknown = program.call("unknown", x, to="trainer", contract=None)
    given = program.call("given", x, contract=PURE)
    own = program.call("own", program.work("fresh", torch.sin, 1.0), contract=PURE)
    module = program.returns(unknown, given, own)
    assert conflict(module, unknown, given)
    assert not conflict(module, unknown, own)


def test_memory_that_nobody_writes_is_no_effect() -> None:
    program = Sketch("x")
    (x,) = program.inputs
    effects = Effects.of(program.returns(program.call("read", x), program.work("reader", torch.cos, x)))
    assert not any(isinstance(each, Storage) for node in effects.per_node for each in node.reads | node.writes)
