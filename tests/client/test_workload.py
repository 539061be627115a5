"""A workload says how a step runs, or says what is wrong with it."""

from typing import Any

import pytest
import torch

from fxlib import Batch, BatchSpec, Contract, Dense, Server, Table, Tensors, Workload
from fxlib.errors import WorkloadError
from fxlib.spec.inputs import with_ranges_of

X, Y = torch.zeros(4, 3), torch.tensor([3, 9, 4])


def test_a_batch_may_be_a_tensor_a_tuple_a_dict_or_a_batch() -> None:
    batches = Workload(batches=[X]).real_batches, Workload(batches=[(X, Y)]).real_batches
    assert [len(batch.inputs) for (batch,) in batches] == [1, 2]
    assert Workload(batches=[{"x": X}]).real_batches[0].named.keys() == {"kwarg.x"}
    assert Workload(batches=[Batch(inputs=(X,), target=Y)]).real_batches[0].target is Y


def test_targets_go_with_their_batches() -> None:
    workload = Workload(batches=[X, X + 1], targets=[Y, Y + 1], loss="mse")
    assert [int(batch.named["target"][0]) for batch in workload.real_batches] == [3, 4]


def test_a_description_holds_shapes_dtypes_and_index_ranges_and_no_value() -> None:
    workload = Workload.describe([(X, Y), (X, Y + 20)], targets=[X, X], loss="mse", mode="forward", count=7)
    assert workload.spec == BatchSpec(
        inputs=(
            Tensors(shape=(4, 3), dtype=torch.float32),
            Tensors(shape=(3,), dtype=torch.int64, low=3, high=30),
        ),
        target=Tensors(shape=(4, 3), dtype=torch.float32),
        count=7,
    )
    assert (workload.loss, workload.mode, workload.real_batches) == ("mse", "forward", ())


def test_a_range_that_is_given_is_told_in_place_of_the_values_own() -> None:
    workload = Workload.describe([(X, Y)], ranges={"input.1": (0, 1000), "input.0": (-1, 1)})
    assert ranges_of(workload) == [(-1, 1), (0, 1000)]


def test_a_tensor_under_several_names_is_described_under_each_as_it_is_there() -> None:
    ids = [torch.arange(8) + 2 * step for step in range(2)]
    both = [(each, each) for each in ids]
    assert ranges_of(Workload.describe(both, ranges={"input.0": (0, 1000)})) == [(0, 1000), (0, 10)]
    assert ranges_of(Workload.describe([both[0], (ids[0] + 100, ids[0])])) == [(0, 108), (0, 8)]
    tokens = [torch.arange(64)] * 2
    model = Workload.describe(tokens, targets=tokens).spec  # a language model's targets are its inputs
    assert model is not None
    assert model.inputs[0].repeats == 1.0


def test_one_description_has_the_range_that_its_tensor_has_under_each_name() -> None:
    described = Tensors(shape=(2,), dtype=torch.float32)
    batch = Batch(inputs=(torch.tensor([0.0, 1.0]), torch.tensor([-2.0, 0.0])))
    spec = with_ranges_of(BatchSpec(inputs=(described, described)), [batch])
    assert [(each.low, each.high) for each in spec.inputs] == [(0.0, 1.0), (-2.0, 0.0)]


def ranges_of(workload: Workload) -> list[tuple[float | None, float | None]]:
    assert workload.spec is not None
    return [(each.low, each.high) for each in workload.spec.inputs]


def test_a_step_may_take_no_input() -> None:
    workload = Workload(batches=[Batch(), Batch()])
    assert workload.samples_per_step == 1
    described = Workload.describe([()])
    assert [batch.leaves for batch in described.samples] == [{}]
    assert Workload(batches=described.samples).samples_per_step == 1


WRONG: dict[str, dict[str, Any]] = {
    "Pass [batch, ...], at least one.": {"batches": []},
    "Workload.batches: a sequence": {"batches": X},
    "batches[1]: str is not a batch": {"batches": [X, "x"]},
    "batches[0] input.1: an input of type object cannot be sent": {"batches": [(X, object())]},
    "batches[0] input.0: only dense": {"batches": [X.to_sparse()]},
    "batches[1]: has input.0, input.1, and the first batch input.0": {"batches": [X, (X, X)]},
    "2 targets for 1 batches": {"batches": [X], "targets": [X, X]},
    "unknown loss 'huber'": {"loss": "huber"},
    "the loss 'mse' needs a target": {"loss": "mse"},
    "unknown optimizer 'lion'": {"optimizer": "lion"},
    "unknown mode 'both'": {"mode": "both"},
    "unknown assumption 'writes'": {"assume": "writes"},
    "Workload.accumulation: must be 1 to 1024": {"accumulation": 0},
    "Workload.clip_norm: must be finite and positive": {"clip_norm": 0.0},
    "Workload.loss_scale: must be finite and positive": {"loss_scale": float("inf")},
    "apply to steps of local autograd": {"accumulation": 2, "mode": "distributed"},
    "Workload.threads: must be at least 1": {"threads": 0},
    "Workload.trainers: must be at least 1": {"trainers": -1},
    "Workload.threads: must be at most 1024": {"threads": 2**31 - 1},
    "trainers and servers must be at most 256": {"trainers": 250, "servers": [Server(name=f"{i}") for i in range(7)]},
    "two servers are called 'ps'": {"servers": [Server(name="ps"), Server(name="ps")]},
    "'lookup' does not name a remote function": {"contracts": {"lookup": Contract(pure=True)}},
    "Workload.seed: -1 is out of range": {"seed": -1},
    "Workload.pipeline: must be 0 to 64": {"pipeline": 65},
    "Workload.stale: must be 0 to 64": {"pipeline": 1, "stale": -1},
    "no read is stale in a loop without a pipeline": {"stale": 1},
    "no call may run ahead of its step's distributed autograd": {"pipeline": 1, "mode": "distributed"},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_describes_no_step_is_refused_where_it_is_written(message: str) -> None:
    fields: dict[str, Any] = {"batches": [X], **WRONG[message]}
    with pytest.raises(WorkloadError) as caught:
        Workload(**fields)
    assert message in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"batches\[0\] input.0: only dense tensors with values can be sent"):
        Workload(batches=[torch.nested.nested_tensor([X, X])])


def test_a_range_of_no_tensor_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"no tensor is called 'x'. There are input.0, input.1"):
        Workload.describe([(X, Y)], ranges={"x": (0, 1)})


def test_an_empty_index_tensor_needs_a_range() -> None:
    with pytest.raises(WorkloadError, match=r"input.0: is empty, so its range is unknown. Give it in ranges="):
        Workload.describe([torch.zeros(0, dtype=torch.int64)])


INT8, INT64, LONG = torch.int8, torch.int64, 2**63
UNFIT: dict[str, tuple[torch.dtype, float, float]] = {
    "Tensors.high: 1000 does not fit torch.int8": (INT8, 0, 1000),
    "Tensors.low: -5 does not fit torch.uint8": (torch.uint8, -5, 5),
    "Tensors.high: inf does not fit torch.int8": (INT8, 0, float("inf")),
    "Tensors.low: nan does not fit torch.float32": (torch.float32, float("nan"), 1),
    "Tensors.high: 3e+38 does not fit torch.float16": (torch.float16, 0, 3e38),
    "Tensors.high: [0, 0) is empty. high is exclusive.": (INT64, 0, 0.5),
    f"Tensors.high: [0, {LONG}) is too wide to be drawn from": (INT64, 0, LONG),
    "Tensors.high: [-3e+38, 3e+38) is too wide to be drawn from": (torch.float64, -3e38, 3e38),
    "Tensors.dtype: a range of torch.bits8 cannot be drawn from": (torch.bits8, 0, 1),
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_range_that_does_not_fit_its_dtype_is_refused(message: str) -> None:
    dtype, low, high = UNFIT[message]
    with pytest.raises(WorkloadError) as caught:
        Tensors(shape=(2,), dtype=dtype, low=low, high=high)
    assert message in str(caught.value)


def test_a_range_that_does_not_fit_is_named_by_its_input() -> None:
    with pytest.raises(WorkloadError, match=r"input.0: Tensors.high: 1000 does not fit torch.int8. Give its range in"):
        Workload.describe([Y.to(INT8)], ranges={"input.0": (0, 1000)})
    with pytest.raises(WorkloadError, match=r"input.0: Tensors.high: .* is too wide to be drawn from. Give its range"):
        Workload.describe([torch.tensor([0, LONG - 1])])


@pytest.mark.parametrize("dtype", [INT8, torch.uint16, torch.uint32, INT64])
def test_integers_of_every_dtype_are_drawn_from_their_whole_range(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    low = max(info.min, info.max - LONG + 2)
    described = BatchSpec(inputs=(Tensors(shape=(99,), dtype=dtype, low=low, high=info.max + 1),))
    drawn = Workload(batches=described).samples[0].inputs[0].to(INT64)
    assert low <= int(drawn.min()) < int(drawn.max()) <= info.max
    assert ranges_of(Workload.describe([Y.to(dtype)])) == [(3, 10)]


def test_integers_that_no_float_holds_are_in_the_range_that_is_told() -> None:
    for value in (2**53 + 1, 1_730_000_000_000_000_123, -(2**53) - 1):
        ((low, high),) = ranges_of(Workload.describe([torch.full((4,), value)]))
        assert low is not None
        assert high is not None
        assert low <= value < high <= low + 512


def test_keys_of_no_column_are_described_and_drawn() -> None:
    described = Workload.describe([torch.zeros(4, 0, dtype=INT64)] * 2, ranges={"input.0": (0, 5)})
    assert described.samples[0].inputs[0].shape == (4, 0)


def test_inputs_whose_dtypes_differ_cannot_be_described() -> None:
    with pytest.raises(WorkloadError, match=r"input.0: has a dtype that differs between batches"):
        Workload.describe([Y, torch.tensor([float("nan")])])


def test_state_of_a_server_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"Table\('t'\): \[0, 4\] is not a valid table"):
        Table(name="t", rows=0, dim=4)
    with pytest.raises(WorkloadError, match=r"Dense\('d'\).shape: negative size"):
        Dense(name="d", shape=(-1,))
    with pytest.raises(WorkloadError, match=r"Table\('t'\): unknown optimizer 'adam'. \"sgd\" or \"adagrad\"."):
        Table(name="t", rows=1, dim=1, optimizer="adam")  # type: ignore[arg-type]


def test_what_no_trial_could_hold_or_wait_for_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"Server.name: .* 'ps 0' is not one"):
        Server(name="ps 0")
    with pytest.raises(WorkloadError, match=r"Server\('ps'\).service_time_s: must be 0 to 60 s"):
        Server(name="ps", service_time_s=1e300)
    with pytest.raises(WorkloadError, match=r"elements of state are more than"):
        Server(name="ps", tables=[Table(name="t", rows=1 << 50, dim=1 << 10)])
    with pytest.raises(WorkloadError, match=r"BatchSpec: .* elements are more than"):
        BatchSpec(inputs=(Tensors(shape=(1 << 40, 1 << 40), dtype=torch.float32),))
