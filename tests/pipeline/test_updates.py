"""Rows that pushes change are updated in the trainer as the server updates them, and not read again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import batch, ps
from fxlib.errors import ContractError, FxlibError, FxlibWarning
from fxlib.pipeline import by_keys, module_ahead
from fxlib.pipeline.by_keys import Rows
from fxlib.pipeline.choice import InTurn
from fxlib.pipeline.trainers import Trainers
from fxlib.pipeline.updates import Updates, origin_of
from fxlib.runtime import CapturedModule
from fxlib.spec.contract import contract_of
from fxlib.spec.servers import Server, Table
from tests.pipeline.test_by_keys import KEYS, begin, captured, check_same, entered, no_delay, plain, step, trained
from tests.random_programs import simulation
from tests.random_programs.simulation import simulated
from tests.random_programs.trainings import (
    HERE,
    look_up_known,
    look_up_momentum,
    moved,
    push_momentum,
)

__all__ = ["no_delay"]


def rewritten(function: Callable[..., torch.Tensor] = look_up_momentum) -> CapturedModule:
    found = fxlib.optimize(captured(function))
    assert isinstance(found, CapturedModule)
    return found


@pytest.fixture
def read_again() -> Iterator[list[int]]:
    """Collects how many rows are read again, message by message."""
    found: list[int] = []
    repair = Rows.to_read_again

    def noted(rows: Rows) -> Any:
        if len(rows.changed):
            found.append(len(rows.changed))
        return repair(rows)

    with mock.patch.object(Rows, "to_read_again", noted):
        yield found


@pytest.mark.slow
def test_steps_with_updates_are_the_plain_ones_bit_for_bit() -> None:
    with mock.patch.object(Rows, "updated", autospec=True, side_effect=Rows.updated) as updated:
        loop = check_same(KEYS * 4, look_up_momentum)
    assert loop.taken > 0
    assert updated.call_count > 20


@pytest.mark.slow
def test_a_comparison_of_all_ways_makes_updates_too() -> None:
    expected, state = plain(KEYS * 3, look_up_momentum)
    with mock.patch.object(Rows, "updated", autospec=True, side_effect=Rows.updated) as updated:
        module = rewritten()
        module.weight.grad = None
        with simulated(5) as world:
            loop = fxlib.pipeline(KEYS * 3, module)
            module_ahead.ahead_of(module).choose_by(InTurn)
            found = [step(module, keys) for keys in loop]
            servers = dict(world.states["ps0"])
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(state[name], servers[name]) for name in state)
    assert updated.call_count > 0


def test_changed_rows_cost_no_round_trip_from_the_second_push_on() -> None:
    module = rewritten()
    with entered() as sent:
        loop = iter(fxlib.pipeline([KEYS[0]] * 5, module))  # every row is changed by every push
        step(module, next(loop))
        assert sent.since()[-1] == "run_in_order"  # nobody knows the optimizer's state of the first batch
        step(module, next(loop))
        assert sent.since() == ["run", "run"]  # the third batch is read, and the second one's gradients are pushed
        step(module, next(loop))
        assert sent.since() == ["run", "run"]
        loop.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_pushes_that_are_left_in_flight_are_updated_for_what_is_read_beside_them() -> None:
    batches = KEYS * 3
    expected, state = plain(batches, look_up_momentum)
    for depth in (1, 2):
        found, servers, _ = trained(rewritten(), batches, defer_pushes=True, depth=depth)
        assert all(map(torch.equal, found, expected))
        assert all(torch.equal(state[name], servers[name]) for name in state)


def steps(
    module: CapturedModule, batches: Any, before_the_push: Callable[[int, torch.Tensor], object]
) -> list[torch.Tensor]:
    """Train, and do something between backward and push, with the number of the step and its keys."""
    found = []
    for place, keys in enumerate(batches):
        output = module(keys)
        found.append(output.detach().clone())
        output.sum().backward()
        before_the_push(place, keys)
        fxlib.push_gradients(module)
    return found


def same(before_the_push: Callable[[int, torch.Tensor], object], batches: list[torch.Tensor], **options: Any) -> bool:
    """Whether a pipeline trains as the plain loop does."""
    original, module = captured(look_up_momentum), rewritten()
    with simulated(5):
        expected = steps(original, [each.clone() for each in batches], before_the_push)
    with simulated(5):
        own = [each.clone() for each in batches]
        found = steps(module, fxlib.pipeline(own, module, **options), before_the_push)
    return all(map(torch.equal, found, expected))


@pytest.mark.slow
@pytest.mark.parametrize("defer_pushes", [False, True])
def test_a_write_of_the_loop_between_forward_and_push_has_rows_read_again(defer_pushes: bool) -> None:
    def own_push(place: int, keys: torch.Tensor) -> None:
        if place == 2:
            rpc.rpc_sync("ps0", push_momentum, args=("users", keys[:1], torch.ones(1, 4)))

    batches = [KEYS[0], KEYS[0], KEYS[0], torch.tensor([7, 8, 9]), KEYS[0], KEYS[0]]
    assert same(own_push, batches, defer_pushes=defer_pushes)
    with mock.patch.object(module_ahead, "meet", return_value=False):  # the rule is needed
        assert same(own_push, batches, defer_pushes=defer_pushes) is not defer_pushes


def test_keys_that_the_program_writes_to_before_its_push_are_those_of_its_push() -> None:
    assert same(lambda _, keys: keys.copy_(keys.flip(0) + 1), KEYS * 2)


class Returned(nn.Module):
    """Returns what it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        users = rpc.rpc_sync("ps0", look_up_momentum, args=("users", keys))
        return users, (users * self.weight).sum(-1)


def test_a_program_may_write_to_the_rows_that_it_was_given() -> None:
    def trained_on(module: Any, batches: Any) -> list[torch.Tensor]:
        found = []
        for keys in batches:
            rows, output = module(keys)
            found.append(output.detach())
            output.sum().backward()
            rows.data.zero_()
            fxlib.push_gradients(module)
        return found

    original, module = fxlib.capture(Returned()), fxlib.optimize(fxlib.capture(Returned()))
    batches = [KEYS[0].clone() for _ in range(5)]
    with simulated(5):
        expected = trained_on(original, batches)
    with simulated(5):
        assert all(map(torch.equal, trained_on(module, fxlib.pipeline(batches, module)), expected))
    with simulated(5), mock.patch.object(by_keys, "_copied", lambda tensor: tensor):  # the rule is needed
        assert not all(map(torch.equal, trained_on(module, fxlib.pipeline(batches, module)), expected))


@pytest.mark.slow
def test_a_trainer_that_computes_otherwise_reads_rows_again(read_again: list[int]) -> None:
    with mock.patch.object(by_keys, "numerics", return_value="another processor"):
        check_same(KEYS * 3, look_up_momentum)
    assert len(read_again) > 4


@pytest.mark.slow
def test_rows_are_read_without_their_state_from_where_a_server_cannot_tell_it(read_again: list[int]) -> None:
    with mock.patch.object(batch, "KnownRows", side_effect=ValueError("an older server")) as tried:
        check_same(KEYS * 3, look_up_momentum)
    assert 0 < tried.call_count <= 24  # of 48 reads, those of the first batches
    assert len(read_again) > 4


def fails(known: batch.KnownRows, table: str, keys: torch.Tensor, gradient: torch.Tensor) -> batch.KnownRows:
    raise ArithmeticError("no update")


def another_kind(known: batch.KnownRows, table: str, keys: torch.Tensor, gradient: torch.Tensor) -> batch.KnownRows:
    return replace(known, rows=known.rows.double())


@pytest.mark.slow
@pytest.mark.parametrize("update, told", [(fails, "no update"), (another_kind, "rows of another kind")])
def test_an_update_that_fails_is_told_of_and_rows_are_read_again(update: Any, told: str, read_again: list[int]) -> None:
    batches = [KEYS[0]] * 6
    expected, _ = plain(batches, look_up_momentum)
    resolve = fxlib.runtime.functions.resolve
    with (
        mock.patch(
            "fxlib.pipeline.updates.functions.resolve", lambda name: update if "moved" in name else resolve(name)
        ),
        pytest.warns(FxlibWarning, match=told),
    ):
        found, _, _ = trained(rewritten(), batches)
    assert all(map(torch.equal, found, expected))
    assert len(read_again) > 2


@pytest.mark.slow
def test_an_update_may_write_to_its_arguments_as_a_server_may() -> None:
    def writes(known: batch.KnownRows, table: str, keys: torch.Tensor, gradient: torch.Tensor) -> batch.KnownRows:
        found = moved(known, table, keys, gradient)
        keys.add_(1)
        gradient.mul_(0.5)
        return found

    resolve = fxlib.runtime.functions.resolve
    with mock.patch(
        "fxlib.pipeline.updates.functions.resolve", lambda name: writes if "moved" in name else resolve(name)
    ):
        check_same(KEYS * 3, look_up_momentum)


@pytest.mark.slow
def test_an_update_that_makes_other_rows_is_found_by_reading_some_of_them_again() -> None:
    def forgets(known: batch.KnownRows, *others: Any) -> batch.KnownRows:
        return replace(moved(known, *others), state=known.state)

    resolve = fxlib.runtime.functions.resolve
    with (
        mock.patch.object(module_ahead, "SAMPLED", 1),
        mock.patch(
            "fxlib.pipeline.updates.functions.resolve", lambda name: forgets if "moved" in name else resolve(name)
        ),
        pytest.raises(FxlibError, match="update= of it"),
    ):
        trained(rewritten(), [KEYS[0]] * 6)


@fxlib.remote(
    reads="keyed",
    part="table",
    keys="keys",
    concurrent=True,
    gradient=f"{__name__}:push_to_all",
    with_state=f"{HERE}:look_up_known",
)
def look_up_shared(table: str, keys: torch.Tensor) -> torch.Tensor:
    return look_up_momentum(table, keys)


@fxlib.remote(writes="keyed", keys="keys", update=f"{HERE}:moved")
def push_to_all(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    for each in ("users", "items"):
        push_momentum(each, keys, gradient)


@pytest.mark.slow
def test_what_a_push_to_no_part_makes_of_other_parts_is_not_known(read_again: list[int]) -> None:
    check_same(KEYS * 3, look_up_shared)
    assert len(read_again) > 4


def test_several_trainers_push_unseen_so_that_nothing_is_updated() -> None:
    with (
        mock.patch.object(Trainers, "are_several", True),
        mock.patch.object(Updates, "make") as make,
    ):
        check_same(KEYS * 2, look_up_momentum)
    assert make.call_count == 0


@pytest.mark.usefixtures("no_delay")
def test_a_server_that_keeps_its_update_passes() -> None:
    fxlib.check_keys(look_up_momentum, push_momentum, begin("users", torch.arange(3, 40, 5)))


@fxlib.remote(writes="keyed", part="table", keys="keys", update=f"{__name__}:moved_in_place")
def push_in_place(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    push_momentum(table, keys, gradient.mul_(0.5))
    keys.zero_()


@fxlib.remote(pure=True)
def moved_in_place(known: batch.KnownRows, table: str, keys: torch.Tensor, gradient: torch.Tensor) -> batch.KnownRows:
    return moved(known, table, keys, gradient.mul_(0.5))


@pytest.mark.usefixtures("no_delay")
def test_functions_that_write_to_their_arguments_pass() -> None:
    fxlib.check_keys(look_up_momentum, push_in_place, begin("users", torch.arange(3, 40, 5)))


@fxlib.remote(writes="keyed", part="table", keys="keys", update=f"{__name__}:moved_too_far")
def push_otherwise(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    push_momentum(table, keys, gradient)


@fxlib.remote(pure=True)
def moved_too_far(known: batch.KnownRows, table: str, keys: torch.Tensor, gradient: torch.Tensor) -> batch.KnownRows:
    found = moved(known, table, keys, gradient)
    return replace(found, rows=found.rows * (1 + 2**-23))


@fxlib.remote(writes="keyed", part="table", keys="keys", update=f"{__name__}:moved_without_momentum")
def push_without_momentum(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    push_momentum(table, keys, gradient)


@fxlib.remote(pure=True)
def moved_without_momentum(
    known: batch.KnownRows, table: str, keys: torch.Tensor, gradient: torch.Tensor
) -> batch.KnownRows:
    return replace(moved(known, table, keys, gradient), state=known.state)


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize(
    "push, told",
    [(push_otherwise, "moved_too_far makes other rows"), (push_without_momentum, "their state differs")],
)
def test_an_update_that_makes_other_rows_than_its_push_is_told_of(push: Any, told: str) -> None:
    with pytest.raises(ContractError, match=told):
        fxlib.check_keys(look_up_momentum, push, begin("users", torch.arange(3, 40, 5)))


@fxlib.remote(
    reads="keyed",
    part="table",
    keys="keys",
    concurrent=True,
    gradient=f"{__name__}:push_counted",
    with_state=f"{__name__}:look_up_counted_known",
)
def look_up_counted(table: str, keys: torch.Tensor) -> torch.Tensor:
    return look_up_momentum(table, keys)


@fxlib.remote(reads="keyed", part="table", keys="keys", concurrent=True)
def look_up_counted_known(table: str, keys: torch.Tensor) -> batch.KnownRows:
    return replace(look_up_known(table, keys), settings=(_pushes(table),))


@fxlib.remote(writes="keyed", part="table", keys="keys", update=f"{__name__}:moved_by_count")
def push_counted(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    push_momentum(table, keys, gradient / (1 + _pushes(table)))
    simulation._state()[f"pushes of {table}"] = torch.tensor(1 + _pushes(table))


@fxlib.remote(pure=True)
def moved_by_count(known: batch.KnownRows, table: str, keys: torch.Tensor, gradient: torch.Tensor) -> batch.KnownRows:
    (pushes,) = known.settings
    assert isinstance(pushes, int)
    return replace(moved(known, table, keys, gradient / (1 + pushes)), settings=(1 + pushes,))


def _pushes(table: str) -> int:
    return int(simulation._state().get(f"pushes of {table}", torch.tensor(0)))


@pytest.mark.usefixtures("no_delay")
def test_settings_that_pushes_change_are_told_of_and_rows_read_again() -> None:
    with pytest.raises(ContractError, match=r"push_counted changes settings of .*look_up_counted_known"):
        fxlib.check_keys(look_up_counted, push_counted, begin("users", torch.arange(3, 40, 5)))
    with pytest.warns(FxlibWarning, match="moved_by_count changes settings"):
        check_same(KEYS * 2, look_up_counted)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_the_librarys_own_server_is_updated_with_its_own_bits(optimizer: Any) -> None:
    def setup() -> tuple[Any, ...]:
        table = Table(name="clicks", rows=100, dim=7, optimizer=optimizer)
        ps.setup(Server(name="ps0", tables=(table,)), 0)
        return "clicks", torch.randperm(100, generator=torch.Generator().manual_seed(1))[:40]

    fxlib.check_keys(ps.lookup, ps.push, setup)
    setup()
    keys = torch.randint(100, (64,), dtype=torch.int32)
    known = ps.lookup_with_state("clicks", keys)
    for _ in range(3):
        gradient = torch.randn(64, 7)
        ps.push("clicks", keys, gradient)
        known = ps.updated(known, "clicks", keys, gradient)
    assert all(map(torch.equal, known.tensors, ps.lookup_with_state("clicks", keys).tensors))
    assert all(map(torch.equal, known.tensors, ps.lookup_many_with_state([(("clicks", keys), {})])[0].tensors))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"reads": "rows", "with_state": f"{HERE}:look_up_known"}, "with_state= applies to reads by keys"),
        ({"writes": "rows", "keys": "keys", "with_state": "a:b"}, "with_state= applies to reads by keys"),
        ({"reads": "rows", "keys": "keys", "update": f"{HERE}:moved"}, "update= applies to writes by keys"),
        ({"writes": "rows", "update": f"{HERE}:moved"}, "update= applies to writes by keys"),
        ({"writes": "rows", "keys": "keys", "update": "moved"}, "does not name a remote function"),
    ],
)
def test_a_contract_whose_update_makes_no_sense_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ContractError, match=told):
        fxlib.remote(**options)(lambda table, keys: table)


@fxlib.remote(reads=("keyed", "rate"), part="table", keys="keys")
def look_up_known_and_rate(table: str, keys: torch.Tensor) -> batch.KnownRows:
    return look_up_known(table, keys)


@pytest.mark.parametrize(
    "function, comes", [(f"{HERE}:look_up_known", True), (f"{__name__}:look_up_known_and_rate", False)]
)
def test_rows_do_not_come_with_a_state_of_which_a_write_would_go_unnoticed(function: str, comes: bool) -> None:
    contract = contract_of(look_up_momentum)
    assert contract is not None
    read = replace(contract, with_state=function)
    call: Any = (f"{HERE}:look_up_momentum", ("users", KEYS[0]), {})
    with mock.patch("fxlib.pipeline.updates._declares", return_value=True):
        assert (origin_of("ps0", call, read) is not None) is comes
