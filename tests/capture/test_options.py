"""torch.fx's own options, and what capture notes on each node."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.rpc import rpc_async, rpc_sync
from torch.fx import Node, Proxy, Tracer

import fxlib
from fxlib.errors import CaptureError, FxlibWarning
from fxlib.runtime import CapturedModule
from fxlib.spec.contract import PURE, Contract
from tests.capture import servers
from tests.capture.servers import double


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Inner(), Inner()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, flag: bool = True) -> torch.Tensor:
        y = self.a(x) if flag else x
        return self.linear(self.b(y))


def modules_called(captured: CapturedModule) -> list[str]:
    return [str(node.target) for node in captured.graph.nodes if node.op == "call_module"]


def test_leaf_modules_are_named_by_class_instance_or_path() -> None:
    model = Outer()
    options: Any = {"concrete_args": {"flag": True}}
    assert modules_called(fxlib.capture(model, leaf_modules=[Inner], **options)) == ["a", "b", "linear"]
    assert modules_called(fxlib.capture(model, leaf_modules=[model.b], **options)) == ["b", "linear"]
    assert modules_called(fxlib.capture(model, leaf_modules=["a"], **options)) == ["a", "linear"]


def test_concrete_args_fix_an_argument() -> None:
    captured = fxlib.capture(Outer(), concrete_args={"flag": False})
    x = torch.randn(2, 3)
    assert torch.equal(captured(x, False), captured._fxlib.original(x, False))  # type: ignore[misc]


class Signed(nn.Module):
    def forward(self, x: torch.Tensor, y: float) -> torch.Tensor:
        return x + math.copysign(1.0, y)


def test_a_zero_of_the_other_sign_is_not_the_number_to_which_an_argument_is_fixed() -> None:
    model, x = Signed(), torch.randn(2, 3)
    captured = fxlib.capture(model, concrete_args={"y": 0.0})
    assert torch.equal(captured(x, float("0.0")), x + 1)
    assert fxlib.usage(captured).original == {}
    with pytest.warns(FxlibWarning, match="the argument y is -0.0, and was fixed to 0.0"):
        assert torch.equal(captured(x, -0.0), x - 1)


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: Any = None, doubled: bool = False) -> torch.Tensor:
        if mask is not None:
            x = x * mask.float()
        return x * 2 if doubled else x


def test_arguments_that_samples_leave_out_keep_their_defaults() -> None:
    model, x = Masked(), torch.randn(2, 3)
    captured = fxlib.capture(model, sample_inputs=[x], how="auto")
    assert torch.equal(captured(x), x)
    assert fxlib.usage(captured).original == {}
    with pytest.warns(FxlibWarning, match="mask"):
        assert torch.equal(captured(x, torch.zeros(3)), torch.zeros(2, 3))
    assert torch.equal(captured(x, doubled=True), 2 * x)
    again = captured._fxlib.captured_with
    assert again is not None
    assert again.concrete_args == {"mask": None, "doubled": False}


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def test_wrapped_functions_stay_whole_under_every_alias() -> None:
    alias = leaf
    captured = fxlib.capture(lambda x: alias(x) + rpc_sync("ps0", torch.add, (leaf(x), 1)), wrap=[leaf])

    found = [node for node in captured.graph.nodes if node.target is leaf]
    assert len(found) == 2
    torch.fx.symbolic_trace(nn.ReLU())


def test_only_python_functions_can_be_wrapped() -> None:
    with pytest.raises(CaptureError, match="no Python function"):
        fxlib.capture(lambda x: x, wrap=[math.sqrt])


torch.fx.wrap("globally_wrapped")


def globally_wrapped(x: torch.Tensor) -> torch.Tensor:
    return x if bool(x.any()) else x + 1


def test_functions_wrapped_with_torch_fx_stay_whole() -> None:
    captured = fxlib.capture(lambda x: globally_wrapped(x) * 2)
    assert [node.target for node in captured.graph.nodes][1] is globally_wrapped
    assert captured(torch.zeros(2)).tolist() == [2.0, 2.0]


class Custom(Tracer):
    """A tracer as users write them: own leaves, own iteration, notes on nodes, computations of its own."""

    def __init__(self) -> None:
        super().__init__(autowrap_functions=(math.sqrt,))
        self.sizes: list[int] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Inner) or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        node.meta["size"] = int(torch.ones(3).sum())
        return node

    def iter(self, obj: Any) -> Any:
        return iter([obj[0], obj[1]])

    def to_bool(self, obj: Proxy) -> bool:
        return True


def test_a_tracer_of_the_callers_own_keeps_its_ways() -> None:
    class Model(Outer):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            parts = [part + 0 for part in rpc_sync("ps0", servers.pair, (x,))]
            return self.a(parts[0]) if x.sum() else parts[1]

    captured = fxlib.capture(Model(), tracer_class=Custom)

    assert modules_called(captured) == ["a"]
    assert all(node.meta["size"] == 3 for node in captured.graph.nodes)
    assert [node.meta["order"] for node in captured.graph.nodes] == list(range(len(captured.graph.nodes)))


def test_a_tracer_that_is_none_is_refused() -> None:
    with pytest.raises(CaptureError, match="no subclass"):
        fxlib.capture(nn.ReLU(), tracer_class=nn.ReLU)  # type: ignore[arg-type]


class Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.offset = nn.Buffer(torch.ones(3))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        first = rpc_sync("ps0", servers.lookup, ("users", x.long()))
        later = rpc_async("ps1", double, (first,))
        with torch.no_grad():
            frozen = self.weight * 2
        fixed = self.offset * 2
        return self.linear(later.wait()) + frozen + fixed + self.weight


def test_every_node_knows_its_place_and_its_line() -> None:
    captured = fxlib.capture(Annotated())
    nodes = {node.name: node for node in captured.graph.nodes}
    first = Annotated.forward.__code__.co_firstlineno

    assert [node.meta["order"] for node in nodes.values()] == list(range(len(nodes)))
    assert nodes["lookup"].meta["source"] == f"{__file__}:{first + 1}"
    assert nodes["issue_double"].meta["source"] == f"{__file__}:{first + 2}"
    assert nodes["linear"].meta["source"] == f"{__file__}:{first + 6}"
    assert nodes["lookup"].stack_trace == (
        f'File "{__file__}", line {first + 1}, in forward\n'
        '    first = rpc_sync("ps0", servers.lookup, ("users", x.long()))'
    )
    assert nodes["lookup"].meta["call"] == "lookup"
    assert nodes["wait_double"].meta["call"] == nodes["issue_double"].meta["call"] == "issue_double"


def test_gradients_are_noted_where_they_are_known() -> None:
    captured = fxlib.capture(Annotated())
    known = {node.name: node.meta.get("requires_grad") for node in captured.graph.nodes}

    assert known["weight"] is True
    assert [known[name] for name in ("offset", "long", "mul", "mul_1")] == [False] * 4
    assert [known[name] for name in ("x", "lookup", "linear", "add_2")] == [None] * 4


def contract_in(captured: CapturedModule) -> Contract | None:
    return next(node.meta.get("contract") for node in captured.graph.nodes if "call" in node.meta)


def test_contracts_come_from_the_request_then_the_author_then_torch() -> None:
    stated = Contract(writes=frozenset({"tables"}))
    name = f"{servers.NAME}:lookup"

    def looks_up(x: torch.Tensor) -> Any:
        return rpc_sync("ps0", servers.lookup, ("t", x))

    declared = contract_in(fxlib.capture(looks_up))
    assert declared is not None
    assert declared.reads == {"tables"}
    assert contract_in(fxlib.capture(looks_up, contracts={name: stated})) is stated
    assert contract_in(fxlib.capture(lambda x: rpc_sync("ps0", torch.add, (x, 1)))) == PURE
    assert contract_in(fxlib.capture(lambda x: rpc_sync("ps0", double, (x,)))) is None


@pytest.mark.parametrize(
    "function, kwargs, expected",
    [
        (torch.matmul, {}, "pure"),
        (torch.topk, {}, "pure"),
        (torch.nn.functional.cross_entropy, {}, "pure"),
        (torch.Tensor.mul, {}, "pure"),
        (torch.Tensor.mul_, {}, "unknown"),
        (torch.rand, {}, "random"),
        (torch.bernoulli, {}, "random"),
        (torch.nn.functional.dropout, {}, "random"),
        (torch.nn.functional.relu, {"inplace": True}, "unknown"),
        (torch.nn.functional.batch_norm, {}, "unknown"),
        (torch.add, {"out": 1}, "unknown"),
    ],
)
def test_torch_functions_have_contracts_of_their_own(function: Any, kwargs: dict[str, Any], expected: str) -> None:
    contract = contract_in(fxlib.capture(lambda x: rpc_sync("ps0", function, (x,), kwargs)))

    assert {"pure": contract == PURE, "unknown": contract is None}.get(
        expected, contract is not None and contract.writes == {"generator"}
    )


@pytest.mark.parametrize(
    "cls, reads",
    [
        *[(cls, True) for cls in (nn.Embedding, nn.EmbeddingBag, nn.Linear, nn.LayerNorm, nn.LSTMCell, nn.Conv2d)],
        *[(cls, False) for cls in (nn.Dropout, nn.BatchNorm1d, nn.LSTM, nn.MultiheadAttention, nn.Sequential)],
    ],
)
def test_forwards_of_modules_behind_rrefs_are_reads_unless_they_keep_state(cls: type, reads: bool) -> None:
    def forward(x: torch.Tensor) -> Any:
        return torch.distributed.rpc.remote("ps0", cls, (3,)).rpc_sync().forward(x)

    captured = fxlib.capture(forward)
    contract = next(node for node in captured.graph.nodes if node.name == "forward").meta.get("contract")

    assert (contract is not None and contract.is_read) is reads
