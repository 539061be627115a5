"""The loop has its loader's own batches, in its order, with its errors, its draws, and its place in a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils import data
from typing_extensions import override

import fxlib
from fxlib.errors import FxlibError, FxlibWarning
from fxlib.runtime import CapturedModule
from tests.pipeline.clicks import Clicks, Sent, Stateful, batches, run, train


def test_batches_are_the_loaders_own_in_its_order(sent: Sent, module: CapturedModule) -> None:
    given = batches()
    for module_given in (module, Clicks(), lambda: module):
        assert [id(each) for each in fxlib.pipeline(given, module_given)] == [id(each) for each in given]


def test_an_exception_of_the_loader_comes_at_its_step(sent: Sent, module: CapturedModule) -> None:
    def loader() -> Iterator[torch.Tensor]:
        yield from batches(2)
        raise OSError("the third batch")

    seen: list[torch.Tensor] = []
    with pytest.raises(OSError, match="the third batch"):
        run(fxlib.pipeline(loader(), module, ahead=True), lambda batch: seen.append(train(module, batch)))
    assert len(seen) == 2


def test_a_loop_may_go_on_behind_an_exception_of_the_loader(sent: Sent, module: CapturedModule) -> None:
    class Loader:
        def __init__(self) -> None:
            self.given = iter(enumerate(batches(6)))

        def __iter__(self) -> Iterator[torch.Tensor]:
            return self

        def __next__(self) -> torch.Tensor:
            at, batch = next(self.given)
            if at in {2, 3}:
                raise ValueError(f"batch {at} is corrupt")
            return batch

    loop = iter(fxlib.pipeline(Loader(), module, ahead=True))
    found: list[object] = []
    for _ in range(6):
        try:
            found.append(int(next(loop)[0, 0]))
        except ValueError as error:
            found.append(str(error))
    assert found == [0, 1, "batch 2 is corrupt", "batch 3 is corrupt", 4, 5]
    assert next(loop, None) is None
    assert next(loop, None) is None


def test_dicts_and_batches_have_the_modules_arguments_by_name(sent: Sent, module: CapturedModule) -> None:
    (x,) = batches(1)
    for batch in ({"x": x, "label": 3}, fxlib.Batch(inputs=(x,)), (x, "label"), x):
        next(iter(fxlib.pipeline([x, batch], module, inputs=None)))
        assert sent.since() == ["count"], batch


def test_an_inputs_function_need_not_know_batches_that_the_loop_skips(sent: Sent, module: CapturedModule) -> None:
    given: list[Any] = [{"ids": each} for each in batches(2)]
    given.insert(1, None)
    loop = fxlib.pipeline(given, module, inputs=lambda batch: (batch["ids"],))
    assert [None if batch is None else module(batch["ids"]).shape for batch in loop].index(None) == 1


def test_an_inputs_function_that_knows_no_batch_is_told_of(sent: Sent, module: CapturedModule) -> None:
    loop = fxlib.pipeline([{"ids": each} for each in batches(2)], module, inputs=lambda batch: (batch["idz"],))
    with pytest.warns(FxlibWarning, match="nothing was fetched ahead: inputs= raised for each batch, KeyError: 'idz'"):
        assert len(list(loop)) == 2


def test_a_list_that_the_loop_changes_is_gone_through_as_a_plain_loop_does(sent: Sent, module: CapturedModule) -> None:
    def seen(given: list[torch.Tensor], loop: Iterable[torch.Tensor]) -> list[float]:
        found = []
        for place, batch in enumerate(loop):
            found.append(float(batch[0, 0]))
            module(batch)
            if place == 0:
                given[1] = torch.full((2, 4), 7.0)
            elif place == 2:
                given.append(torch.full((2, 4), 8.0))
            elif place == 3:
                del given[2:]
        return found

    for depth in (1, 3):
        plain, given = batches(3), batches(3)
        assert seen(given, fxlib.pipeline(given, module, depth=depth)) == seen(plain, plain) == [0, 7, 2, 8]


class Drawing(data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2, 4)


def test_a_loader_that_draws_in_this_process_is_pulled_where_the_loop_pulls_it(
    sent: Sent, module: CapturedModule
) -> None:
    def dropped(*, wrapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loader = data.DataLoader(Drawing(), batch_size=None)
        loop = fxlib.pipeline(loader, module) if wrapped else loader
        return [torch.nn.functional.dropout(batch) for batch in loop]

    assert all(map(torch.equal, dropped(wrapped=True), dropped(wrapped=False)))
    assert "no worker processes" in fxlib.pipeline(data.DataLoader(Drawing()), module).why_not_ahead


def test_a_draw_of_a_loader_that_was_to_have_none_ends_pulling_ahead(sent: Sent, module: CapturedModule) -> None:
    def loader() -> Iterator[torch.Tensor]:
        for batch in batches():
            yield batch + random.random()

    with pytest.warns(FxlibWarning, match="draws from this process's random generators") as told:
        found = list(fxlib.pipeline(loader(), module, ahead=True))
    assert (len(found), len(told)) == (4, 1)


@pytest.mark.slow
def test_worker_processes_run_ahead_in_several_epochs(sent: Sent, module: CapturedModule) -> None:
    loader = data.DataLoader(
        data.TensorDataset(torch.stack(batches())), batch_size=1, num_workers=1, persistent_workers=True
    )
    loop = fxlib.pipeline(loader, module, inputs=lambda batch: (batch[0][0],))
    assert not loop.why_not_ahead
    for _ in range(2):
        assert [float(batch[0][0, 0, 0]) for batch in loop] == [0.0, 1.0, 2.0, 3.0]
    assert len(loop) == 4


@pytest.mark.slow
def test_a_checkpoint_counts_the_batches_that_were_yielded(sent: Sent, module: CapturedModule) -> None:
    loop = fxlib.pipeline(Stateful(), module, ahead=True, depth=2)
    epoch = iter(loop)
    next(epoch)
    assert loop.state_dict() == {"place": 1}
    resumed = fxlib.pipeline(Stateful(), module, ahead=True)
    resumed.load_state_dict(loop.state_dict())
    assert [float(each[0, 0]) for each in resumed] == [1.0, 2.0, 3.0]


class Live(Stateful):
    """Hands out the very dict in which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"place": 0}

    @override
    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in super().__iter__():
            self.state["place"] += 1
            yield batch

    @override
    def state_dict(self) -> dict[str, int]:
        return self.state


def test_a_checkpoint_is_of_its_step_though_the_loader_goes_on_in_it() -> None:
    loop = fxlib.pipeline(Live(), nn.Identity(), ahead=True, depth=2)
    assert [dict(loop.state_dict()) for _ in loop] == [{"place": 1}, {"place": 2}, {"place": 3}, {"place": 4}]


def test_a_loader_that_cannot_tell_its_state_raises_where_that_is_asked_for() -> None:
    loader = Stateful()
    with mock.patch.object(Stateful, "state_dict", side_effect=NotImplementedError("no state")):
        loop = fxlib.pipeline(loader, nn.Identity(), ahead=True)
        assert len(list(loop)) == 4
        with pytest.raises(NotImplementedError, match="no state"):
            loop.state_dict()


def test_a_loader_without_a_state_has_none_under_a_pipeline(module: CapturedModule) -> None:
    with pytest.raises(FxlibError, match="has no state_dict"):
        fxlib.pipeline(batches(), module).state_dict()
