"""A trainer runs steps on its batches, tells of a thread that waits for a core, and how far values are from others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import wire
from fxlib.protocol import workload_to_proto
from fxlib.spec.workload import Batch, Workload
from fxlib_workers.exchange import ORIGINAL, Arm
from fxlib_workers.trial.digests import digest
from fxlib_workers.trial.trainer import EncodedProgram, ToleranceCheck, Trainer, run_delay_s
from fxlib_workers.trial.trial_process import ProcessConfig
from tests.random_programs import simulation
from tests.random_programs.simulation import simulated
from tests.shared.forked import printed

BESIDE_ANOTHER = """
import os, time
from fxlib_workers.trial.trainer import run_delay_s

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
is_other = os.fork() == 0
before, end = run_delay_s(), time.monotonic() + 0.5
while time.monotonic() < end:
    pass
if not is_other:
    print(run_delay_s() - before)
"""


@pytest.mark.slow
def test_two_threads_on_one_core_wait_for_each_other(tmp_path: Path) -> None:
    assert 0.1 < float(printed(BESIDE_ANOTHER, tmp_path)) < 0.6


def test_a_kernel_that_does_not_tell_is_taken_to_have_cores_for_all(tmp_path: Path) -> None:
    assert run_delay_s(tmp_path / "schedstat") == 0.0


def kept(*steps: dict[str, object]) -> ToleranceCheck:
    made = ToleranceCheck()
    for step, values in enumerate(steps):
        made.keep(step, values, {name: digest(value) for name, value in values.items()})
    return made


def test_the_worst_step_counts() -> None:
    near = kept({"output": torch.tensor([1.0])}, {"output": torch.tensor([2.0])})
    near.compare("candidate", 0, {"output": torch.tensor([1.0])})
    near.compare("candidate", 1, {"output": torch.tensor([2.5])})
    assert near.errors("candidate") == {"output": pytest.approx(0.25)}


def test_each_candidate_has_errors_of_its_own() -> None:
    near = kept({"output": torch.tensor([1.0])})
    near.compare("far", 0, {"output": torch.tensor([2.0])})
    near.compare("near", 0, {"output": torch.tensor([1.0])})
    assert (near.errors("far"), near.errors("near")) == ({"output": 1.0}, {"output": 0.0})


def test_what_only_one_of_them_leaves_behind_is_infinitely_far() -> None:
    near = kept({"output": 1, "gradient of weight": torch.ones(2)})
    near.compare("candidate", 0, {"output": 1, "loss": torch.ones(1)})
    assert near.errors("candidate") == {"output": 0.0, "gradient of weight": math.inf, "loss": math.inf}


def test_what_is_written_to_later_is_compared_as_it_was() -> None:
    value = torch.tensor([1.0])
    near = kept({"output": value})
    value.fill_(5.0)
    near.compare("candidate", 0, {"output": torch.tensor([1.0])})
    assert near.errors("candidate") == {"output": 0.0}


def test_the_first_run_of_the_original_is_the_measure() -> None:
    near = kept({"output": torch.tensor([1.0])})
    later: dict[str, object] = {"output": torch.tensor([3.0])}
    near.keep(0, later, {name: digest(value) for name, value in later.items()})
    near.compare("candidate", 0, {"output": torch.tensor([1.0])})
    assert near.errors("candidate") == {"output": 0.0}


def trainer_of(model: nn.Module, workload: Workload, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> Trainer:
    """A trainer in this process, of a model that makes no calls."""
    monkeypatch.setattr("fxlib_workers.trial.trainer.drain", lambda: None)
    encoded, described = wire.encode(fxlib.capture(model)), workload_to_proto(workload)
    program = EncodedProgram(
        original=wire.serialize(encoded.graph),
        workload=described.message.SerializeToString(),
        blobs={**encoded.blobs, **described.blobs},
    )
    config = ProcessConfig(
        name=f"trainer{rank}",
        rank=rank,
        world_size=workload.trainers,
        interface="lo",
        allowed_modules=(),
        memory_bytes=1 << 34,
        file_bytes=1 << 34,
        threads=1,
    )
    made = Trainer(config)
    made.switch_program(program)
    made.load()
    made.prepare()
    return made


PIPELINED = "pipelined"


@pytest.mark.parametrize("arm", [ORIGINAL, PIPELINED])
def test_a_block_runs_the_batches_of_its_steps(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [torch.full((1,), float(index)) for index in range(3)]
    trainer = trainer_of(nn.ReLU(), Workload(batches=batches, mode="forward"), monkeypatch)
    trainer.load_candidate(PIPELINED, trainer._program.original, {}, 1, 0)
    ran: list[float] = []

    def step(batch: Batch) -> None:
        ran.append(float(batch.inputs[0]))

    monkeypatch.setitem(trainer._steps, arm, step)
    for first in (0, 2, 4):
        trainer.block(arm, first, 2)
    assert ran == [0, 1, 2, 0, 1, 2]


@fxlib.remote(writes="pushes")
def push(x: torch.Tensor, gradient: torch.Tensor) -> None:
    simulation._state()["pushes"] = simulation._state().get("pushes", torch.zeros(1)) + 1


@fxlib.remote(reads="pushes", gradient=f"{__name__}:push")
def read(x: torch.Tensor) -> torch.Tensor:
    return x.detach()


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.weight * rpc.rpc_sync("ps0", read, args=(x,))
        return result


def test_gradients_that_were_not_pushed_before_a_reset_are_not_pushed_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = Workload(batches=[torch.ones(2, 4)], optimizer="none", accumulation=2)
    trainer = trainer_of(Reads(), workload, monkeypatch)
    with simulated(0) as world:
        for steps in (1, 2):
            trainer.reset()
            trainer.block(ORIGINAL, 0, steps)
        assert world.states["ps0"]["pushes"] == 2


class Shifts(nn.Module):
    """A table whose first row is for padding, so that its model shifts the ids where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, padding_idx=0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids += 1
        result: torch.Tensor = self.table(ids)
        return result


def test_batches_stay_as_they_are_in_trainers_that_were_not_told_whether_the_model_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = Workload(batches=[torch.tensor([0, 2])], mode="forward", trainers=2)
    trainer = trainer_of(Shifts(), workload, monkeypatch, rank=1)
    assert isinstance(trainer.block(ORIGINAL, 0, 3), float)
    assert trainer._batches[0].inputs[0].tolist() == [0, 2]


@pytest.mark.parametrize("model, is_written", [(Shifts(), True), (nn.Identity(), False)])
def test_what_one_trainer_finds_of_written_inputs_holds_in_another(
    model: nn.Module, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(batches=[torch.tensor([0, 2])], mode="forward", trainers=2)
    one, other = (trainer_of(model, workload, monkeypatch, rank) for rank in range(2))
    one.digest_step(ORIGINAL, 0)
    assert one.writes_inputs() is is_written
    other.note_inputs(one.writes_inputs())
    assert (other._input(0) is other._batches[0]) is not is_written


def test_samples_are_those_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(batches=[torch.ones(8, 2), torch.ones(3, 2)], mode="forward")
    assert trainer_of(nn.ReLU(), workload, monkeypatch).samples() == [8, 3]
