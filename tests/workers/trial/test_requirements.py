"""What a decoded graph still needs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import ps, wire
from fxlib.analysis.effects.process_groups import Groups
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops import remote_call
from fxlib.spec.contract import PURE, Contract
from fxlib.spec.workload import Workload
from fxlib_workers.trial.requirements import bind, requirements_of
from tests.shared.rpc_world import rpc_world

WORKLOAD = Workload(batches=[torch.zeros(1)], mode="forward")


def own(x: torch.Tensor) -> torch.Tensor:
    return x


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def forward(self, x: torch.Tensor, to: str) -> torch.Tensor:
        rows = rpc.rpc_sync("ps0", ps.lookup, args=("t", x))
        return self.own(rows) + rpc.rpc_sync(to, torch.add, args=(x, x))


def travelled(model: nn.Module) -> CapturedModule:
    return wire.decode(wire.encode(fxlib.capture(model, leaf_modules=(Own,))).graph)


def test_functions_are_asked_of_the_servers_that_run_them() -> None:
    training = replace(WORKLOAD, mode="local")
    assert requirements_of([travelled(Model())], training).functions == {
        "": ("torch:add",),
        "ps0": ("fxlib.ps:lookup", "fxlib.ps:push"),
    }
    assert requirements_of([travelled(Model())], WORKLOAD).functions["ps0"] == ("fxlib.ps:lookup",)  # it pushes nothing


def test_functions_have_the_contract_that_the_graph_knows_or_else_the_one_that_the_workload_assumes() -> None:
    class Unknown(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rpc.rpc_sync("ps0", own, args=(x,)) + rpc.rpc_sync("ps0", torch.add, args=(x, x))

    known = {"torch:add": PURE, "torch:add#add": PURE}
    assert requirements_of([travelled(Unknown())], WORKLOAD).contracts == known
    assumed = requirements_of([travelled(Unknown())], replace(WORKLOAD, assume="reads")).contracts
    reads = Contract(reads=frozenset({"*"}))
    assert assumed == {**known, f"{__name__}:own": reads, f"{__name__}:own#own": reads}


def test_a_function_whose_calls_have_different_contracts_has_them_by_call_alone() -> None:
    module = travelled(Model())
    first, *_ = calls = [node for node in module.graph.nodes if node.target is remote_call]
    for node in calls:
        node.args = (node.args[0], "job:call_method", *node.args[2:])
        node.meta.pop("contract", None)
    first.meta["contract"] = PURE

    found = requirements_of([module], WORKLOAD).contracts
    assert found[f"job:call_method#{first.name}"] == PURE
    assert "job:call_method" not in found


def test_modules_that_only_the_job_has_are_named() -> None:
    (opaque,) = requirements_of([travelled(Model())], WORKLOAD).opaque
    assert "'own'" in opaque
    assert "Own" in opaque


def test_process_groups_are_named_with_the_sizes_that_their_collectives_state() -> None:
    class Reducing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            collectives = torch.ops._c10d_functional
            everybody = collectives.wait_tensor(collectives.all_gather_into_tensor(x, 4, "0"))
            return everybody.sum() + collectives.wait_tensor(collectives.all_reduce(x, "sum", "7"))

    needs = requirements_of([travelled(Reducing())], WORKLOAD)
    assert needs.opaque == ()
    assert needs.groups == Groups(collectives={"0": (4,), "7": ()}, reducing={})


def test_calls_within_nested_graphs_are_needed_too() -> None:
    inner = torch.fx.Graph()
    inner.output(inner.call_function(remote_call, ("ps7", "fxlib.ps:lookup", (), {}, None)))
    outer = torch.fx.Graph()
    outer.output(outer.call_module("inner"))
    children = nn.ModuleDict({"inner": torch.fx.GraphModule(nn.Module(), inner)})
    needs = requirements_of([torch.fx.GraphModule(children, outer)], WORKLOAD)
    assert needs.functions == {"ps7": ("fxlib.ps:lookup",)}


def test_an_input_may_be_called_like_the_attribute_that_holds_an_rref() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users = rpc.remote("ps0", torch.add, args=(torch.zeros(2), 1))

        def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
            return self.users.to_here() + 10 * users + items

    with rpc_world(fxlib.Server(name="ps0")):
        model = Same()
        bound = bind(travelled(model), {"users": model.users})
        result = bound(fxlib.Batch(inputs=(torch.tensor([2.0, 3.0]), torch.tensor([4.0, 5.0]))))
    assert isinstance(result, torch.Tensor)
    assert result.tolist() == [25.0, 36.0]
