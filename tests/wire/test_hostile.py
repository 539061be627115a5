"""Graphs that mean harm, or nothing at all: each is refused with the place and the reason, and nothing of it runs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxlib import wire
from fxlib.errors import LimitError, WireError
from fxlib.runtime import remote_call
from fxlib.v1 import graph_pb2 as pb
from tests.wire.support import calling, graph_of

CODE = "x): __import__('os').abort()  #"
Edit = Callable[[pb.Graph, pb.Node], Any]


def whole() -> pb.Graph:
    """A graph with something of everything."""
    root: Any = nn.Module()
    root.part, root.weight, root.scale = nn.LSTM(3, 3), nn.Parameter(torch.ones(3)), 2.0

    def build(graph: Graph, x: Node) -> Node:
        weight, scale = graph.get_attr("weight"), graph.get_attr("scale")
        y = graph.call_method("view", (graph.call_function(torch.add, (x, weight), {"alpha": scale}), -1, 3))
        return graph.call_function(getattr, (graph.call_module("part", (y,)), "shape"))

    graph = Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return wire.encode(GraphModule(root, graph)).graph


def node_of(graph: pb.Graph, op: int) -> pb.Node:
    return next(node for node in graph.modules[-1].graph.nodes if node.op == op)


def target_of(graph: pb.Graph, op: int) -> pb.Target:
    return graph.targets[node_of(graph, op).target]


def refusal(graph: pb.Graph, **limits: int) -> WireError:
    """Both doors are shut, and say the same."""
    with pytest.raises(WireError) as first:
        wire.validate(graph, wire.Limits(**limits))
    with pytest.raises(WireError) as second:
        wire.decode(graph, limits=wire.Limits(**limits))
    assert str(first.value) == str(second.value)
    return first.value


def test_the_graph_that_these_tests_spoil_is_a_good_one() -> None:
    wire.validate(whole())
    wire.decode(whole())


CODE_IN_NAMES: dict[str, tuple[Edit, str]] = {
    "a node": (lambda graph, node: setattr(node, "name", CODE), "is not an identifier"),
    "a keyword": (lambda graph, node: setattr(node.kwargs[0], "name", "a=1, b"), "keyword 'a=1, b'"),
    "Python's keyword": (lambda graph, node: setattr(node, "name", "lambda"), "is not an identifier"),
    "a dunder": (lambda graph, node: setattr(node, "name", "__debug__"), "is not an identifier"),
    "a newline": (lambda graph, node: setattr(node, "name", "x\nimport os"), "is not an identifier"),
    "a lookalike": (
        lambda graph, node: setattr(node.kwargs[0], "name", "\N{FULLWIDTH LATIN SMALL LETTER E}xec"),
        "is not an identifier",
    ),
    "call": (lambda graph, node: setattr(node, "call", "x\rimport os"), "control characters"),
    "class": (lambda graph, node: setattr(graph.modules[-1].graph, "class_name", CODE), "is not an identifier"),
    "annotation": (lambda graph, node: setattr(node.type, "name", CODE), "unknown annotation"),
    "slot": (
        lambda graph, node: setattr(graph.modules[-1].children[0], "name", 'a");abort("'),
        "neither an identifier",
    ),
    "stack trace": (lambda graph, node: graph.texts.append('File "a", line 1, in f\n x\rimport os'), "control char"),
    "end of a dump": (lambda graph, node: graph.texts.append('"""\nimport os'), "triple quotes"),
    "line deleter": (lambda graph, node: setattr(node.args.add(), "text", "# COUNTER: 1"), "deletes a line"),
    "device": (lambda graph, node: setattr(node.args.add(), "device", CODE), "unknown device"),
    "dtype": (lambda graph, node: setattr(node.args.add(), "dtype", CODE), "unknown dtype"),
    "tuple class": (lambda graph, node: setattr(node.args.add().named_tuple, "name", CODE), "is no label"),
}


@pytest.mark.parametrize("place", CODE_IN_NAMES)
def test_code_in_a_name_is_refused(place: str) -> None:
    edit, reason = CODE_IN_NAMES[place]
    graph = whole()
    edit(graph, node_of(graph, pb.OPCODE_CALL_FUNCTION))
    assert reason in str(refusal(graph))


@pytest.mark.parametrize("name", [CODE, "x=exec('1')", "*", "***x", "self", "x: int", "x, y", "", "__x__", "if"])
def test_code_in_the_name_of_a_parameter_is_refused(name: str) -> None:
    graph = whole()
    target_of(graph, pb.OPCODE_PLACEHOLDER).path = name
    assert refusal(graph).where == "node 'x' (0), target"


FUNCTIONS = [
    "torch.os.system", "torch.load", "torch.save", "torch.hub.load", "torch.jit.load", "torch.from_file",
    "torch.ops.load_library", "torch.utils.data", "torch.compile", "torch.vmap", "torch.nn.functional.torch.os.system",
    "torch.Tensor.apply_", "torch.Tensor.__reduce_ex__", "torch.Tensor.__setstate__", "torch.Tensor.data_ptr",
    "operator.attrgetter", "operator.methodcaller", "operator.itemgetter", "operator.call", "_operator.add",
    "builtins.eval", "builtins.exec", "builtins.open", "builtins.__import__", "builtins.compile", "builtins.setattr",
    "builtins.vars", "builtins.type", "builtins.map", "builtins.print", "os.system", "subprocess.run", "pickle.loads",
    "functools.partial", "importlib.import_module", "fxlib.runtime.functions.allow_module", "torch", "", "eval", CODE,
    "fxlib.runtime.functions.register", "torch.nn.functional.handle_torch_function", "torch.multiprocessing.spawn",
]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_on_no_allow_list_is_refused(name: str) -> None:
    graph = whole()
    target_of(graph, pb.OPCODE_CALL_FUNCTION).function = name
    assert "is not on the allow-list" in str(refusal(graph))


@pytest.mark.parametrize(
    "name",
    [
        "aten::from_file", "aten::from_file.default", "aten::set_.source_Tensor", "aten::no_such", "mkldnn::data_ptr",
        "aten::add.__class__", "aten::__class__", "aten::_dir", "profiler::_record_function_enter", "aten", "::", "",
        "higher_order::cond", "os::system", "inductor::resize_storage_bytes_", "aten::add.Tensor.x", "aten::add.",
        "debugprims::load_tensor", "aten::record_stream.default", "symm_mem::x",
    ],
)  # fmt: skip
def test_an_operator_outside_of_the_allowed_namespaces_is_refused(name: str) -> None:
    graph = whole()
    target_of(graph, pb.OPCODE_CALL_FUNCTION).operator = name
    assert "is not on the allow-list of torch.ops" in str(refusal(graph))


@pytest.mark.parametrize(
    "name",
    [
        "__reduce_ex__", "__reduce__", "__setstate__", "__class__", "__getattribute__", "__init_subclass__", "apply_",
        "map_", "register_hook", "numpy", "storage", "untyped_storage", "data_ptr", "share_memory_", "format", CODE,
        "format_map", "mro", "", "view.__class__", "relu()", "set_", "module_load", "rpc_sync", "local_value",
    ],
)  # fmt: skip
def test_a_method_on_no_allow_list_is_refused(name: str) -> None:
    graph = whole()
    target_of(graph, pb.OPCODE_CALL_METHOD).method = name
    assert "is not on the allow-list" in str(refusal(graph))


@pytest.mark.parametrize(
    "name", ["__globals__", "__class__", "_parameters", "a.b", "a b", "apply_", "storage", "", "if"]
)
def test_getattr_reads_no_private_name(name: str) -> None:
    graph = whole()
    node = graph.modules[-1].graph.nodes[-2]
    node.args[1].text = name
    error = refusal(graph)
    assert error.where.endswith("args[1]")
    assert "may not be read" in str(error)


def test_getattr_takes_its_name_from_no_node() -> None:
    graph = whole()
    graph.modules[-1].graph.nodes[-2].args[1].node = 0
    assert "may not be read" in str(refusal(graph))


@pytest.mark.parametrize(
    "path", ["__class__", "part.__class__", "part.forward", "weight.data", "graph", "..", "", "part.", CODE]
)
@pytest.mark.parametrize("op", [pb.OPCODE_GET_ATTR, pb.OPCODE_CALL_MODULE])
def test_a_path_leads_to_slots_of_the_message_alone(op: int, path: str) -> None:
    graph = whole()
    target_of(graph, op).path = path
    assert "there is no" in str(refusal(graph))


def test_a_key_function_may_not_be_passed() -> None:
    graph = wire.encode(graph_of(lambda graph, x: graph.call_function(max, (x,), {"key": x}))).graph
    assert "may not take a key function" in str(refusal(graph))


@pytest.mark.parametrize(
    "name", ["os:system()", ".__class__", ".__reduce__", "system", "", "os.system", "a:b c", ".a.b"]
)
def test_the_name_of_a_remote_function_is_a_name(name: str) -> None:
    graph = wire.encode(
        graph_of(lambda graph, x: graph.call_function(remote_call, ("ps", "a:b", (x,), {}, None)))
    ).graph
    node_of(graph, pb.OPCODE_CALL_FUNCTION).args[1].text = name
    assert "does not name a remote function" in str(refusal(graph))


def test_names_of_keyword_arguments_in_a_pytree_are_names() -> None:
    exported = torch.export.export(Keyword(), (torch.ones(2),), {"bias": torch.ones(2)}, strict=False)
    graph = wire.encode(exported.module(check_guards=False)).graph
    entry = graph.modules[-1].graph.pytree.inputs.tuple.items[1].dict.items[0]
    entry.key.text = "bias': __import__('os').abort(), 'x"
    assert refusal(graph).where == "graph, pytree"


class Keyword(nn.Module):
    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        return x + bias


def test_comments_of_verbose_code_hold_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    module = calling(1)
    node = list(module.graph.nodes)[1]
    node.meta["stack_trace"] = 'File "a", line 1, in f\n  y\rboom = 1/0 \n"""\nboom = 1/0'
    decoded = wire.decode(wire.encode(module).graph)
    monkeypatch.setenv("FX_GRAPH_SHOW_META", "1")
    compile(decoded.graph.python_code("self", verbose=True).src.strip(), "generated", "exec")
    for line in decoded.graph.python_code("self", verbose=True).src.splitlines():
        assert "boom" not in line.partition("#")[0] or line.strip().startswith(("'", '"', "stack_trace", "("))


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
    "keyword twice": (lambda graph, node: node.kwargs.add(name="alpha").value.SetInParent(), "have one name"),
    "list as key": (lambda graph, node: node.args.add().dict.items.add().key.list.SetInParent(), "cannot be the key"),
    "tensor as argument": (lambda graph, node: setattr(node.args.add(), "tensor", 0), "may not stand here"),
    "opaque argument": (lambda graph, node: setattr(node.args.add(), "opaque", "x"), "may not stand here"),
    "function": (lambda graph, node: setattr(node.args.add(), "function", "torch.add"), "may not stand here"),
    "text missing": (lambda graph, node: setattr(node, "stack_trace", 5), "refers to entry 5"),
    "no modules": (lambda graph, node: graph.ClearField("modules"), "no GraphModule"),
    "cycle": (lambda graph, node: setattr(graph.modules[-1].children[0], "module", 1), "does not come before it"),
    "no class": (lambda graph, node: setattr(graph.modules[0], "leaf", "DataParallel"), "no class of torch.nn"),
    "walk to class": (lambda graph, node: setattr(graph.modules[0], "leaf", "__class__"), "no class of torch.nn"),
    "hides forward": (lambda graph, node: setattr(graph.modules[0].attributes[0], "name", "forward"), "hides"),
    "hides hooks": (lambda graph, node: setattr(graph.modules[0].attributes[0], "name", "_forward_hooks"), "hides"),
    "hides graph": (lambda graph, node: setattr(graph.modules[-1].children[0], "name", "graph"), "hides"),
    "two slots": (lambda graph, node: graph.modules[-1].buffers.add(name="weight"), "hides"),
    "tensor missing": (lambda graph, node: setattr(graph.modules[-1].parameters[0], "tensor", 99), "refers to tensor"),
    "storage missing": (lambda graph, node: setattr(graph.tensors[0], "storage", 99), "refers to storage"),
    "beyond": (lambda graph, node: setattr(graph.tensors[0], "offset", 1 << 40), "beyond"),
    "negative size": (lambda graph, node: graph.tensors[0].shape.append(-1), "negative size"),
    "negative stride": (lambda graph, node: graph.tensors[0].stride.extend([-1] * 2), "strides or offset"),
    "integer gradient": (lambda graph, node: setattr(graph.tensors[0], "dtype", "int64"), "takes no gradient"),
    "quantized": (lambda graph, node: setattr(graph.tensors[0], "dtype", "qint8"), "unknown dtype"),
    "digest": (lambda graph, node: setattr(graph.storages[0].data, "sha256", "../../etc/passwd"), "no SHA-256"),
    "contract": (lambda graph, node: graph.contracts.add(pure=True, reads=["x"]), "pure"),
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
    with pytest.raises(WireError, match=r"module 'part': the names of a recurrent module's weights"):
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
    with pytest.raises(WireError, match="the bytes are no graph"):
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
