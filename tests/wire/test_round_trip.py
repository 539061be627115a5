"""What FX allows in a graph comes back from the wire as it was, to the bit."""

import math
import operator
import struct
import typing
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes.shape_prop import ShapeProp

import fxlib
from fxlib import wire
from fxlib.errors import WireError
from fxlib.runtime.ops import issue_call, remote_call, wait
from fxlib.spec.contract import Contract
from tests.wire.support import call_of, calling, graph_of, round_trip

Point = namedtuple("Point", "x y")  # noqa: PYI024 - what a user's model returns

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**200), 0.0, -0.0, 1e-310, math.inf, -math.inf,
    "", "text", "quote ' \" \\ \n \0 {x} #", "π", 1 + 2j, complex(-0.0, math.inf), ..., [], (), {}, [[[1]]], ([],),
    {"a": 1, 2: "b", None: 3, (1, "x"): 4, 1.5: 5, True: 6}, slice(None), slice(1, None, -1),
    range(0), range(5, -5, -2),
    torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.device("cpu"), torch.device("cuda", 1),
    torch.strided, torch.strided, torch.channels_last, torch.preserve_format, torch.per_tensor_affine,
    torch.per_channel_symmetric, torch.ops.aten.add.Tensor, torch.ops.aten.relu.default, torch.int64,
]  # fmt: skip


def same(a: object, b: object) -> bool:
    """Equal, of one type, and of the same bits."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return all(map(same, a.keys(), b.keys())) and all(map(same, a.values(), b.values())) and len(a) == len(b)
    if isinstance(a, complex) and isinstance(b, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, slice) and isinstance(b, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_an_immediate_value_comes_back(value: object) -> None:
    module = calling(value, keyword=[value])
    decoded = round_trip(module)
    assert same(call_of(decoded).args[1], call_of(module).args[1])
    assert same(call_of(decoded).kwargs, call_of(module).kwargs)
    assert same(wire.decode_value(wire.encode_value(value)), value)


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0x7FF0000000000001, 0xFFF8DEAD0000BEEF])
def test_a_nan_keeps_its_payload(bits: int) -> None:
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    assert struct.pack("<d", call_of(round_trip(calling(value))).args[1]) == struct.pack("<Q", bits)


immediate = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from([..., torch.float16, torch.device("cpu"), torch.strided, torch.channels_last]),
)
keys = st.recursive(immediate, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    immediate | st.just("a node"),
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple)),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(slice, inner, inner, inner),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


def with_nodes(value: Any, node: Node) -> Any:
    return pytree.tree_map(lambda leaf: node if leaf == "a node" else leaf, value)


@pytest.mark.slow
@given(value=values)
def test_any_nest_of_values_and_nodes_comes_back(value: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    call = graph.call_function(torch.add, (x, with_nodes(value, x)), {"keyword": value})
    module = GraphModule(nn.Module(), Graph())
    module._graph = graph  # not compiled: not each of these values has a form in Python's source
    encoded = wire.encode(module)
    node = wire.parse(wire.serialize(encoded.graph)).modules[-1].graph.nodes[1]
    again = wire.encode(module)
    assert wire.serialize(again.graph) == wire.serialize(encoded.graph)
    if value == value and "a node" not in repr(value):  # noqa: PLR0124 - not NaN
        assert repr(wire.decode_value(node.kwargs[0].value)) == repr(call.kwargs["keyword"])


def test_all_six_opcodes_come_back() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor, y: float = 1.5) -> torch.Tensor:
            return torch.relu(self.linear(x) * self.scale).add_(y)

    module = symbolic_trace(Model())
    decoded = round_trip(module)
    x = torch.randn(2, 3)
    assert {node.op for node in decoded.graph.nodes} == {
        *("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")
    }
    assert decoded.code == module.code
    assert torch.equal(decoded(x), module(x))
    assert torch.equal(decoded(x, 3.0), module(x, 3.0))


def test_a_traced_lambda_comes_back() -> None:
    assert round_trip(symbolic_trace(lambda x: x + 1))(2) == 3


def test_variadic_parameters_and_keyword_only_ones_come_back() -> None:
    graph = Graph()
    rest, named = graph.placeholder("*rest"), graph.placeholder("**named")
    graph.output((rest, named))
    assert round_trip(GraphModule(nn.Module(), graph))(1, 2, a=3) == ((1, 2), {"a": 3})


def test_operators_in_place_stay_in_place() -> None:
    module = graph_of(lambda graph, x: graph.call_function(operator.iadd, (x, 1)))
    x = torch.zeros(2)
    decoded = round_trip(module)
    assert decoded(x) is x
    assert call_of(decoded).target is operator.iadd


def test_creations_and_constant_calls_stay_calls() -> None:
    decoded = round_trip(graph_of(lambda graph, x: graph.call_function(torch.rand, (2,))))
    assert call_of(decoded).target is torch.rand
    assert not torch.equal(decoded(None), decoded(None))


def test_a_named_tuple_comes_back_as_one_and_the_client_gets_its_own_class() -> None:
    module = graph_of(lambda graph, x: Point(x, 2))
    decoded = round_trip(module)
    assert decoded(1)._asdict() == {"x": 1, "y": 2}
    assert type(wire.decode(wire.encode(decoded).graph, root=module)(1)) is Point


def test_names_that_torch_fx_would_not_choose_come_back() -> None:
    module = graph_of(lambda graph, x: graph.call_function(torch.relu, (x,)))
    call_of(module).name = "input"
    assert call_of(round_trip(module)).name == "input"


def test_nodes_added_to_a_decoded_graph_get_names_of_their_own() -> None:
    decoded = round_trip(calling(1))
    names = [node.name for node in decoded.graph.nodes]
    with decoded.graph.inserting_before(decoded.graph.output_node()):
        added = decoded.graph.call_function(torch.add, (1, 2))
    assert added.name not in names


ANNOTATIONS = [
    torch.Tensor, int, list[int], tuple[int, ...], dict[str, torch.Tensor], int | None, typing.Any,
    typing.List[int], typing.Dict[str, int], typing.Tuple[int, float], typing.Optional[torch.Tensor],  # noqa: UP006, UP045
    typing.Union[int, str], None,  # noqa: UP007
]  # fmt: skip


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
def test_a_simple_annotation_comes_back(annotation: object) -> None:
    module = calling(1)
    call_of(module).type = annotation
    module.recompile()
    assert call_of(round_trip(module)).type == annotation


def test_an_annotation_with_a_class_of_the_user_s_is_left_out() -> None:
    module = calling(1)
    call_of(module).type = list[Point]
    assert call_of(round_trip(module)).type is None


def test_metadata_that_tools_need_comes_back() -> None:
    module = graph_of(lambda graph, x: graph.call_function(torch.max, (x, 0)))
    ShapeProp(module).propagate(torch.randn(3, 4))
    meta = {
        "call": "max_1", "order": 7, "source": "model.py:12", "requires_grad": True,
        "contract": Contract(reads=frozenset({"b", "a"}), gradient="ps:push", batched_by="ps:many"),
        "stack_trace": '  File "model.py", line 12, in forward\n    x.max(0)\n',
    }  # fmt: skip
    call_of(module).meta.update(meta)
    node = call_of(round_trip(module))
    assert {key: node.meta[key] for key in meta} == meta
    assert node.meta["tensor_meta"] == call_of(module).meta["tensor_meta"]


def test_the_structure_of_a_remote_result_comes_back_with_its_contract() -> None:
    module = calling(1)
    call_of(module).meta["contract"] = Contract(pure=True, returns=(None, {"a": [None, None]}))
    assert call_of(round_trip(module)).meta["contract"].returns == (None, {"a": [None, None]})
    call_of(module).meta["contract"] = Contract(pure=True, returns=torch.empty_like)  # for an export, and no value
    assert call_of(round_trip(module)).meta["contract"] == Contract(pure=True)


def test_pytree_inputs_and_outputs_come_back() -> None:
    def forward(x: Any, pair: Any) -> Any:
        return {"sum": x["a"] + pair[0], "all": [x["b"], (pair[1],)]}

    leaves = ({"a": torch.fx.PH, "b": torch.fx.PH}, (torch.fx.PH, torch.fx.PH))
    module = symbolic_trace(forward, concrete_args={"x": leaves[0], "pair": leaves[1]})
    decoded = round_trip(module)
    assert decoded({"a": 1, "b": 2}, (3, 4)) == module({"a": 1, "b": 2}, (3, 4)) == {"sum": 4, "all": [2, (4,)]}


@pytest.mark.slow
def test_an_exported_module_comes_back() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())

        def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.net(x) + bias}

    args, kwargs = (torch.randn(2, 3),), {"bias": torch.ones(4)}
    exported = torch.export.export(Model().eval(), args, kwargs, strict=False)
    module = exported.module(check_guards=False)
    assert torch.equal(round_trip(module)(*args, **kwargs)["y"], module(*args, **kwargs)["y"])
    guarded = exported.module()  # whose guards are Python functions, and stay with the client
    bound = wire.decode(wire.encode(wire.decode(wire.encode(guarded).graph)).graph, root=guarded)
    assert torch.equal(bound(*args, **kwargs)["y"], module(*args, **kwargs)["y"])


def test_remote_calls_come_back_with_their_names() -> None:
    def build(graph: Graph, x: Node) -> Node:
        future = graph.call_function(issue_call, ("ps0", "my.ps:lookup", (x,), {"k": 1}, None))
        first = graph.call_function(remote_call, (x, ".forward", (x,), {}, 1.5))
        return graph.call_function(torch.add, (graph.call_function(wait, (future,)), first))

    decoded = round_trip(graph_of(build))
    calls = [node for node in decoded.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [issue_call, remote_call, wait, torch.add]
    assert calls[0].args[:2] == ("ps0", "my.ps:lookup")


def test_blocks_of_a_grad_mode_come_back() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x * 2
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.mm(x, y)

    module = fxlib.capture(Model())
    decoded = round_trip(module)
    x = torch.randn(2, 2, requires_grad=True)
    assert decoded(x).dtype == torch.bfloat16
    assert torch.equal(decoded(x), module(x))


def refused(value: Any) -> WireError:
    graph = Graph()
    graph.call_function(torch.add, (graph.placeholder("x"), 1, [value]), name="bad")
    module = GraphModule(nn.Module(), Graph())
    module._graph = graph
    with pytest.raises(WireError) as caught:
        wire.encode(module)
    return caught.value


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.relu, int, torch.Generator(), object(), {1, 2}, "\ud800", torch.ops.aten.add]
)
def test_what_cannot_be_an_argument_is_refused_with_node_and_field(value: object) -> None:
    assert refused(value).where == "node 'bad', args[2]"


def test_a_node_that_refers_to_a_later_one_is_refused() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    late = graph.call_function(torch.relu, (x,))
    with graph.inserting_before(late):
        graph.call_function(torch.relu, (late,), name="early")
    module = GraphModule(nn.Module(), Graph())
    module._graph = graph
    with pytest.raises(WireError, match=r"node 'early', args\[0\]: refers to 'relu'"):
        wire.encode(module)
