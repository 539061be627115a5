"""DistributedDataParallel inside a model: one node, its module's own object, and what a capture of it holds for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

import fxlib
from fxlib import Workload, ps, wire
from fxlib.client.preflight import UnservedError, check_measurable
from fxlib.errors import CaptureError, OpaqueError
from fxlib.reasons import Reason
from fxlib.runtime.data_parallel import DataParallel, DataParallelOptions, body_of
from fxlib.runtime.own_code import running_own_code
from tests.shared.process_group import process_group
from tests.wire.support import over_the_wire

pytestmark = pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(tmp_path_factory.mktemp("group")):
        yield


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.deep = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.relu(self.layer(x))) if self.deep else self.layer(x)


class Decides(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else x


class Hybrid(nn.Module):
    def __init__(self, inside: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.dense = DistributedDataParallel(inside or Layers(), **options)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.dense(x) + rpc.rpc_sync("ps0", ps.lookup, args=("users", rows))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = DistributedDataParallel(Layers())

    def forward(self, x: torch.Tensor) -> Any:
        return self.dense(x)


def test_it_is_one_node_with_a_graph_of_its_module_beside_it() -> None:
    model = Hybrid()
    captured = fxlib.capture(model)
    assert [node.target for node in captured.graph.nodes if node.op == "call_module"] == ["dense"]
    assert captured.dense is model.dense
    body = body_of(model.dense)
    assert body is not None
    assert body.layer is model.dense.module.layer
    assert "_fxlib_body" not in vars(model.dense)


class Prints(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("here")  # which a stream of the program's may take for anything
        return self.layer(x)


class AsksGradMode(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if torch.is_grad_enabled() else x


class AsksArguments(Layers):
    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        assert x is not None
        return self.layer(x)


class AsksTensors(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if next(self.parameters()).dtype is torch.float32 else x


class RunsAFunction(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(anything(x))


@torch.fx.wrap
def anything(x: torch.Tensor) -> torch.Tensor:
    return x


OWN = (Decides, Prints, AsksGradMode, AsksArguments, AsksTensors, RunsAFunction)


@pytest.mark.parametrize(
    "inside, own", [(nn.Linear(4, 4), False), (Layers(), False), *((each(), True) for each in OWN)]
)
@pytest.mark.filterwarnings("ignore:.*the forward prints or logs")
def test_it_is_code_of_the_program_s_own_unless_its_graph_says_all_that_it_does(inside: nn.Module, own: bool) -> None:
    captured = fxlib.capture(Hybrid(inside))
    assert [node.name for node in running_own_code(captured)] == (["dense"] if own else [])


def test_it_is_code_of_the_program_s_own_where_hooks_see_its_buffers_or_it_is_captured_again_in_vain() -> None:
    model = Hybrid()
    captured = fxlib.capture(model)
    assert not list(running_own_code(captured))
    model.dense.module.__class__ = Decides
    again = fxlib.capture(model)
    assert body_of(model.dense) is None
    assert list(running_own_code(again))
    hooked = Hybrid()
    registers_hook(hooked)
    assert list(running_own_code(fxlib.capture(hooked)))


def watches(*_: Any) -> None: ...


@pytest.mark.parametrize(
    "where, own", [("the module inside", True), ("all modules", True), ("a layer", False)]
)  # that of a layer is traced, and seen to do nothing
def test_it_is_code_of_the_program_s_own_where_hooks_run_in_it_that_were_not_traced(where: str, own: bool) -> None:
    model = Hybrid()
    hooks = {
        "the module inside": model.dense.module.register_forward_hook,
        "a layer": model.dense.module.layer.register_forward_hook,
        "all modules": register_module_forward_hook,
    }
    handle = hooks[where](watches)
    try:
        assert bool(list(running_own_code(fxlib.capture(model)))) is own
    finally:
        handle.remove()


def test_it_travels_as_data_and_the_answer_has_the_launcher_s_own() -> None:
    model = Hybrid(bucket_cap_mb=3, find_unused_parameters=True)
    captured = fxlib.capture(model)
    there = over_the_wire(captured)
    assert isinstance(there.dense, DataParallel)
    assert there.dense.options == DataParallelOptions(bucket_cap_mb=3.0, find_unused_parameters=True)
    assert (there.dense.group, there.dense.ranks) == ("0", 1)
    assert list(there.state_dict()) == list(captured.state_dict())
    answer = wire.encode(fxlib.optimize(there), beside=there).graph
    assert wire.decode(answer, root=captured).dense is model.dense
    assert type(there.dense.join()) is DistributedDataParallel
    assert torch.equal(there.dense.join()(torch.ones(2, 4)), there.dense.module(torch.ones(2, 4)))


def test_an_answer_about_another_wrapping_is_refused() -> None:
    there = over_the_wire(fxlib.capture(Hybrid()))
    with pytest.raises(fxlib.errors.WireError, match="no DistributedDataParallel like this"):
        wire.decode(wire.encode(there).graph, root=fxlib.capture(Hybrid(static_graph=True)))


@pytest.mark.parametrize("how", ["trace", "export"])
def test_a_model_that_is_wrapped_as_a_whole_is_refused(how: Any) -> None:
    with pytest.raises(CaptureError, match="wrap the captured one"):
        fxlib.capture(DistributedDataParallel(Layers()), sample_inputs=[torch.ones(2, 4)], how=how)


class Nests(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        return {"deep": (super().forward(x), None)}


class ChecksSizes(Hybrid):
    """What tracing cannot take."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != rows.shape[0]:
            raise ValueError(x.shape)
        dense = self.dense(x)["deep"][0]
        if dense.shape[1] != 4:
            raise ValueError(dense.shape)
        return dense.relu() + rpc.rpc_sync("ps0", ps.lookup, args=("users", rows))


class Checks(ChecksSizes):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != rows.shape[0]:
            raise ValueError(x.shape)
        found: torch.Tensor = self.dense(x)["deep"][0].relu()
        return found


RETURNS = {
    "fxlib.ps:lookup": fxlib.Contract(reads=frozenset({"users"}), returns=lambda _, rows: torch.empty(rows.shape[0], 4))
}


@pytest.mark.slow
def test_it_is_one_node_in_an_export_too() -> None:
    x, rows = torch.ones(3, 4), torch.ones(3, dtype=torch.long)
    model = ChecksSizes(Nests())
    captured = fxlib.capture(model, sample_inputs=[x, rows], contracts=RETURNS)
    order = [node.name for node in fxlib.optimize(captured).graph.nodes]
    assert order.index("lookup_issue") < order.index("dense") < order.index("lookup")
    assert isinstance(over_the_wire(captured).dense.module, GraphModule)
    (dense,) = [node for node in captured.graph.nodes if node.op == "call_module"]
    assert dense.meta["source"].startswith(__file__)


@pytest.mark.slow
def test_an_export_does_what_the_model_does_for_all_sizes() -> None:
    model, sizes = Checks(Nests()), {0: torch.export.Dim("batch", min=2, max=64)}
    samples = [torch.ones(3, 4), torch.ones(3, dtype=torch.long)]
    captured = fxlib.capture(model, sample_inputs=samples, dynamic_shapes={"x": sizes, "rows": sizes})
    x, rows = torch.randn(7, 4), torch.ones(7, dtype=torch.long)
    found = []
    for module in (model, captured):
        module.zero_grad()
        out = module(x, rows)
        out.sum().backward()
        found.append([out, *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *found))
    assert not fxlib.usage(captured).original


def changes_buffers(model: Dense) -> None:
    model.dense.forward_sync_buffers = False


def registers_hook(model: Any) -> None:
    model.dense._register_buffer_comm_hook(None, lambda *_: None)


def changes_module(model: Dense) -> None:
    model.dense.module.deep = True


@pytest.mark.parametrize("change", [changes_buffers, registers_hook, changes_module])
def test_the_original_runs_where_what_was_captured_no_longer_holds(change: Callable[[Dense], None]) -> None:
    model = Dense()
    captured = fxlib.capture(model)
    assert ran_original(captured) is False
    change(model)
    assert ran_original(captured) is True


def test_the_original_runs_among_ranks_of_uneven_inputs() -> None:
    model = Dense()
    captured = fxlib.capture(model)
    with model.dense.join():
        assert ran_original(captured) is True


def test_without_a_process_group_it_runs_where_no_gradients_are_recorded() -> None:
    model = Dense()
    captured = fxlib.capture(model)
    there = wire.decode(wire.encode(captured, weights=True).graph, blobs=wire.encode(captured, weights=True).blobs)
    x = torch.ones(2, 4)
    with torch.no_grad():
        assert torch.equal(there(x), model(x))
    with pytest.raises(OpaqueError, match="reduced over a process group"):
        there(x)


def ran_original(captured: fxlib.runtime.CapturedModule) -> bool:
    captured(torch.ones(2, 4))
    return bool(fxlib.usage(captured).original)


def own_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer())
    return done


own_hook.__annotations__.clear()  # torch wants the class there, not its name


def hooked(hook: Any, state: object = None) -> nn.Module:
    model = Hybrid()
    model.dense.register_comm_hook(state, hook)
    return model


@pytest.mark.parametrize(
    "make, trainers, reason, said",
    [
        (Hybrid, 1, Reason.COLLECTIVES, "Workload.trainers"),
        (Hybrid, 3, Reason.COLLECTIVES, "for 1 ranks, and Workload.trainers is 3"),
        (lambda: hooked(own_hook), 1, Reason.OPAQUE_CODE, "of DistributedDataParallel 'dense': .* own_hook"),
        (lambda: hooked(default_hooks.fp16_compress_hook, object()), 1, Reason.OPAQUE_CODE, "fp16_compress_hook"),
        (lambda: Hybrid(Decides()), 1, Reason.OPAQUE_CODE, "module 'dense.module' of class .*Decides"),
        (lambda: Hybrid(bucket_cap_mb_list=[1, 2]), 1, Reason.OPAQUE_CODE, "bucket_cap_mb_list"),
    ],
)
def test_what_no_trial_can_hold_is_known_before_anything_is_sent(
    make: Callable[[], nn.Module], trainers: int, reason: Reason, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason is Reason.OPAQUE_CODE:  # of as many ranks as the workload says
        monkeypatch.setattr("fxlib.analysis.effects.process_groups.Groups.misfit", lambda *_: "")
    workload = Workload(batches=[(torch.ones(2, 4), torch.ones(2, dtype=torch.long))], trainers=trainers)
    captured = fxlib.capture(make())
    with pytest.raises(UnservedError, match=said) as raised:
        check_measurable(captured, workload)
    assert raised.value.reason is reason


def test_torch_s_own_hook_travels_by_its_name() -> None:
    there = over_the_wire(fxlib.capture(hooked(default_hooks.fp16_compress_hook)))
    assert there.dense.options.hook == "fp16_compress_hook"
    ((made, _),) = there.dense.join()._comm_hooks
    assert made is default_hooks.fp16_compress_hook
