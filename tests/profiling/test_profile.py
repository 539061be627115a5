"""What `fxlib.profile` measures in a live world, and what it leaves as it was."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import Batch, Contract, Profile, Workload, ps
from fxlib.errors import FxlibError, FxlibWarning, WorkloadError
from fxlib.recipes import recipes
from fxlib.spec.profile import Opaque, TensorShape
from tests.profiling import remote_functions as far
from tests.profiling.clicks import Clicks, batch, digests, workload, world
from tests.runtime.graphs import Program
from tests.shared.undisturbed import undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("servers")]


@pytest.fixture(scope="module")
def profiled() -> Profile:
    with world():
        return undisturbed(lambda: fxlib.profile(fxlib.capture(Clicks()), workload(), steps=5), is_told_apart)


def is_told_apart(found: Profile) -> bool:
    """Whether what takes long takes longer than what does not."""
    fast, slow = found.calls
    trainer_s = slow.issue_s + slow.wait_s
    nodes = found.node_by_name
    return (
        max(fast.service_s.median, trainer_s) < slow.service_s.median
        and nodes["light"].seconds < nodes["heavy_1"].seconds
    )


def test_a_call_takes_what_its_server_takes(profiled: Profile) -> None:
    fast, slow = profiled.calls
    assert (fast.to, slow.to) == ("ps0", "ps1")
    assert (fast.function, slow.function) == ("fxlib.ps:lookup",) * 2
    # Where the trainer stands still once it has sent the call, issuing it takes so much longer, and its service less.
    assert fast.issue_s + fast.service_s.median >= 0.002
    assert slow.issue_s + slow.service_s.median >= 0.02
    assert fast.service_s.count == profiled.steps == 5
    assert is_told_apart(profiled)


def test_what_travels_is_told_by_shape_and_size(profiled: Profile) -> None:
    call = profiled.calls[0]
    assert call.returns == TensorShape(shape=(256, 4), dtype=torch.float32)
    assert call.request_bytes >= 256 * 8
    assert call.response_bytes >= 256 * 4 * 4
    assert call.push is not None
    assert (call.push.function, call.push.request_bytes >= 256 * (8 + 4 * 4)) == ("fxlib.ps:push", True)


def test_local_work_is_told_node_by_node(profiled: Profile) -> None:
    seconds = {node.node: node.seconds for node in profiled.nodes}
    assert is_told_apart(profiled)
    assert profiled.node_by_name["heavy_1"].output_bytes == 256 * 512 * 4
    assert not {"lookup", "lookup_1", "x", "output"} & seconds.keys()
    assert all(value > 0 for value in (profiled.loss_s, profiled.backward_s, profiled.rest_s))


def test_the_parts_of_a_step_add_up_to_the_whole(profiled: Profile) -> None:
    calls_s = sum(each.issue_s + each.service_s.median + each.wait_s + each.wake_s for each in profiled.calls)
    phases_s = profiled.loss_s + profiled.backward_s + profiled.rest_s
    parts_s = sum(each.seconds for each in profiled.nodes) + calls_s + phases_s
    assert profiled.step_s >= 0.022  # both servers' times
    assert parts_s >= profiled.step_s * (1 - 1e-9)
    assert all(each.wake_s == 0.0 for each in profiled.calls) or parts_s == pytest.approx(profiled.step_s)
    assert 0.0 < profiled.least_share <= 1.0
    assert 0.0 <= profiled.cores_s <= profiled.step_s  # the kernel may not tell


def test_gradients_arrive_in_the_reverse_of_the_order_of_use(profiled: Profile) -> None:
    early, late = (call.push for call in profiled.calls)
    assert early is not None
    assert late is not None
    assert late.ready_s < early.ready_s <= profiled.backward_s
    assert any("no gradient was pushed" in note for note in profiled.notes)


def test_pushes_are_made_and_measured_where_they_are_asked_for(quick_servers: None) -> None:
    before = digests()
    found = fxlib.profile(fxlib.capture(Clicks()), workload(), steps=2, pushes=True)
    assert digests() != before
    for call in found.calls:
        assert call.push is not None
        assert call.push.service_s.count == 2
        assert call.push.service_s != call.service_s
        assert call.push.service_s.quantiles[0] >= 0.002 - call.issue_s - call.wait_s
    # Two warm up, two are measured, and one runs without a clock; those that make no calls push nothing.
    assert [note for note in found.notes if "pushed" in note] == ["gradients were pushed, in each of 5 steps"]


@pytest.mark.parametrize("asked", [[batch()], Workload(batches=[batch()], mode="forward")])
def test_steps_without_gradients_cannot_push(quick_servers: None, asked: Any) -> None:
    with pytest.raises(WorkloadError, match="only steps of local autograd have gradients to push"):
        fxlib.profile(fxlib.capture(Clicks()), asked, pushes=True)


def test_without_a_workload_the_forward_alone_is_measured(quick_servers: None) -> None:
    found = fxlib.profile(fxlib.capture(Clicks()), [batch()], steps=1)
    assert (found.loss_s, found.backward_s) == (0.0, 0.0)
    assert found.calls[0].push is None
    assert any("made from batches" in note for note in found.notes)


def test_described_batches_are_drawn(quick_servers: None) -> None:
    described = Workload.describe([batch(16)], loss="mse")
    found = fxlib.profile(fxlib.capture(Clicks()), described, steps=1)
    assert found.calls[0].returns == TensorShape(shape=(16, 4), dtype=torch.float32)


def test_a_result_of_several_parts_is_told_whole() -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, rpc.rpc_sync("ps0", far.many, args=(x,))[0])

    contracts = {"tests.profiling.remote_functions:many": Contract(pure=True, returns=(None, None))}
    found = fxlib.profile(fxlib.capture(Parts(), contracts=contracts), [torch.ones(3)], steps=1)
    numbers = TensorShape(shape=(3,), dtype=torch.int64)
    flags = TensorShape(shape=(3,), dtype=torch.bool)
    rest = [Opaque(value=3), Opaque(value="words"), Opaque(), flags]
    assert found.calls[0].returns == (numbers, {"rest": rest})


class Twice(torch.autograd.Function):
    """Code of a program's own, which a graph keeps whole."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        return 2 * gradients[0]


def test_a_module_with_code_of_the_programs_own_is_measured(quick_servers: None) -> None:
    class Doubled(Clicks):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, Twice.apply(super().forward(x, ids)))  # type: ignore[no-untyped-call]

    found = fxlib.profile(fxlib.capture(Doubled()), [batch()], steps=1)
    assert [call.call for call in found.calls] == ["lookup", "lookup_1"]


def test_distributed_autograd_is_measured_in_a_context_of_its_own() -> None:
    class Attached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(4, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, self.top(rpc.rpc_sync("ps0", ps.lookup_attached, args=("clicks", ids))))

    servers = digests()
    asked = Workload(batches=[torch.arange(8)], mode="distributed")
    found = fxlib.profile(fxlib.capture(Attached()), asked, steps=2)
    assert found.calls[0].returns == TensorShape(shape=(8, 4), dtype=torch.float32, requires_grad=True)
    assert found.backward_s > 0
    assert digests() == servers


def test_every_tensor_of_a_result_takes_its_gradient_to_the_server() -> None:
    class Attached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, others = rpc.rpc_sync("ps0", far.attached, args=(x,))
            return cast(torch.Tensor, first.mul_(3.0) * others["twice"])

    contracts = {"tests.profiling.remote_functions:attached": Contract(pure=True, returns=(None, None))}
    asked = Workload(batches=[torch.ones(3)], mode="distributed")
    found = fxlib.profile(fxlib.capture(Attached(), contracts=contracts), asked, steps=1)
    assert found.backward_s >= 0.02


def test_a_scheduled_module_is_measured_as_if_its_calls_were_made_one_by_one() -> None:
    captured = fxlib.capture(Clicks())
    scheduled = recipes.apply(captured, recipes.from_passes([("split_calls", {}), ("overlap_calls", {})])).module
    assert scheduled is not captured
    found = fxlib.profile(scheduled, workload(), steps=2)
    assert [call.call for call in found.calls] == ["lookup", "lookup_1"]
    for call, least_s in zip(found.calls, (0.002, 0.02), strict=True):
        assert call.issue_s + call.service_s.median >= least_s


def test_calls_that_travel_as_one_are_refused() -> None:
    program = Program("x")
    _, waits = program.batch("ps0", *[("torch:neg", (program.inputs[0],), {})] * 2)
    with pytest.raises(FxlibError, match="Profile the module as captured"):
        fxlib.profile(program.returns(waits), [torch.ones(4)])


def test_a_module_whose_original_runs_in_its_place_is_refused() -> None:
    module = fxlib.capture(Clicks())
    module.eval()
    with pytest.raises(FxlibError, match="Profile it in the state in which it was captured"):
        fxlib.profile(module, [batch()])


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x if x.sum() > 0 else x


def test_a_model_that_cannot_be_captured_does_not_end_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    described = Workload(batches=[torch.ones(4)], mode="forward")
    with pytest.warns(FxlibWarning, match="nothing was profiled.*program goes: return -x if x.sum") as warned:
        found = fxlib.profile(Branching(), described)
    assert not found.calls
    assert found.notes == (str(warned[0].message),)
    monkeypatch.setenv("FXLIB_DISABLE", "1")
    assert fxlib.profile(Branching(), described) == Profile(notes=("FXLIB_DISABLE is set",))


def test_steps_and_batches_are_checked() -> None:
    module = fxlib.capture(Clicks())
    with pytest.raises(WorkloadError, match="at least 1"):
        fxlib.profile(module, [batch()], steps=0)
    with pytest.raises(WorkloadError, match="not a sequence of batches"):
        fxlib.profile(module, torch.ones(3))  # type: ignore[arg-type]


def test_calls_that_the_program_issues_itself_are_measured_alone_too() -> None:
    class Issuing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            futures = [rpc.rpc_async(to, far.nap, args=(x, 0.02)) for to in ("ps0", "ps1")]
            return cast(torch.Tensor, futures[0].wait() + futures[1].wait())

    def waits_for_nothing(found: Profile) -> bool:
        return all(call.wait_s < call.service_s.median for call in found.calls)

    found = undisturbed(lambda: fxlib.profile(fxlib.capture(Issuing()), [torch.ones(2)], steps=1), waits_for_nothing)
    assert waits_for_nothing(found)
    assert [call.to for call in found.calls] == ["ps0", "ps1"]
    for call in found.calls:
        # From its own issue, although the other was issued before its wait.
        assert call.issue_s + call.service_s.median >= 0.02
        assert call.returns == TensorShape(shape=(2,), dtype=torch.float32)


def test_values_behind_references_are_measured_by_their_owner() -> None:
    class Fetching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rref = rpc.remote("ps1", far.nap, args=(torch.ones(3), 0.0))

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, x * scale + self.rref.to_here())

    batches = [Batch(inputs=(torch.ones(3),), kwargs={"scale": torch.ones(3)})]
    found = fxlib.profile(fxlib.capture(Fetching()), batches, steps=2)
    assert [(call.function, call.to) for call in found.calls] == [("fetch", "ps1")]
    assert found.calls[0].returns == TensorShape(shape=(3,), dtype=torch.float32)


def test_batches_may_differ_in_size_from_step_to_step(quick_servers: None) -> None:
    batches = [batch(size) for size in (64, 32, 48)]
    found = fxlib.profile(Clicks(), Workload(batches=batches, loss="mse", optimizer="sgd"), steps=3)
    assert len(found.calls) == 2
    assert found.step_s > 0.0
    assert any("differ in structure from step to step" in note for note in found.notes)


def test_it_says_where_local_work_was_launched_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fxlib.profiling.live_profile.accelerators_of", lambda _: ["cuda"]
    )  # which this machine need not have
    found = fxlib.profile(fxlib.capture(nn.Linear(4, 4)), [torch.randn(2, 4)], steps=1)
    assert "weights are on cuda: times of local work are for launching it" in "\n".join(found.notes)
