"""The user's step, from the workload, without remote calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxlib
from fxlib.errors import WorkloadError
from fxlib.spec.inputs import samples_in
from fxlib.spec.training import build_optimizer, scalar_loss
from fxlib.spec.workload import Batch, BatchSpec, Optimizer, Tensors, Workload
from fxlib_workers.trial.digests import ModuleSnapshot
from fxlib_workers.trial.requirements import BoundModule
from fxlib_workers.trial.step import Step, copy_of, optimizer_of


def spec(**inputs: Tensors) -> BatchSpec:
    return BatchSpec(kwargs=inputs, count=2)


def test_described_batches_are_the_same_in_every_process() -> None:
    workload = Workload(batches=spec(x=Tensors(shape=(3, 2), dtype=torch.float32)), seed=5, mode="forward")
    one, other = workload.drawn_batches, workload.drawn_batches
    assert len(one) == 2
    assert torch.equal(one[0].kwargs["x"], other[0].kwargs["x"])
    assert not torch.equal(one[0].kwargs["x"], one[1].kwargs["x"])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
def test_batches_are_drawn_in_their_range(dtype: torch.dtype) -> None:
    described = Tensors(shape=(100,), dtype=dtype, low=0, high=2)
    drawn = Workload(batches=spec(x=described), mode="forward").drawn_batches[0].kwargs["x"]
    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert drawn.float().max() <= 2


def test_integers_without_a_range_are_refused() -> None:
    with pytest.raises(WorkloadError, match="range"):
        _ = Workload(batches=spec(x=Tensors(shape=(1,), dtype=torch.int64)), mode="forward").drawn_batches


def test_samples_are_counted_by_the_first_dimension() -> None:
    assert samples_in(Batch(inputs=(torch.tensor(1.0), torch.zeros(7, 2)))) == 7
    assert samples_in(Batch(inputs=(torch.tensor(1.0),))) == 1


def test_a_copy_shares_no_storage() -> None:
    batch = Batch(inputs=(torch.zeros(2),), kwargs={"y": torch.zeros(2)})
    copied = copy_of(batch)
    copied.inputs[0].add_(1)
    copied.kwargs["y"].add_(1)
    assert batch.inputs[0].sum() == 0
    assert batch.kwargs["y"].sum() == 0


@pytest.mark.parametrize(
    "name, expected",
    [("mean", 2.0), ("sum", 8.0), ("mse", 1.0), ("bce_with_logits", None), ("cross_entropy", None)],
)
def test_losses_by_name(name: str, expected: float | None) -> None:
    output = torch.full((2, 2), 2.0)
    target = torch.tensor([0, 1]) if name == "cross_entropy" else torch.ones(2, 2)
    loss = scalar_loss(name, output, target)
    assert loss.dim() == 0
    assert expected is None or loss.item() == expected


def test_the_mean_of_several_outputs_takes_all_of_them_in() -> None:
    outputs = {"a": torch.ones(2), "b": [torch.full((3,), 2.0), torch.tensor([1, 2])]}
    assert scalar_loss("mean", outputs, None).item() == 3.0


def test_an_output_without_numbers_has_no_loss() -> None:
    with pytest.raises(WorkloadError, match="floating-point"):
        scalar_loss("mean", torch.tensor([1]), None)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw"])
def test_optimizers_by_name(name: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(Optimizer(name=name, lr=0.1, weight_decay=0.01), [parameter])
    assert optimizer is not None
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


def test_nothing_to_train_needs_no_optimizer() -> None:
    assert build_optimizer(Optimizer(name="sgd"), []) is None
    assert build_optimizer(Optimizer(name="none"), [nn.Parameter(torch.ones(1))]) is None


def test_a_local_step_is_the_loop_that_a_user_would_write() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 1), Batch(inputs=(torch.randn(4, 3),), target=torch.randn(4, 1))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    workload = Workload(batches=[batch], loss="mse", optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9))
    module = fxlib.capture(model)
    step = Step(BoundModule(module, {}), workload, optimizer_of(module, workload))
    losses = [step(batch).loss for _ in range(3)]
    trained = {name: value.clone() for name, value in model.state_dict().items()}

    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for loss in losses:
        optimizer.zero_grad()
        own = nn.functional.mse_loss(model(*batch.inputs), batch.target)  # type: ignore[arg-type]
        own.backward()
        optimizer.step()
        assert loss is not None
        assert torch.equal(own, loss)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_a_forward_step_builds_no_autograd_graph() -> None:
    module = fxlib.capture(nn.Linear(3, 1))
    workload = Workload(batches=[torch.randn(4, 3)], mode="forward")
    outcome = Step(BoundModule(module, {}), workload, None)(workload.real_batches[0])
    assert isinstance(outcome.output, torch.Tensor)
    assert not outcome.output.requires_grad
    assert outcome.loss is None


def test_state_comes_back_bit_for_bit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state, before = ModuleSnapshot(model), ModuleSnapshot(model).digest()
    weight = model[0].weight
    model(torch.randn(4, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model[1].running_mean = torch.full((2,), 7.0)  # another tensor in the buffer's place
    model.eval()
    assert ModuleSnapshot(model).digest() != before
    state.restore()
    assert ModuleSnapshot(model).digest() == before
    assert model[0].weight is weight
    assert weight.grad is None
    assert model.training


def _trained(model: nn.Module, batches: list[Batch], **how: float) -> list[torch.Tensor]:
    workload = Workload(batches=batches, loss="mse", optimizer=Optimizer(name="sgd", lr=0.1), **how)  # type: ignore[arg-type]
    module = fxlib.capture(model)
    step = Step(BoundModule(module, {}), workload, optimizer_of(module, workload))
    for batch in batches:
        step(batch)
    return [each.detach().clone() for each in model.parameters()]


def _batches(count: int) -> list[Batch]:
    torch.manual_seed(1)
    return [Batch(inputs=(torch.randn(4, 3),), target=torch.randn(4, 1)) for _ in range(count)]


def test_gradients_of_several_batches_add_up_to_one_update() -> None:
    model, batches = nn.Linear(3, 1), _batches(4)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found = _trained(model, batches, accumulation=2)

    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for place, batch in enumerate(batches):
        if place % 2 == 0:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(*batch.inputs), batch.target).backward()  # type: ignore[arg-type]
        if place % 2 == 1:
            optimizer.step()
    assert all(map(torch.equal, found, model.parameters()))


def test_a_scaled_loss_moves_parameters_as_far_as_an_unscaled_one() -> None:
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 1), _batches(3)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plain = _trained(model, batches)
    model.load_state_dict(start)
    scaled = _trained(model, batches, loss_scale=1024.0)  # a power of two rounds nothing
    assert all(map(torch.equal, plain, scaled))


def test_clipped_gradients_have_the_norm_asked_for() -> None:
    model, batches = nn.Linear(3, 1), _batches(1)
    before = [each.detach().clone() for each in model.parameters()]
    after = _trained(model, batches, clip_norm=1e-3)
    moved = torch.cat([(new - old).flatten() for new, old in zip(after, before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-2)
