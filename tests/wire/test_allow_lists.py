"""What the allow-lists hold is harmless, and torch.fx calls by its name what they mean."""

import builtins
import inspect
import os

import pytest
import torch
from torch.fx import Graph
from torch.fx.graph import _is_from_torch
from torch.fx.node import _get_qualified_name

from fxlib import wire
from fxlib.runtime import CallKind
from fxlib.runtime.ops import calls
from fxlib.wire import targets
from tests.wire.support import call_of, graph_of, round_trip


def test_each_function_is_found_again_by_its_name() -> None:
    for name, function in targets.functions().items():
        canonical = targets.function_name(function)
        assert canonical is not None
        assert targets.functions()[canonical] == function, name


def test_generated_code_calls_each_torch_function_by_a_name_that_means_it() -> None:
    for name, function in targets.functions().items():
        if _is_from_torch(function):
            assert eval(_get_qualified_name(function), {"torch": torch}) == function, name  # noqa: S307


def test_functions_that_touch_files_code_or_memory_are_not_on_the_list() -> None:
    forbidden = {
        *(builtins.eval, builtins.exec, builtins.open, builtins.setattr, builtins.map, builtins.__import__, os.system),
        *(torch.load, torch.save, torch.from_file, torch.compile, torch.vmap, torch.Tensor.apply_, torch.Tensor.map_),
        *(torch.Tensor.data_ptr, torch.Tensor.numpy, torch.Tensor.register_hook, torch.Tensor.__reduce_ex__),
        *(
            torch.nn.functional.triplet_margin_with_distance_loss,
            torch.ops.aten.set_data,
            torch.ops.aten.set_data.default,
        ),
    }
    assert not [function for function in forbidden if targets.function_name(function) is not None]


def test_methods_on_the_list_are_no_part_of_python_s_machinery() -> None:
    dunders = {name for name in targets.methods() if name.startswith("_")}
    assert len(targets.methods()) > 500
    assert not dunders & (set(dir(object)) - {"__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"})
    assert not dunders & {"__array__", "__deepcopy__", "__dlpack__", "__call__", "__getattr__", "__dict__"}
    assert not [name for name in targets.methods() if "hook" in name or ("storage" in name and "offset" not in name)]


def test_no_allowed_operator_s_name_speaks_of_files() -> None:
    packets = [name for name in targets.registered_operators() if targets._allowed(name)]
    assert len(packets) > 900
    assert not [name for name in packets if any(word in name for word in ("file", "_print", "data_ptr", "pickle"))]


@pytest.mark.parametrize("operator", [torch.ops.aten.add.Tensor, torch.ops.aten.relu.default, torch.ops.aten.sum])
def test_an_operator_comes_back(operator: torch._ops.OpOverload) -> None:
    decoded = round_trip(graph_of(lambda graph, x: graph.call_function(operator, (x, x))))
    assert call_of(decoded).target is operator


def fetch_from_cache(x: int) -> int:
    return x + 1


def fetch_later(x: int) -> int:
    return x + 1


def fetched(x: int) -> int:
    return x


def test_a_call_kind_that_both_sides_registered_is_bound_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_BLOCKING", "_ISSUE"):
        monkeypatch.setattr(calls, table, dict(getattr(calls, table)))
    monkeypatch.setattr(calls, "_WAIT", set(calls._WAIT))
    module = graph_of(lambda graph, x: graph.call_function(fetch_from_cache, (x,)))
    encoded = wire.encode(module)
    assert isinstance(call_of(wire.decode(encoded.graph)).target, wire.OpaqueFunction)
    calls.register(CallKind(name="cache", blocking=fetch_from_cache, issue=fetch_later, wait=fetched))
    assert call_of(wire.decode(wire.encode(module).graph)).target is fetch_from_cache


def test_nothing_is_imported_because_a_graph_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = wire.encode(graph_of(lambda graph, x: graph.call_function(fetch_from_cache, (x,)))).graph
    graph.targets[1].opaque_function = "antigravity.fly"
    module = wire.decode(graph)
    assert "antigravity" not in __import__("sys").modules
    assert isinstance(module.graph, Graph)
    assert inspect.ismodule(torch)
