"""Servers that die, loops that are left and begun anew, modules that are swapped: all as in the plain loop."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed import rpc
from torch.distributed.algorithms.join import Join
from torch.utils import data
from typing_extensions import override

import fxlib
from fxlib import wire
from fxlib.errors import FxlibWarning
from fxlib.pipeline.choice import MeasuredChoice
from fxlib.pipeline.watch import WATCH
from fxlib.runtime import CapturedModule
from tests.client.scripted import Scripted, serving
from tests.collectives.world import on_all_ranks
from tests.pipeline.clicks import Clicks, Stateful, batches
from tests.random_programs import simulation
from tests.random_programs.simulation import World, simulated
from tests.shared.forked import Module

pytestmark = pytest.mark.slow

PLACES = ("before the forward", "before the backward", "before the push", "behind the push")


def captured(*, rewritten: bool = False) -> CapturedModule:
    torch.manual_seed(0)
    module = fxlib.capture(Clicks())
    found = fxlib.optimize(module) if rewritten else module
    assert isinstance(found, CapturedModule)
    return found


def left_nothing(world: World) -> bool:
    return not WATCH.is_watching and all(each.landed for each in world._flying)


# A server that dies.


def fate(
    module: nn.Module,
    loop: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]],
    dies: Callable[[int, str], bool],
    *,
    pushes: bool = True,
) -> tuple[list[torch.Tensor], int, str]:
    """Return the outputs, the number of steps that began, and the error, of a loop in which a server dies."""
    outputs: list[torch.Tensor] = []
    step, error = 0, ""
    with simulated(5) as world:

        def passes(place: str) -> None:
            if dies(step, place):
                world.dead.add("ps1")

        try:
            for batch in loop(batches(6)):
                step += 1
                passes(PLACES[0])
                outputs.append(module(batch).detach() if not pushes else module(batch))
                passes(PLACES[1])
                if pushes:
                    outputs[-1].sum().backward()
                    passes(PLACES[2])
                    fxlib.push_gradients(module)
                passes(PLACES[3])
        except ConnectionError as raised:
            error = str(raised).partition("\n")[0]
        assert left_nothing(world)
    return [each.detach() for each in outputs], step, error


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rewritten", [False, True], ids=["as written", "rewritten"])
def test_a_server_that_dies_ends_a_training_at_the_step_of_the_plain_loop(place: str, rewritten: bool) -> None:
    def dies(step: int, where: str) -> bool:
        return (step, where) == (3, place)

    outputs, steps, error = fate(captured(), lambda given: given, dies)
    assert error
    for depth in (1, 2):
        module = captured(rewritten=rewritten)
        found, ended, raised = fate(module, partial(fxlib.pipeline, module=module, depth=depth), dies)
        assert (ended, raised) == (steps, error)
        assert all(map(torch.equal, found, outputs))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_server_that_dies_ends_a_loop_without_pushes_at_the_first_batch_that_was_not_read(depth: int) -> None:
    def dies(step: int, where: str) -> bool:
        return (step, where) == (2, PLACES[3])

    outputs, steps, error = fate(captured(), lambda given: given, dies, pushes=False)
    module = captured()
    loop: Callable[..., Any] = partial(fxlib.pipeline, module=module, depth=depth)
    found, ended, raised = fate(module, loop, dies, pushes=False)
    assert raised == error
    assert steps <= ended <= steps + depth
    assert all(map(torch.equal, found, outputs))


@pytest.mark.timeout(200)
def test_the_process_of_a_server_ends_in_the_middle_of_a_loop(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    assert Module("tests.pipeline.mortal_loop", log=log, out=out).wait(180) == 0, log.read_text()
    plain, *others = json.loads(out.read_text())
    assert plain["error"]
    for each in others:
        assert (each["error"], each["steps"], each["losses"]) == (plain["error"], plain["steps"], plain["losses"])
        assert not each["watching"]
        assert each["ended_s"] < 20.0


# Modules that are swapped between two steps.


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_a_module_that_is_swapped_between_two_steps_goes_on_as_it_would(is_told: bool) -> None:
    def outputs(*, ahead: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Any]:
        current: Any = captured()
        rewritten = fxlib.optimize(current)
        loop: Any = batches(8)
        with simulated(5) as world, warnings.catch_warnings():
            warnings.simplefilter("ignore", FxlibWarning)
            if ahead:
                loop = fxlib.pipeline(loop, (lambda: current) if is_told else current, depth=2)
            found = []
            for step, batch in enumerate(loop):
                found.append(current(batch))
                found[-1].sum().backward()
                fxlib.push_gradients(current)
                if step == 3:
                    rewritten.training = current.training
                    current = rewritten
            assert left_nothing(world)
            return [each.detach() for each in found], world.snapshot(), loop

    expected, state, _ = outputs(ahead=False)
    found, servers, loop = outputs(ahead=True)
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(state[name], servers[name]) for name in state)
    assert loop.taken >= (10 if is_told else 4)


class Fixed(nn.Module):
    """Reads what no push writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync("ps0", simulation.count, args=(x,)) * self.weight


class Slow(Scripted):
    @override
    def WatchJob(self, request: Any, context: Any) -> Iterator[Any]:
        time.sleep(1.0)
        yield from super().WatchJob(request, context)


def submitted_under_a_pipeline(address: str) -> dict[str, Any]:
    """Train without pushes until the module was swapped; return at which step, and what was read ahead in vain."""
    module = fxlib.capture(Fixed())
    current: nn.Module = module
    given = batches(4)
    loop = fxlib.pipeline(list(itertools.chain(*itertools.repeat(given, 1000))), lambda: current)
    swapped_at, right = -1, True
    workload = fxlib.Workload.describe([(each,) for each in given], servers=[fxlib.Server(name="ps0")])
    always = mock.patch.object(MeasuredChoice, "step_ended")  # to read ahead, whatever that takes
    with simulated(5) as world, fxlib.connect(address, patience_s=60) as client, always:
        expected = [world.states["ps0"]["count"] + each.sin() for each in given]
        handle = client.submit(module, workload, group="world")
        for step, batch in enumerate(loop):
            before, current = current, handle.swap(current)
            swapped_at = step if current is not before else swapped_at
            right = right and torch.equal(current(batch).detach(), expected[step % 4])
            time.sleep(0.003)
            if 0 <= swapped_at < step - 10:
                break
    return {"step": swapped_at, "right": right, "taken": loop.taken, "unused": loop.unused}


def test_ranks_that_agree_on_a_swap_forget_nothing_that_was_read_ahead() -> None:
    service = Slow()
    service.adopt(wire.encode(fxlib.optimize(fxlib.capture(Fixed()))).graph.SerializeToString())
    with serving(service) as address:
        first, second = on_all_ranks(submitted_under_a_pipeline, address)
    assert first["step"] == second["step"] > 10
    for each in (first, second):
        assert each["right"]
        assert each["taken"] > each["step"] - 3
        assert each["unused"] <= 3  # two for the module that was swapped, one for the batch after the last


# Ranks.


def uneven(counts: tuple[int, ...], *, averaged: bool) -> dict[str, Any]:
    """Train on this rank's own number of batches; average gradients, if asked to, while other ranks still train."""
    module = captured()
    given = batches(counts[distributed.get_rank()])
    model: Any = nn.parallel.DistributedDataParallel(module) if averaged else module
    found = {}
    for name, loop in (("plain", given), ("ahead", fxlib.pipeline(given, model))):
        with torch.no_grad():
            module.weight.fill_(1.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with simulated(5), Join([model]) if averaged else nullcontext():
            for batch in loop:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
        found[name] = module.weight.detach().tolist()
    return {**found, "taken": loop.taken}  # type: ignore[union-attr]


@pytest.mark.parametrize("averaged", [True, False])
def test_ranks_with_different_numbers_of_batches_end_as_without_a_pipeline(averaged: bool) -> None:
    counts = (3, 6)
    for each, count in zip(on_all_ranks(partial(uneven, counts, averaged=averaged)), counts, strict=True):
        assert each["ahead"] == each["plain"]
        assert each["taken"] == (0 if averaged else count - 1)  # `Join` has a collective in front of each forward


# Loops that end early, and loops that begin anew.


def epochs(loop: Callable[[nn.Module], Iterable[Any]], *, of: Callable[[Any], torch.Tensor]) -> list[float]:
    """Train for three epochs, the second of which is left in the middle."""
    module = captured(rewritten=True)
    found = []
    with simulated(5) as world:
        for epoch in range(3):
            for place, batch in enumerate(loop(module)):
                output = module(of(batch))
                output.sum().backward()
                fxlib.push_gradients(module)
                found.append(float(output.detach().sum()))
                if (epoch, place) == (1, 1):
                    break
            gc.collect()
            assert left_nothing(world)
    return found


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_an_epoch_that_is_left_and_another_one_train_as_in_the_plain_loop(persistent_workers: bool) -> None:
    def loader() -> data.DataLoader[Any]:
        given = data.TensorDataset(torch.stack(batches(5)))
        return data.DataLoader(given, batch_size=None, num_workers=1, persistent_workers=persistent_workers)

    loops: list[Any] = []

    def ahead(module: nn.Module) -> Any:
        if not loops:
            loops.append(fxlib.pipeline(loader(), module, inputs=lambda batch: (batch[0],), depth=2))
        return loops[0]

    plain = loader()
    assert epochs(ahead, of=lambda batch: batch[0]) == epochs(lambda _: plain, of=lambda batch: batch[0])
    assert loops[0].taken > 0


def test_two_pipelines_on_one_module_by_turns_train_as_the_plain_loops_do() -> None:
    def outputs(*, ahead: bool) -> list[torch.Tensor]:
        module = captured(rewritten=True)
        loops: list[Any] = [batches(4), [each + 9 for each in batches(4)]]
        if ahead:
            loops = [fxlib.pipeline(each, module) for each in loops]
        found = []
        with simulated(5) as world:
            for batch in itertools.chain(*zip(*loops, strict=True)):
                found.append(module(batch))
                found[-1].sum().backward()
                fxlib.push_gradients(module)
            gc.collect()
            assert left_nothing(world)
        return [each.detach() for each in found]

    assert all(map(torch.equal, outputs(ahead=True), outputs(ahead=False)))


# Loaders with a state.


class _Samplers(ModuleType):
    """What a program that uses torchdata has loaded."""

    class BatchSampler(data.BatchSampler):
        pass

    class RandomSampler(data.RandomSampler):
        pass

    class StatefulDistributedSampler(data.DistributedSampler[Any]):
        pass


class Chosen(data.DataLoader[torch.Tensor]):
    """A loader that leaves batches out, by what the loop sets."""

    @override
    def __iter__(self) -> Any:
        return (batch for batch in super().__iter__() if len(batch))


class Backwards(data.Sampler[int]):
    """A sampler of the program's own."""


def loaders() -> dict[str, Callable[[], data.DataLoader[Any]]]:
    given, generator = batches(4), torch.Generator()

    def loader(kind: type[data.DataLoader[Any]] = data.DataLoader, **options: Any) -> Callable[[], Any]:
        return lambda: kind(given, num_workers=1, **options)  # type: ignore[arg-type]

    again = data.RandomSampler(given, replacement=True, generator=generator)
    longer = data.RandomSampler(given, num_samples=9, generator=generator)
    return {
        "its workers outlive the epoch": loader(persistent_workers=True),
        "a batch pulled in vain": lambda: data.DataLoader(  # its collation may draw
            data.TensorDataset(given[0]), num_workers=1, persistent_workers=True, collate_fn=torch.stack
        ),
        "Chosen": loader(Chosen),
        "Backwards": loader(batch_sampler=data.BatchSampler(Backwards(), 2, drop_last=False)),
        "again and again": loader(sampler=again),
        "draws again": loader(batch_sampler=data.BatchSampler(longer, 2, drop_last=False)),
    }


@pytest.mark.parametrize("told", loaders())
def test_a_loader_that_may_draw_or_look_at_the_loop_is_pulled_where_the_loop_pulls_it(told: str) -> None:
    assert told in fxlib.pipeline(loaders()[told](), nn.Identity()).why_not_ahead


@pytest.mark.slow
@pytest.mark.parametrize("draws_at", [{0, 1, 2, 3, 4, 5, 6, 7}, {5}, {7}])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_loop_that_draws_from_the_samplers_generator_draws_as_the_plain_loop(draws_at: set[int], depth: int) -> None:
    """The sampler draws once more at its end, which a loader's workers bring about some batches earlier."""

    def noisy(*, wrapped: bool) -> tuple[list[float], bytes]:
        generator = torch.Generator().manual_seed(3)
        given: Any = batches(8)
        loader = data.DataLoader(given, batch_size=1, shuffle=True, generator=generator, num_workers=1)
        loop: Any = fxlib.pipeline(loader, nn.Identity(), depth=depth) if wrapped else loader
        assert not wrapped or not loop.why_not_ahead
        noise = [float(torch.rand(1, generator=generator)) if at in draws_at else 0.0 for at, _ in enumerate(loop)]
        return noise, generator.get_state().numpy().tobytes()

    assert noisy(wrapped=True) == noisy(wrapped=False)


def test_the_samplers_of_a_stateful_loader_are_pulled_ahead() -> None:
    given = batches(4)

    def loader() -> data.DataLoader[Any]:
        sampler = _Samplers.BatchSampler(_Samplers.RandomSampler(given), 2, drop_last=False)
        return data.DataLoader(given, batch_sampler=sampler, num_workers=1)  # type: ignore[arg-type]

    assert "BatchSampler" in fxlib.pipeline(loader(), nn.Identity()).why_not_ahead
    with mock.patch.dict(sys.modules, {"torchdata.stateful_dataloader.sampler": _Samplers("")}):
        assert not fxlib.pipeline(loader(), nn.Identity()).why_not_ahead


def test_a_checkpoint_of_each_step_goes_on_with_the_next_batch() -> None:
    for depth, count in itertools.product((1, 3), range(5)):
        loop = fxlib.pipeline(Stateful(), captured(), ahead=True, depth=depth)
        seen = [float(each[0, 0]) for each in itertools.islice(loop, count)]
        resumed = fxlib.pipeline(Stateful(), captured(), ahead=True, depth=depth)
        with simulated(5):
            resumed.load_state_dict(loop.state_dict())
            assert seen + [float(each[0, 0]) for each in resumed] == [0.0, 1.0, 2.0, 3.0]


def test_one_batch_beyond_the_memory_is_pulled_at_most() -> None:
    module, of_one = captured(), batches()[0].nbytes
    for memory_bytes, pulled in ((None, 5), (1, 2), (of_one + 1, 3)):
        for made in (lambda x: x, lambda x: fxlib.Batch(inputs=(x,))):
            given = iter(list(map(made, batches(9))))
            next(iter(fxlib.pipeline(given, module, depth=4, memory_bytes=memory_bytes, ahead=True)))
            assert len(list(given)) == 9 - pulled
