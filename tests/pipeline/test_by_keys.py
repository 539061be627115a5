"""Rows are read before the push that does not change them, and those that it changes again behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib import ps
from fxlib.analysis.effects.prologue import Way, calls_ahead
from fxlib.errors import ContractError, FxlibError, FxlibWarning
from fxlib.pipeline import request
from fxlib.pipeline.by_keys import KeysBroken, NotByKeys, Rows, conflicts
from fxlib.pipeline.module_ahead import ahead_of
from fxlib.runtime import CapturedModule, record
from fxlib.spec.contract import contract_of
from fxlib.spec.inputs import Batch
from fxlib.spec.report import WAYS
from fxlib.spec.servers import Server, Table
from tests.pipeline.clicks import Sent
from tests.random_programs import simulation
from tests.random_programs.simulation import simulated
from tests.random_programs.trainings import (
    HERE,
    look_up_bags,
    look_up_decayed,
    look_up_rows,
    push_and_decay,
    push_bags,
    push_rows,
)


class Users(nn.Module):
    """Looks up the rows of two tables on one server."""

    def __init__(self, function: Callable[..., torch.Tensor] = look_up_rows) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._function = function

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        users = rpc.rpc_sync("ps0", self._function, args=("users", keys))
        items = rpc.rpc_sync("ps0", self._function, args=("items", keys))
        return (users * items * self.weight).sum(-1)


def captured(function: Callable[..., torch.Tensor] = look_up_rows) -> CapturedModule:
    found = fxlib.capture(Users(function))
    assert isinstance(found, CapturedModule)
    return found


@contextmanager
def entered() -> Iterator[Sent]:
    with simulated(5) as world:
        yield Sent(world)


def step(module: nn.Module, keys: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = module(keys)
    output.sum().backward()
    fxlib.push_gradients(module)
    return output.detach()


def trained(module: CapturedModule, batches: list[torch.Tensor], **options: Any) -> tuple[list[torch.Tensor], Any, Any]:
    """Train under a pipeline; return outputs, the servers' state, and the pipeline."""
    module.weight.grad = None
    with simulated(5) as world:
        loop = fxlib.pipeline(batches, module, **options)
        return [step(module, keys) for keys in loop], dict(world.states["ps0"]), loop


def plain(batches: list[torch.Tensor], function: Callable[..., torch.Tensor] = look_up_rows) -> tuple[Any, Any]:
    module = captured(function)
    with simulated(5) as world:
        return [step(module, keys) for keys in batches], dict(world.states["ps0"])


def check_same(batches: list[torch.Tensor], function: Callable[..., torch.Tensor] = look_up_rows) -> Any:
    expected, state = plain(batches, function)
    for module in (captured(function), fxlib.optimize(captured(function))):
        assert isinstance(module, CapturedModule)
        found, servers, loop = trained(module, batches, depth=2)
        assert all(map(torch.equal, found, expected))
        assert state.keys() == servers.keys()
        assert all(torch.equal(state[name], servers[name]) for name in state)
    return loop


KEYS = [torch.tensor([1, 2, 3]), torch.tensor([3, 4, 5]), torch.tensor([6, 7, 6]), torch.tensor([1, 7, 3])]


def test_rows_leave_before_the_push_and_only_those_that_it_changes_come_again() -> None:
    module = captured()
    with entered() as sent:
        loop = iter(fxlib.pipeline(KEYS[:2], module))
        output = module(next(loop))
        assert sent.since() == ["look_up_rows"] * 4  # of the second batch, and of the first
        output.sum().backward()
        fxlib.push_gradients(module)
        names = sent.since()
        assert names[-2:] == ["run_in_order", "run_in_order"] or names.count("look_up_rows") == 2  # row 3 of each table
        module(next(loop))
        assert sent.since() == []
        loop.close()  # type: ignore[attr-defined]


def test_a_rewritten_module_reads_changed_rows_in_the_message_of_its_pushes() -> None:
    module = fxlib.optimize(captured())
    with entered() as sent:
        loop = iter(fxlib.pipeline(KEYS, module))
        step(module, next(loop))
        assert sent.since()[-1] == "run_in_order"
        module(next(loop))
        assert sent.since() == ["run"]  # of the third batch
        loop.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_steps_by_keys_are_the_plain_ones_bit_for_bit() -> None:
    loop = check_same(KEYS * 3)
    assert loop.taken > 0


@pytest.mark.slow
def test_bags_of_keys_are_read_again_where_any_of_their_keys_has_changed() -> None:
    check_same(
        [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 2], [6, 7]]), torch.tensor([[1, 7], [3, 4]])] * 2,
        look_up_bags,
    )


@pytest.mark.slow
def test_a_push_that_changes_all_rows_leaves_reads_behind_it() -> None:
    ways = [each.way for each in calls_ahead(captured(look_up_decayed))]
    assert ways == [Way.BEHIND_PUSH] * 2
    (first, _) = calls_ahead(captured(look_up_decayed))
    assert f"keys= on {HERE}:push_and_decay" in first.remedy
    check_same(KEYS * 2, look_up_decayed)


@pytest.mark.slow
@pytest.mark.parametrize("other", [torch.tensor([-1, 4, 5]), torch.tensor([3, 4, -5])], ids=["first", "last"])
def test_negative_keys_are_read_behind_the_push(other: torch.Tensor) -> None:
    """They name rows from the end, under other numbers."""
    check_same([torch.tensor([999, 996, 995]), other, torch.tensor([995, 999, 0]), other] * 2)


@pytest.mark.slow
def test_keys_of_another_dtype_are_the_same_keys() -> None:
    check_same([each.to(dtype) for each, dtype in zip(KEYS, (torch.int64, torch.int32) * 2, strict=True)] * 2)


def test_keys_that_are_no_integers_are_read_behind_the_push_and_fail_as_they_do() -> None:
    contract = contract_of(look_up_rows)
    assert contract is not None
    for keys in (torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor(3), [1, 2]):
        with pytest.raises(NotByKeys):
            Rows(frozenset(), [(("users", keys), {})], [contract])
    module = captured()
    with simulated(5), pytest.raises(Exception, match="used as indices must be") as told:
        step(module, torch.ones(3))
    with simulated(5):
        loop = iter(fxlib.pipeline([KEYS[0], torch.ones(3)], module))
        step(module, next(loop))
        keys = next(loop)
        with pytest.raises(Exception, match="used as indices must be") as again:
            step(module, keys)
        loop.close()  # type: ignore[attr-defined]
    assert type(told.value) is type(again.value)


@fxlib.remote(reads="keyed", part="table", keys="keys", concurrent=True, gradient=f"{__name__}:push_totals")
def look_up_totals(table: str, keys: torch.Tensor) -> torch.Tensor:
    return look_up_rows(table, keys).sum(0, keepdim=True)


@fxlib.remote(writes="keyed", part="table", keys="keys")
def push_totals(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    push_rows(table, keys, gradient.expand(len(keys), 4))


@pytest.mark.slow
def test_a_result_with_other_rows_than_its_keys_is_not_put_together_and_told_of() -> None:
    with pytest.warns(FxlibWarning, match="are not those of its keys"):
        check_same(KEYS * 3, look_up_totals)


@fxlib.remote(reads="keyed", part="table", keys="keys", concurrent=True, gradient=f"{HERE}:push_rows")
def look_up_columns(table: str, keys: torch.Tensor) -> torch.Tensor:
    return look_up_rows(table, keys).t().contiguous().t()


@pytest.mark.slow
def test_rows_that_lie_in_memory_column_by_column_are_not_put_together_and_told_of() -> None:
    with pytest.warns(FxlibWarning, match=r"lie in memory with the strides \[1, 3\]"):
        check_same(KEYS * 3, look_up_columns)


def test_a_default_device_is_for_the_programs_own_tensors() -> None:
    def on_another(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.device("meta"):
                return method(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in ("__init__", "pushed", "to_read_again"):
            stack.enter_context(mock.patch.object(Rows, name, on_another(getattr(Rows, name))))
        check_same(KEYS)


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_batch_that_many_pushes_come_before_is_read_anew(rewritten: bool) -> None:
    """Otherwise, what they changed would be kept for each of them."""
    far = torch.tensor([1, 2, 3, 4])
    expected, _ = plain([*KEYS * 3, far])
    module = cast("CapturedModule", fxlib.optimize(captured())) if rewritten else captured()
    repairs: list[int] = []
    with simulated(5), mock.patch.object(request, "MOST_REPAIRS", 3):
        assert fxlib.prefetch(module, far)
        (entry,) = ahead_of(module)._entries
        for keys, output in zip(KEYS * 3, expected, strict=False):
            assert torch.equal(step(module, keys), output)
            repairs += [each.rows.repairs for each in entry.requests if each is not None and each.rows is not None]
        assert torch.equal(step(module, far), expected[-1])
    assert max(repairs) == 3


def test_a_row_is_not_compared_once_another_push_may_have_changed_it() -> None:
    contract, keys = contract_of(look_up_rows), torch.tensor([1, 2, 3])
    assert contract is not None
    rows = Rows(frozenset(), [(("users", keys), {})], [contract])
    read, again = torch.zeros(3, 4), torch.ones(1, 4)
    for is_over in (False, True):
        rows.sample(1)
        repair, _ = rows.to_read_again() or (None, None)
        assert repair is not None
        rows.read_again(repair, lambda: [again])
        if is_over:
            rows.pushed([], sample=None)
            assert torch.equal(rows.merged([read])[0], torch.tensor([0.0, 1.0, 0.0]).repeat(4, 1).t())
        else:
            with pytest.raises(KeysBroken):
                rows.merged([read])
            rows.forget()


@fxlib.remote(reads="keyed", part="table", keys="keys", concurrent=True, gradient=f"{__name__}:push_and_decay_silently")
def look_up_betrayed(table: str, keys: torch.Tensor) -> torch.Tensor:
    return look_up_rows(table, keys)


@fxlib.remote(writes="keyed", part="table", keys="keys")
def push_and_decay_silently(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    push_and_decay(table, keys, gradient)


def test_a_push_that_changes_rows_which_it_does_not_name_is_found_by_reading_some_of_them_again() -> None:
    module = captured(look_up_betrayed)
    with simulated(5):
        loop = iter(fxlib.pipeline([KEYS[0], torch.tensor([7, 8, 9]), *KEYS], module))
        step(module, next(loop))
        keys = next(loop)
        with pytest.raises(FxlibError, match=r"a row of .*look_up_betrayed has changed that no push was to change"):
            module(keys)
        step(module, keys)  # from here on behind the push
        loop.close()  # type: ignore[attr-defined]


def test_a_write_of_the_loop_has_all_rows_read_by_the_forward() -> None:
    module = captured()
    with entered() as sent:
        loop = iter(fxlib.pipeline(KEYS[:2], module))
        step(module, next(loop))
        keys = next(loop)
        rpc.rpc_sync("ps0", push_rows, args=("users", keys[:1], torch.ones(1, 4)))
        sent.since()
        module(keys)
        assert sent.since() == ["look_up_rows"] * 2
        loop.close()  # type: ignore[attr-defined]


@fxlib.remote(reads="keyed", part="table", keys="keys", gradient=f"{HERE}:push_rows")
def look_up_in_turn(table: str, keys: torch.Tensor) -> torch.Tensor:
    return look_up_rows(table, keys)


def test_reads_that_may_not_run_beside_pushes_have_come_before_these_are_sent() -> None:
    in_flight: list[int] = []
    module = captured(look_up_in_turn)
    with simulated(5) as world:
        send = rpc.api._invoke_rpc

        def noted(to: str, function: Any, *args: Any, **kwargs: Any) -> Any:
            if function is push_rows:
                in_flight.append(sum(not each.landed for each in world._flying))
            return send(to, function, *args, **kwargs)

        with mock.patch.object(rpc.api, "_invoke_rpc", noted):
            for keys in fxlib.pipeline(KEYS, module):
                step(module, keys)
    assert in_flight == [0] * 8


def test_nor_are_they_in_flight_beside_a_write_of_the_loop() -> None:
    beside: list[int] = []
    module = captured(look_up_in_turn)
    with simulated(5) as world:
        send = rpc.api._invoke_rpc

        def noted(to: str, function: Any, *args: Any, **kwargs: Any) -> Any:
            if function is push_rows:
                beside.append(sum(not each.landed for each in world._flying if each.function is look_up_in_turn))
            return send(to, function, *args, **kwargs)

        with mock.patch.object(rpc.api, "_invoke_rpc", noted):
            for keys in fxlib.pipeline(KEYS, module):
                rpc.rpc_sync("ps0", push_rows, args=("users", keys, torch.zeros(len(keys), 4)))
                step(module, keys)
    assert beside
    assert not any(beside)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"reads": "rows", "keys": "no name"}, "is not a name"),
        ({"reads": "rows", "keys": "others"}, "keys='others' does not name an argument of the function"),
        ({"pure": True, "keys": "keys"}, "keys= applies to rows of a state"),
        ({"writes": "rows", "keys": "keys", "concurrent": True}, "concurrent= applies to reads by keys"),
        ({"reads": "rows", "concurrent": True}, "concurrent= applies to reads by keys"),
    ],
)
def test_a_contract_whose_keys_make_no_sense_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ContractError, match=told):
        fxlib.remote(**options)(lambda table, keys: table)


def begin(*args: Any) -> Callable[[], tuple[Any, ...]]:
    def setup() -> tuple[Any, ...]:
        simulation._OWN.clear()
        simulation._OWN.update(simulation.first_state("ps0"))
        return args

    return setup


@pytest.fixture
def no_delay() -> Iterator[None]:
    with mock.patch("tests.random_programs.simulation.time.sleep"):
        yield
    simulation._OWN.clear()


@pytest.mark.usefixtures("no_delay")
def test_functions_that_keep_their_keys_pass() -> None:
    fxlib.check_keys(look_up_rows, push_rows, begin("users", torch.arange(3, 40, 5)))
    fxlib.check_keys(look_up_bags, push_bags, begin("users", torch.arange(12).view(6, 2)))


def test_the_librarys_own_server_keeps_its_keys() -> None:
    def setup() -> tuple[Any, ...]:
        ps.setup(Server(name="ps0", tables=(Table(name="clicks", rows=100, dim=4, optimizer="adagrad"),)), 0)
        return "clicks", torch.randperm(100, generator=torch.Generator().manual_seed(1))[:40]

    fxlib.check_keys(ps.lookup, ps.push, setup)


@fxlib.remote(reads="keyed", keys="keys")
def look_up_and_draw(table: str, keys: torch.Tensor) -> torch.Tensor:
    own = simulation._OWN.setdefault(table, torch.zeros(1000, 4))
    for key in keys.tolist():
        if not own[key].any():
            own[key] = float(own.count_nonzero()) + 1
    return own[keys]


@fxlib.remote(reads="keyed", keys="keys")
def look_up_centred(table: str, keys: torch.Tensor) -> torch.Tensor:
    found = look_up_rows(table, keys)
    return found - found.mean(0)


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize(
    "read, push, told",
    [
        (look_up_rows, push_and_decay_silently, "push_and_decay_silently changes rows of other keys"),
        (look_up_and_draw, push_rows, "look_up_and_draw depends on more than its keys"),
        (look_up_centred, push_rows, "look_up_centred depends on more than its keys"),
        (look_up_totals, push_totals, r"keys bring \[1, 4\]"),
        (look_up_rows, push_and_decay, "declares no keys"),
        (simulation.count, push_rows, "declares no keys"),
    ],
)
def test_functions_that_do_not_keep_their_keys_are_told_of(read: Any, push: Any, told: str) -> None:
    with pytest.raises(ContractError, match=told):
        fxlib.check_keys(read, push, begin("users", torch.arange(3, 40, 5)))


@pytest.mark.usefixtures("no_delay")
@pytest.mark.parametrize("keys", [torch.ones(4), torch.tensor([1, 1, 2, 3]), torch.tensor([1, 2])])
def test_a_setup_that_shows_too_little_is_refused(keys: torch.Tensor) -> None:
    with pytest.raises(ContractError, match="keys"):
        fxlib.check_keys(look_up_rows, push_rows, begin("users", keys))


def test_how_often_keys_come_again_is_told_by_call_and_part_of_the_state() -> None:
    batches = [Batch(inputs=(torch.tensor(keys),)) for keys in ([0, 1, 2, 3], [3, 2, 4, 5], [6, 7, 8, 9])]
    alone, deeper, only = (
        conflicts(captured(), each, depth=depth) for each, depth in ((batches, 1), (batches, 2), (batches[:1], 1))
    )
    assert list(alone.values()) == pytest.approx([0.5 / 3] * 2)
    assert list(deeper.values()) == pytest.approx([1.0 / 3] * 2)
    assert list(only.values()) == [1.0] * 2


def test_a_recording_of_several_steps_shows_what_is_in_flight_for_a_later_one_and_in_which_way() -> None:
    module, batches = captured(), [torch.tensor([place, place + 1]) for place in range(4)]
    with simulated(5), record() as recording:
        ends = []
        for keys in fxlib.pipeline(batches, module):
            step(module, keys)
            ends.append(recording.now_s)
    found = recording.timeline.between(ends[1], ends[3], steps=2)
    ahead = [each for each in found.spans if each.kind in WAYS]
    assert {(each.kind, each.name) for each in ahead} == {
        ("by_keys", "look_up_rows"),
        ("by_keys", "look_up_rows_1"),
        ("behind_push", "look_up_rows"),  # one of two rows, again
        ("behind_push", "look_up_rows_1"),
    }
    assert all(each.to == "ps0" and 0.0 <= each.start_s <= each.end_s <= 2 * found.step_s + 1e-9 for each in ahead)
    assert len([each for each in found.spans if each.kind == "push"]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("function", [look_up_rows, look_up_bags])
def test_a_read_beside_pushes_that_are_left_in_flight_has_their_rows_again(
    function: Callable[..., torch.Tensor],
) -> None:
    """The batch after the next is read while the pushes of this one, which change all of its rows, are on their way."""
    first, second = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 5]])
    batches = [each if function is look_up_bags else each.reshape(-1) for each in (first, second) * 3]
    expected, state = plain(batches, function)
    for seed in range(6):
        module = fxlib.optimize(captured(function))
        assert isinstance(module, CapturedModule)
        module.weight.grad = None
        with simulated(seed) as world:
            found = [step(module, keys) for keys in fxlib.pipeline(batches, module, defer_pushes=True)]
            servers = dict(world.states["ps0"])
        assert all(map(torch.equal, found, expected))
        assert all(torch.equal(state[name], servers[name]) for name in state)
