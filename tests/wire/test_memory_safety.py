"""A graph that would reach outside of its tensors is refused before anything of it runs, on whichever side reads it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxlib import wire
from fxlib.errors import WireError
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire import memory_safety, modules, targets
from tests.wire.support import graph_of, round_trip

aten = torch.ops.aten

ONLY = "aten::nll_loss,torch.nn.functional.nll_loss,aten::index_select,torch.nn.functional.embedding_bag,index_select"


def placeholder(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand for the operator that the message names in its place."""
    return torch.zeros(())


def forged(kind: str, name: str, *args: Any, **kwargs: Any) -> pb.Graph:
    """Return a message whose one call, `attack`, names what `encode` would not write."""

    def build(graph: torch.fx.Graph, x: torch.fx.Node) -> torch.fx.Node:
        node = graph.call_function(placeholder, tuple(x if each == "x" else each for each in args), kwargs)
        node.name = "attack"
        return node

    message = wire.encode(graph_of(build)).graph
    target = next(each for each in message.targets if each.WhichOneof("kind") == "opaque_function")
    setattr(target, kind, name)
    if kind == "method":
        for node in message.modules[-1].graph.nodes:
            if node.name == "attack":
                node.op = pb.OPCODE_CALL_METHOD
    return message


ATTACKS: dict[str, tuple[str, str, tuple[Any, ...], dict[str, Any]]] = {
    "unchecked sparse": ("function", "torch.sparse_coo_tensor", ("x", "x", (2, 2)), {"check_invariants": False}),
    "unchecked sparse rows": ("function", "torch.sparse_csr_tensor", ("x", "x", "x"), {}),
    "unsafe sparse": ("operator", "aten::_sparse_coo_tensor_unsafe.default", ("x", "x", [2, 2]), {}),
    "empty sparse rows": ("function", "torch.empty", ((2, 2),), {"layout": torch.strided}),
    "indices of a sparse tensor": ("method", "indices", ("x",), {}),
    "private indices of a sparse tensor": ("operator", "aten::_indices.default", ("x",), {}),
    "rows of a sparse tensor": ("method", "crow_indices", ("x",), {}),
    "conversion of indices": ("operator", "aten::_convert_indices_from_coo_to_csr.default", ("x", 3), {}),
    "conversion back": ("operator", "aten::_convert_indices_from_csr_to_coo.default", ("x", "x"), {}),
    "pooling backward": (
        "operator",
        "aten::max_pool2d_with_indices_backward.default",
        ("x", "x", [2, 2], [2, 2], [0, 0], [1, 1], False, "x"),
        {},
    ),
    "pooling in 3-d backward": (
        "operator",
        "aten::max_pool3d_with_indices_backward.default",
        ("x", "x", [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, "x"),
        {},
    ),
    "adaptive pooling backward": ("operator", "aten::adaptive_max_pool2d_backward.default", ("x", "x", "x"), {}),
    "bags backward": (
        "operator",
        "aten::_embedding_bag_dense_backward.default",
        ("x", "x", "x", "x", "x", 3, False, 0, None),
        {},
    ),
    "segments unchecked": ("function", "torch.segment_reduce", ("x", "sum"), {"lengths": "x", "unsafe": True}),
    "segments backward": ("operator", "aten::_segment_reduce_backward.default", ("x", "x", "x", "sum"), {}),
    "a loss backward": ("operator", "aten::nll_loss2d_backward.default", ("x", "x", "x", None, 1, -100, "x"), {}),
    "a buffer of one element": ("operator", "aten::log_sigmoid_forward.output", ("x",), {"output": "x", "buffer": "x"}),
    "a plain loss backward": ("operator", "aten::nll_loss_backward.default", ("x", "x", "x", None, 1, -100, "x"), {}),
    "one element as many": ("operator", "aten::choose_qparams_optimized.default", ("x", 65536, 200, 0.16, 8), {}),
    "a far view": ("operator", "aten::as_strided.default", ("x", [2], [1], (1 << 63) - 1), {}),
    "a number for a dtype": ("operator", "aten::sum.default", ("x",), {"dtype": 255}),
    "a node for a dtype": ("operator", "aten::sum.default", ("x",), {"dtype": "x"}),
    "a number for a memory format": ("operator", "aten::clone.default", ("x",), {"memory_format": 4}),
    "a number for a layout": ("operator", "aten::empty.memory_format", ([2, 2],), {"layout": 2}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_memory_is_refused_by_name_and_place(name: str) -> None:
    kind, target, args, kwargs = ATTACKS[name]
    message = forged(kind, target, *args, **kwargs)
    if name == "empty sparse rows":
        call = next(each for each in message.modules[-1].graph.nodes if each.name == "attack")
        call.kwargs[0].value.layout = "sparse_csr"
    with pytest.raises(WireError) as caught:
        wire.validate(message)
    assert target.partition("::")[2].partition(".")[0] in str(caught.value) or "layout" in str(caught.value)
    with pytest.raises(WireError):
        wire.decode(message)


def test_an_operator_that_was_never_tried_stays_with_the_client() -> None:
    module = graph_of(lambda graph, x: graph.call_function(aten._segment_reduce_backward.default, (x, x, x, "sum")))
    message = wire.encode(module).graph
    assert [each.WhichOneof("kind") for each in message.targets if "opaque" in str(each.WhichOneof("kind"))]
    assert round_trip(module) is not None


def test_the_table_is_of_operators_that_torch_has_and_is_whole() -> None:
    known = {f"{packet}.{each}" for packet, found in targets.registered_operators().items() for each in found}
    known |= {name for name in targets.candidates() if name.startswith("torch.")}
    assert torch.__version__.startswith(memory_safety.table()["torch"])
    known -= {name for name in known if name.startswith(targets.NO_TENSORS)}
    classes = {f"torch.nn.modules.{name}" for name in modules.candidates()}
    # Operators are registered as parts of torch are imported.
    assert not {name for name in memory_safety.safe() if name.startswith("torch.")} - known - classes
    told = memory_safety.safe() | set(memory_safety.refused())
    assert not {name for name in known if name.startswith(("aten::", "torch."))} - told
    assert not memory_safety.safe() & set(memory_safety.refused())
    assert len(memory_safety.safe()) > 2_000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_what_leaves_its_tensors_is_seen_and_what_may_travel_does_not(tmp_path: Path) -> None:
    file = tmp_path / "trials.jsonl"
    command = [sys.executable, "-m", "benchmarks.out_of_bounds", "--only", ONLY, "--count", "80", "--trials", str(file)]
    subprocess.run([*command, "--jobs", "1"], check=True, capture_output=True, timeout=200)
    trials = {each["name"]: each for each in map(json.loads, file.read_text().splitlines())}
    assert trials["aten::nll_loss_backward.default"]["deaths"]
    assert not [name for name, each in trials.items() if each["deaths"] and name in memory_safety.safe()]
    assert sum(each["calls"] for each in trials.values()) > 300
