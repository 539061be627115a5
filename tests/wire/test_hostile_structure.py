"""Graphs that contradict themselves, or are too much: each is refused with the place and the reason."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from fxlib import wire
from fxlib.errors import LimitError, WireError
from fxlib.v1 import graph_pb2 as pb
from tests.wire.spoiled import Edit, refusal, whole

STRUCTURE: dict[str, tuple[Edit, str]] = {
    "forward": (lambda graph, node: setattr(node.args[0], "node", 99), "does not come before it"),
    "itself": (lambda graph, node: setattr(node.args[0], "node", 3), "does not come before it"),
    "one name": (lambda graph, node: setattr(node, "name", "x"), "two nodes have one name"),
    "no target": (lambda graph, node: setattr(node, "target", 99), "refers to target 99"),
    "no value": (lambda graph, node: node.args.add().SetInParent(), "is empty"),
    "no opcode": (lambda graph, node: setattr(node, "op", 0), "does not go with opcode 0"),
    "future opcode": (lambda graph, node: setattr(node, "op", 17), "does not go with opcode 17"),
    "other opcode": (lambda graph, node: setattr(node, "op", pb.OPCODE_CALL_METHOD), "does not go with opcode"),
    "second output": (lambda graph, node: graph.modules[-1].graph.nodes.add(op=6, name="o", target=6), ""),
    "no output": (lambda graph, node: (graph.modules[-1].graph.nodes.pop(), graph.targets.pop()), "last node is not"),
    "keyword twice": (lambda graph, node: node.kwargs.add(name="alpha").value.SetInParent(), "have one name"),
    "list as key": (lambda graph, node: node.args.add().dict.items.add().key.list.SetInParent(), "cannot be the key"),
    "tensor as argument": (lambda graph, node: setattr(node.args.add(), "tensor", 0), "may not stand here"),
    "opaque argument": (lambda graph, node: setattr(node.args.add(), "opaque", "x"), "may not stand here"),
    "function": (lambda graph, node: setattr(node.args.add(), "function", "torch.add"), "may not stand here"),
    "text missing": (lambda graph, node: setattr(node, "stack_trace", 5), "refers to entry 5"),
    "no modules": (lambda graph, node: graph.ClearField("modules"), "not a GraphModule"),
    "cycle": (lambda graph, node: setattr(graph.modules[-1].children[0], "module", 1), "does not come before it"),
    "no class": (lambda graph, node: setattr(graph.modules[0], "leaf", "DataParallel"), "not a class of torch.nn"),
    "walk to class": (lambda graph, node: setattr(graph.modules[0], "leaf", "__class__"), "not a class of torch.nn"),
    "hides forward": (lambda graph, node: setattr(graph.modules[0].attributes[0], "name", "forward"), "hides"),
    "hides hooks": (lambda graph, node: setattr(graph.modules[0].attributes[0], "name", "_forward_hooks"), "hides"),
    "hides graph": (lambda graph, node: setattr(graph.modules[-1].children[0], "name", "graph"), "hides"),
    "two slots": (lambda graph, node: graph.modules[-1].buffers.add(name="weight"), "hides"),
    "tensor missing": (lambda graph, node: setattr(graph.modules[-1].parameters[0], "tensor", 99), "refers to tensor"),
    "storage missing": (lambda graph, node: setattr(graph.tensors[0], "storage", 99), "refers to storage"),
    "beyond": (lambda graph, node: setattr(graph.tensors[0], "offset", 1 << 40), "beyond"),
    "negative size": (lambda graph, node: graph.tensors[0].shape.append(-1), "negative size"),
    "negative stride": (lambda graph, node: graph.tensors[0].stride.extend([-1] * 2), "strides or offset"),
    "integer gradient": (lambda graph, node: setattr(graph.tensors[0], "dtype", "int64"), "cannot take a gradient"),
    "quantized": (lambda graph, node: setattr(graph.tensors[0], "dtype", "qint8"), "unknown dtype"),
    "digest": (lambda graph, node: setattr(graph.storages[0].data, "sha256", "../../etc/passwd"), "not the SHA-256"),
    "blob": (lambda graph, node: graph.storages[0].data.MergeFrom(pb.BlobRef(sha256="0" * 64, size=9999)), "a blob of"),
    "contract": (lambda graph, node: graph.contracts.add(pure=True, reads=["x"]), "pure"),
    "result": (lambda graph, node: setattr(graph.contracts.add().returns.container, "name", "a.C"), "a container may"),
    "range": (lambda graph, node: setattr(node.args.add().range, "start", 1), "step 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", STRUCTURE)
def test_a_graph_that_contradicts_itself_is_refused(fault: str) -> None:
    edit, reason = STRUCTURE[fault]
    graph = whole()
    edit(graph, graph.modules[-1].graph.nodes[3])
    assert reason in str(refusal(graph))


def test_an_error_names_node_and_field() -> None:
    graph = whole()
    graph.modules[-1].graph.nodes[3].args[1].list.items.add().node = 44
    assert refusal(graph).where == "node 'add' (3), args[1]"


def test_names_of_a_recurrent_module_s_weights_reach_nothing_else() -> None:
    graph = whole()
    names = next(each for each in graph.modules[0].attributes if each.name == "_flat_weights_names")
    names.value.list.items[0].text = "__class__"
    with pytest.raises(WireError, match=r"module 'part': a recurrent module names weights"):
        wire.decode(graph)


def test_a_recurrent_module_without_its_rate_of_dropout_is_refused() -> None:
    graph = whole()
    attributes = graph.modules[0].attributes
    del attributes[next(at for at, each in enumerate(attributes) if each.name == "dropout")]
    with pytest.raises(WireError, match=r"module 'part': the module has no rate of dropout"):
        wire.decode(graph)


@pytest.mark.parametrize("version", [0, 2, 4_000_000_000])
def test_another_version_of_the_format_is_refused_by_number(version: int) -> None:
    graph = whole()
    graph.format = version
    error = refusal(graph)
    assert error.where == "graph.format"
    assert f"version {version}" in str(error)


def nested(depth: int) -> pb.Value:
    value = pb.Value(none=True)
    for _ in range(depth):
        value = pb.Value(list=pb.Values(items=[value]))
    return value


def grown(edit: Callable[[pb.Graph], Any]) -> pb.Graph:
    graph = whole()
    edit(graph)
    return graph


def doubling(graph: pb.Graph) -> None:
    root = graph.modules.pop()
    for index in range(30):
        module = graph.modules.add(leaf="Module")
        below = len(graph.modules) - 2 if index else 0
        module.children.add(name="a", module=below)
        module.children.add(name="b", module=below)
    root.children.add(name="deep", module=len(graph.modules) - 1)
    graph.modules.append(root)


@pytest.mark.parametrize(
    "field,limit,edit",
    [
        ("nodes", 3, lambda graph: None),
        ("graph_bytes", 100, lambda graph: None),
        ("modules", 1, lambda graph: None),
        ("modules", 100_000, doubling),
        ("nesting", 8, lambda graph: graph.modules[-1].graph.nodes[3].args[1].CopyFrom(nested(9))),
        ("text_chars", 10, lambda graph: setattr(graph.modules[-1].graph.nodes[3].args[1], "text", "x" * 11)),
        ("integer_bits", 64, lambda graph: setattr(graph.modules[-1].graph.nodes[3].args[1], "big_integer", b"1" * 99)),
        ("tensor_elements", 10, lambda graph: graph.tensors[0].shape.extend([99])),
        ("tensor_dims", 3, lambda graph: graph.tensors[0].shape.extend([1, 1, 1])),
        ("weights_bytes", 1000, lambda graph: setattr(graph.storages[0], "bytes", 1 << 62)),
    ],
)
def test_a_limit_that_is_exceeded_is_named(field: str, limit: int, edit: Callable[[pb.Graph], Any]) -> None:
    error = refusal(grown(edit), **{field: limit})
    assert isinstance(error, LimitError)
    assert f"Limits.{field}" in str(error)


@pytest.mark.parametrize("shape", [(1 << 62, 2), (1 << 40, 1 << 40), (1 << 62,) * 60])
def test_giant_shapes_are_refused_before_memory_is_set_aside(shape: tuple[int, ...]) -> None:
    graph = whole()
    del graph.tensors[0].shape[:]
    graph.tensors[0].shape.extend(shape)
    assert isinstance(refusal(graph), WireError)


def test_deeper_nesting_than_protobuf_reads_is_refused() -> None:
    inner = b"\x08\x01"  # none: true
    for _ in range(300):
        items = b"\x0a" + _varint(len(inner)) + inner
        inner = b"\x52" + _varint(len(items)) + items
    node = b"\x22" + _varint(len(inner)) + inner
    body = b"\x0a" + _varint(len(node)) + node
    module = b"\x0a" + _varint(len(body)) + body
    with pytest.raises(WireError, match="the bytes are not a graph"):
        wire.parse(b"\x12" + _varint(len(module)) + module)


def _varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


@pytest.mark.parametrize("data", [b"\xff" * 50, b"\x0a", b"\x12\xff\xff\xff\xff\x0f", b"<html>", b"\x3a\x01\xff"])
def test_bytes_that_are_no_graph_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.validate(wire.parse(data))


def test_too_many_bytes_are_refused_before_they_are_read() -> None:
    with pytest.raises(LimitError, match="graph_bytes"):
        wire.parse(b"\0" * 11, wire.Limits(graph_bytes=10))


def test_a_graph_that_fails_is_left_as_it_was() -> None:
    graph = whole()
    graph.modules[-1].graph.nodes[3].target = 99
    before = copy.deepcopy(graph)
    refusal(graph)
    assert graph == before
