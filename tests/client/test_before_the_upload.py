"""What is wrong with a question is known before anything is sent; and nobody is blamed for what fxlib made."""

from __future__ import annotations

import random
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import rpc

import fxlib
from fxlib import Client, Profile, Reason, Server, Workload
from fxlib.client.preflight import run_sample
from fxlib.errors import FxlibWarning
from fxlib.runtime.preserve_state import state_kept
from fxlib.v1 import jobs_pb2
from tests.capture import feature_store
from tests.client.models import Clicks, workload
from tests.client.scripted import Scripted
from tests.shared.rpc_world import rpc_world


def feature(ids: Tensor) -> Tensor:
    """Stands for a remote function that only the job has."""
    return ids.float()


class Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.top = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.norm(x))


class Asks(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return rpc.rpc_sync("ps0", feature, args=(ids,)) + 1


def secret(x: Tensor) -> Tensor:
    return x + 1


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return secret(x)


def ask(client: Client, model: nn.Module, described: Workload, **asked: Any) -> fxlib.Result:
    return client.optimize(model, described, progress=False, **asked)


def nothing_was_sent(service: Scripted) -> bool:
    return not service.blobs and not service.requests


def test_an_error_of_the_model_is_its_own_traceback_and_nothing_is_sent(service: Scripted, client: Client) -> None:
    model = Local()
    with pytest.raises(RuntimeError, match="running_mean") as raised:
        ask(client, model, Workload.describe([torch.randn(8, 5)]))
    assert any(
        "self.top(self.norm(x))" in (frame.line or "") for frame in traceback.extract_tb(raised.value.__traceback__)
    )
    assert "runs once before anything is sent" in raised.value.__notes__[0]
    assert nothing_was_sent(service)


def test_an_error_of_the_loss_is_told_at_once(service: Scripted, client: Client) -> None:
    described = Workload(batches=[torch.randn(8, 4)], targets=[torch.zeros(3, 1)], loss="bce_with_logits")
    with pytest.raises(ValueError, match="must be the same as input size"):
        ask(client, Local(), described)
    assert nothing_was_sent(service)


def test_the_sample_leaves_the_model_as_it_was(client: Client) -> None:
    model, x = Local(), torch.randn(8, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.top.weight.grad = torch.ones(1, 4)
    drawn = torch.get_rng_state()
    ask(client, model, Workload(batches=[x]))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.top.weight.grad, torch.ones(1, 4))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_model_that_calls_servers_makes_no_call_of_its_own(service: Scripted, client: Client) -> None:
    assert ask(client, Clicks(), workload()).reason is Reason.NOT_FASTER  # without RPC, a call would raise
    assert service.requests


def test_a_model_that_ran_here_is_not_blamed_for_the_trial(service: Scripted, client: Client) -> None:
    service.job.result.reason_code = "ORIGINAL_FAILS"
    service.job.result.reason = Reason.ORIGINAL_FAILS.sentence("KeyError: 'x'")
    told = ask(client, Local(), Workload(batches=[torch.randn(8, 4)]))
    assert (told.reason, told.explanation) == (Reason.STAND_IN_FAILS, Reason.STAND_IN_FAILS.sentence("KeyError: 'x'"))
    assert ask(client, Clicks(), workload()).reason is Reason.ORIGINAL_FAILS


@pytest.mark.parametrize(
    "recipe, message",
    [
        ("fastest", "no recipe is called 'fastest'"),
        (["overlap"], "no pass is called 'overlap'"),
        ([("overlap_calls", {"speed": 9})], "has no option 'speed'"),
    ],
)
def test_a_recipe_that_nobody_knows_is_told_before_the_upload(
    service: Scripted, client: Client, recipe: Any, message: str
) -> None:
    with pytest.warns(FxlibWarning, match=message):
        ask(client, Clicks(), workload(), recipe=recipe)
    assert nothing_was_sent(service)


def test_a_recipe_of_a_newer_service_is_asked_for(service: Scripted, client: Client) -> None:
    service.capabilities.recipes.append("fastest")
    assert ask(client, Clicks(), workload(), recipe="fastest").reason is Reason.NOT_FASTER


def test_code_that_only_the_launcher_has_is_told_before_the_upload(service: Scripted, client: Client) -> None:
    model = fxlib.capture(Keeps(), wrap=[secret])
    result = ask(client, model, Workload(batches=[torch.randn(2)]))
    assert (result.reason, result.module) == (Reason.OPAQUE_CODE, model)
    assert "secret'" in result.explanation
    assert nothing_was_sent(service)


@pytest.mark.slow
def test_of_a_hook_that_cannot_be_sent_the_reason_is_told(service: Scripted, client: Client) -> None:
    seen: list[Any] = []
    model = Local()
    model.top.register_forward_hook(lambda module, given, made: seen.append(made))
    result = ask(client, model, Workload(batches=[torch.randn(2, 4)]))
    assert result.reason is Reason.OPAQUE_CODE
    assert "module 'top' of class torch.nn.modules.linear.Linear (not traced: " in result.explanation
    assert nothing_was_sent(service)


def test_a_function_that_no_worker_has_is_told_before_the_upload(service: Scripted, client: Client) -> None:
    described = Workload(batches=[torch.arange(4)], servers=[Server(name="ps0")])
    service.capabilities.workers.append(jobs_pb2.WorkerInfo(worker_id="w", torch_version=torch.__version__))
    refused = ask(client, Asks(), described)
    assert refused.reason is Reason.NO_SERVER
    assert "feature' on 'ps0' (measure the job with fxlib.profile" in refused.explanation
    assert nothing_was_sent(service)
    assert ask(client, Asks(), described, profile=Profile()).reason is Reason.NOT_FASTER
    service.capabilities.workers[0].allowed_modules.append("my.features")  # which may import what declares it
    assert ask(client, Asks(), described).reason is Reason.NOT_FASTER


class Cache:
    """A plain object, which holds tensors and generators."""

    def __init__(self) -> None:
        self.seen, self.last = torch.zeros(1), torch.zeros(1)
        self.dice, self.numpy = random.Random(3), np.random.default_rng(3)


class Draws(nn.Module):
    """Draws from a generator of its own and from NumPy's, and writes to tensors in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.sums = torch.Generator().manual_seed(3), {"all": (torch.zeros(1), [torch.zeros(1)])}
        self.more = [torch.ones(1)]
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        first, (second,) = self.sums["all"]
        first.add_(1)
        second.add_(1)
        self.more[0] = self.more[0] + 1
        self.more.append(first)
        self.cache.seen.add_(1)
        self.cache.last = x
        drawn = self.cache.dice.random() + self.cache.numpy.random()
        return x + torch.rand(1, generator=self.own) + float(np.random.rand()) + drawn  # noqa: NPY002 - as programs do


def test_state_kept_puts_back_generators_and_what_is_in_containers() -> None:
    model = Draws()
    first, (second,) = model.sums["all"]
    kept, last = model.more[0], model.cache.last
    np.random.seed(0)  # noqa: NPY002
    outputs = []
    for _ in range(2):
        with state_kept(model):
            outputs.append(model(torch.ones(2)))
    assert torch.equal(*outputs)
    assert (first.item(), second.item()) == (0.0, 0.0)
    assert [id(each) for each in model.more] == [id(kept)]
    assert model.cache.last is last
    assert model.cache.seen.item() == 0.0


@pytest.mark.parametrize("prepare", [lambda model: model, fxlib.capture])
def test_who_asks_between_forward_and_backward_goes_on_to_backward(client: Client, prepare: Any) -> None:
    torch.manual_seed(0)
    model, x = prepare(Local()), torch.randn(8, 4)
    model(x).sum().backward()
    expected = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    loss = model(x).sum()  # the norm's statistics are saved for backward, and every run writes to them
    ask(client, model, Workload(batches=[x]))
    assert fxlib.verify(model, fxlib.capture(model) if isinstance(model, Local) else model, [x])
    loss.backward()
    assert all(map(torch.equal, [each.grad for each in model.parameters()], expected))


RAN: list[int] = []


def counted(x: Tensor) -> Tensor:
    RAN.append(len(x))
    return x + 1


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return counted(x)


@pytest.mark.parametrize("is_rpc_up", [False, True])
def test_code_that_may_call_servers_is_not_run_by_the_sample(monkeypatch: pytest.MonkeyPatch, is_rpc_up: bool) -> None:
    RAN.clear()
    model = fxlib.capture(Counts(), wrap=[counted])
    monkeypatch.setattr(rpc.api, "_is_current_rpc_agent_set", lambda: is_rpc_up)
    assert run_sample(model, Workload(batches=[torch.ones(2)])) is not is_rpc_up
    assert ([] if is_rpc_up else [2]) == RAN


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, output: Tensor, _: Tensor) -> Tensor:
        total: Tensor = self.norm(output).sum()
        return total


def test_the_sample_changes_nothing_of_the_loss() -> None:
    loss = torch.fx.symbolic_trace(Normalized())
    assert run_sample(fxlib.capture(nn.Linear(4, 4)), Workload(batches=[torch.randn(8, 4)], loss=loss))
    assert int(loss.get_buffer("norm.num_batches_tracked")) == 0


class WritesToAnAnswer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = rpc.rpc_sync("ps0", torch.mul, args=(self.weight, x))
        return answer.masked_fill_(x > 1, 0.0)


@pytest.mark.slow
def test_a_sample_of_a_distributed_step_runs_in_its_context() -> None:
    with rpc_world():
        model = fxlib.capture(WritesToAnAnswer())
        assert run_sample(model, Workload(batches=[torch.ones(2)], mode="distributed"))


class Fetches(nn.Module):
    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def forward(self, rows: Tensor) -> Tensor:
        return feature_store.get(self.address, rows) + 1


@pytest.mark.slow
def test_a_registered_client_is_refused_only_where_no_worker_may_know_it(service: Scripted, client: Client) -> None:
    service.capabilities.workers.append(jobs_pb2.WorkerInfo(worker_id="w", torch_version=torch.__version__))
    described = Workload(batches=[torch.arange(4)], mode="forward")
    with feature_store.serving() as store:
        model = fxlib.capture(Fetches(store.address))
        refused = ask(client, model, described)
        assert refused.reason is Reason.NO_SERVER
        assert "feature_store:get' of the client 'features'" in refused.explanation
        assert ask(client, model, described, profile=fxlib.profile(model, described)).reason is Reason.NOT_FASTER
        service.capabilities.workers[0].allowed_modules.append("my.features")  # which may register it
        assert ask(client, model, described).reason is Reason.NOT_FASTER


def test_a_server_that_the_workload_does_not_name_is_told_before_the_upload(service: Scripted, client: Client) -> None:
    refused = ask(client, Asks(), Workload(batches=[torch.arange(4)]))
    assert refused.reason is Reason.NO_SERVER
    assert "calls to 'ps0', which is none of the workload's servers" in refused.explanation
    assert nothing_was_sent(service)


@pytest.mark.parametrize("where", ["weights", "batches"])
def test_a_job_on_an_accelerator_keeps_its_original_saying_so(service: Scripted, client: Client, where: str) -> None:
    model, batch = nn.Linear(4, 4), torch.zeros(2, 4)
    with FakeTensorMode():  # no such device is here
        if where == "weights":
            model.weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
        else:
            batch = torch.empty(2, 4, device="cuda")
    refused = ask(client, fxlib.capture(model), Workload(batches=[batch]))
    assert (refused.decision, refused.reason) == ("keep_original", Reason.NO_DEVICE)
    assert "elsewhere: cuda:0" in refused.explanation
    assert nothing_was_sent(service)
