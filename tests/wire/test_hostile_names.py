"""Names that mean harm: each is refused with the place and the reason, and nothing of it runs."""

import pytest
import torch
from torch import nn

import fxlib
from fxlib import wire
from fxlib.errors import WireError
from fxlib.runtime.ops import remote_call
from fxlib.v1 import graph_pb2 as pb
from tests.wire.spoiled import Edit, node_of, refusal, target_of, whole
from tests.wire.support import calling, graph_of

CODE = "x): __import__('os').abort()  #"


def test_the_graph_that_these_tests_spoil_is_a_good_one() -> None:
    wire.validate(whole())
    wire.decode(whole())


CODE_IN_NAMES: dict[str, tuple[Edit, str]] = {
    "a node": (lambda graph, node: setattr(node, "name", CODE), "is not an identifier"),
    "a keyword": (lambda graph, node: setattr(node.kwargs[0], "name", "a=1, b"), "keyword 'a=1, b'"),
    "the module itself": (lambda graph, node: setattr(node, "name", "self"), "would hide the module itself"),
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
    "tuple class": (lambda graph, node: setattr(node.args.add().named_tuple, "name", CODE), "is not the label"),
}


@pytest.mark.parametrize("place", CODE_IN_NAMES)
def test_code_in_a_name_is_refused(place: str) -> None:
    edit, reason = CODE_IN_NAMES[place]
    graph = whole()
    edit(graph, node_of(graph, pb.OPCODE_CALL_FUNCTION))
    assert reason in str(refusal(graph))


def test_an_argument_by_the_name_of_the_module_itself_turns_no_path_into_a_walk_over_a_value() -> None:
    graph = whole()
    node_of(graph, pb.OPCODE_PLACEHOLDER).name = "self"
    assert refusal(graph).where == "node 'self' (0)"


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


@pytest.mark.slow
def test_names_of_keyword_arguments_in_a_pytree_are_names() -> None:
    exported = torch.export.export(Keyword(), (torch.ones(2),), {"bias": torch.ones(2)}, strict=False)
    graph = wire.encode(exported.module(check_guards=False)).graph
    entry = graph.modules[-1].graph.pytree.inputs.tuple.items[1].dict.items[0]
    entry.key.text = "bias': __import__('os').abort(), 'x"
    assert refusal(graph).where == "graph, pytree"


@pytest.mark.slow
def test_guards_order_arguments_that_are_there() -> None:
    samples = {"x": torch.ones(2), "bias": torch.ones(2)}
    graph = wire.encode(fxlib.capture(Keyword(), sample_inputs=samples, how="export")).graph
    graph.modules[-1].graph.pytree.guards.ordered.append("more")
    assert "the order of arguments that are not there" in str(refusal(graph))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytree", "fx_pytree", "self"])
def test_an_argument_of_a_pytree_hides_nothing_that_generated_code_calls(name: str) -> None:
    exported = torch.export.export(Keyword(), (torch.ones(2),), {"bias": torch.ones(2)}, strict=False)
    graph = wire.encode(exported.module(check_guards=False)).graph
    graph.modules[-1].graph.pytree.arguments[0] = name
    with pytest.raises(WireError, match="hides what the generated code calls"):
        wire.decode(graph)


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


@pytest.mark.parametrize("character", [*"\"'\\\n\r\t\0.#{}$;()[]<>`", "\u2028", "\u202e"])
def test_a_character_that_may_end_quotes_or_steer_is_in_no_name_of_a_child(character: str) -> None:
    graph = whole()
    graph.modules[-1].children[0].name = f"user{character}item"
    assert "neither an identifier" in str(refusal(graph))
