"""The callbacks in the trainers they are for: a few steps leave model and server as a loop by hand leaves them.

Neither Lightning nor accelerate, without which the Trainer of transformers does not train, is among what the project's
tests install.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc
from torch.utils.data import DataLoader
from typing_extensions import override

import fxlib
from fxlib import ps, wire
from fxlib.integrations import lightning, transformers
from tests.client.models import Clicks, workload
from tests.client.scripted import Scripted, serving
from tests.shared.rpc_world import rpc_world

pytestmark = pytest.mark.slow
ROWS, BATCH, RATE = 100, 4, 0.1
Example = dict[str, torch.Tensor]


class Learner(nn.Module):
    """A model with its loss, as the Trainer of transformers wants it, around a part that calls a server."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"net": Clicks()})

    @override
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner["net"](x, ids).square().mean()}


def examples(steps: int) -> list[Example]:
    draw = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, generator=draw), "ids": torch.randint(ROWS, (), generator=draw)}
        for _ in range(steps * BATCH)
    ]


def batches(steps: int) -> DataLoader[Example]:
    given: Any = examples(steps)
    return DataLoader(given, batch_size=BATCH)


def table() -> torch.Tensor:
    rows: torch.Tensor = rpc.rpc_sync("ps0", ps.lookup, args=("clicks", torch.arange(ROWS)))
    return rows.detach()


@pytest.fixture
def pl() -> Any:
    """Lightning; first among the fixtures of a test, so that nothing starts where it is missing."""
    return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


@pytest.fixture
def hf() -> Any:
    """The package transformers, where its Trainer can train; first among the fixtures of a test, too."""
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer of transformers needs, is not installed")
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def learner() -> Learner:
    torch.manual_seed(0)
    return Learner()


@pytest.fixture
def by_hand(learner: Learner) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Parameters and table after two steps of a loop by hand."""
    model = copy.deepcopy(learner)
    net = fxlib.optimize(fxlib.capture(model.inner["net"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with rpc_world(*workload().servers):
        begun = table()
        for batch in batches(2):
            optimizer.zero_grad()
            net(**batch).square().mean().backward()
            optimizer.step()
            fxlib.push_gradients(net)
        trained = table()
    assert not torch.equal(begun, trained)
    return [each.detach() for each in model.parameters()], trained


@pytest.fixture
def address() -> Iterator[str]:
    service = Scripted()
    service.adopt(wire.encode(fxlib.optimize(fxlib.capture(Clicks()))).graph.SerializeToString())
    with serving(service) as address, rpc_world(*workload().servers):
        yield address


def assert_trained(learner: Learner, callback: Any, net: nn.Module, by_hand: tuple[list[torch.Tensor], Any]) -> None:
    assert callback.training.result.adopted
    assert learner.inner["net"] is net
    assert all(map(torch.equal, learner.parameters(), by_hand[0]))
    assert torch.equal(table(), by_hand[1])


# ------------------------------------------------------------------------------------------------------------ Lightning


def fit(pl: Any, learner: Learner, callback: Any, folder: Path, *, fails: bool = False) -> None:
    """Fit with Lightning, which warns of much that is so on purpose here."""

    class Fitted(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.learner = learner

        @override
        def training_step(self, batch: Example, index: int) -> torch.Tensor:
            if fails and index == 1:
                raise KeyError("a batch")
            return self.learner(**batch)["loss"]

        @override
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=1, default_root_dir=folder, callbacks=[callback],
            **dict.fromkeys(off, False),
        )  # fmt: skip
        trainer.fit(Fitted(), batches(2))


def test_lightning_trains_as_a_loop_by_hand(
    pl: Any, learner: Learner, by_hand: tuple[list[torch.Tensor], torch.Tensor], address: str, tmp_path: Path
) -> None:
    net, callback = learner.inner["net"], lightning.callback("learner.inner.net", workload(), address)
    fit(pl, learner, callback, tmp_path)
    assert_trained(learner, callback, net, by_hand)


def test_a_fit_of_lightning_that_fails_leaves_the_model_with_its_own_part(
    pl: Any, learner: Learner, address: str, tmp_path: Path
) -> None:
    net, callback = learner.inner["net"], lightning.callback("learner.inner.net", workload(), address)
    with pytest.raises(KeyError, match="a batch"):
        fit(pl, learner, callback, tmp_path, fails=True)
    assert callback.training.result.adopted
    assert learner.inner["net"] is net


# --------------------------------------------------------------------------------------------------------- transformers


def test_the_trainer_of_transformers_trains_as_a_loop_by_hand(
    hf: Any, learner: Learner, by_hand: tuple[list[torch.Tensor], torch.Tensor], address: str, tmp_path: Path
) -> None:
    net, callback = learner.inner["net"], transformers.callback("inner.net", workload(), address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = hf.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=BATCH, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", remove_unused_columns=False, dataloader_pin_memory=False,
            lr_scheduler_type="constant", max_grad_norm=0.0, learning_rate=RATE,
        )  # fmt: skip
        trainer = hf.Trainer(
            model=learner, args=told, train_dataset=examples(2), callbacks=[callback],
            optimizers=(torch.optim.SGD(learner.parameters(), lr=RATE), None),
        )  # fmt: skip
        trainer.get_train_dataloader = lambda: batches(2)  # in their order
        trainer.train()
    assert_trained(learner, callback, net, by_hand)
