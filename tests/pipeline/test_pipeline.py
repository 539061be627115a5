"""A loop makes the calls of its next batch earlier, as far as that changes no result, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import gc
import signal
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.analysis.effects.resources import ServerState
from fxlib.errors import FxlibError, FxlibWarning
from fxlib.pipeline import watch
from fxlib.pipeline.module_ahead import MOST_AHEAD, MOST_IN_VAIN, ahead_of, captured_in
from fxlib.pipeline.request import Request
from fxlib.reasons import Reason
from fxlib.runtime import CapturedModule, functions
from fxlib.runtime.graph_set import GuardFailure
from fxlib.spec.contract import Contract
from tests.pipeline.clicks import Clicks, Sent, batches, run, train
from tests.random_programs import simulation
from tests.random_programs.simulation import World, simulated
from tests.random_programs.trainings import push_table


def interrupted(batch: torch.Tensor) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_what_another_tool_puts_over_the_watch_stays_and_the_next_pipeline_watches_again(
    module: CapturedModule,
) -> None:
    api: Any = rpc.api
    with simulated(5):
        loop = iter(fxlib.pipeline(batches(3), module))
        next(loop)
        api._invoke_rpc = others = functools.partial(api._invoke_rpc)
        del loop
        gc.collect()
        assert api._invoke_rpc is others
        assert not watch.WATCH.is_watching
        loop = iter(fxlib.pipeline(batches(3), module))
        train(module, next(loop))
        assert api._invoke_rpc is not others
        del loop
        gc.collect()
        assert api._invoke_rpc is others
        api._invoke_rpc, kept = others.func, weakref.ref(others)
        del others
        gc.collect()
        assert kept() is None


def test_what_nobody_writes_is_read_before_the_step_and_the_rest_behind_the_push(
    sent: Sent, module: CapturedModule
) -> None:
    loop = iter(fxlib.pipeline(batches(3), module))
    first = next(loop)
    assert sent.since() == ["count"]  # of the second batch
    module(first).sum().backward()
    assert sent.since() == ["count", "look_up_table"]
    fxlib.push_gradients(module)
    assert sent.since() == ["push_table", "look_up_table"]
    second = next(loop)
    assert sent.since() == ["count"]  # of the third
    module(second)
    assert sent.since() == []


def test_a_rewritten_module_sends_the_next_reads_in_the_message_of_its_pushes(
    sent: Sent, module: CapturedModule
) -> None:
    rewritten = fxlib.optimize(module)
    loop = iter(fxlib.pipeline(batches(3), rewritten))
    train(rewritten, next(loop))
    assert sent.since()[-1] == "run_in_order"
    rewritten(next(loop))
    assert "look_up_table" not in sent.since()


def test_guards_are_checked_once_for_each_step_whose_graph_is_the_one_before(
    sent: Sent, module: CapturedModule
) -> None:
    check = CapturedModule._guard_failure
    with mock.patch.object(CapturedModule, "_guard_failure", autospec=True, side_effect=check) as checked:
        run(fxlib.pipeline(batches(6), module), lambda batch: train(module, batch))
    assert checked.call_count == 6 + 1  # of the second batch, before any graph has run


def test_nothing_is_fetched_for_steps_in_which_the_original_runs(sent: Sent, module: CapturedModule) -> None:
    loop = iter(fxlib.pipeline(batches(6), module))
    train(module, next(loop))
    train(module, next(loop))
    broken = GuardFailure(Reason.OPAQUE_NEIGHBOUR.sentence())
    with mock.patch.object(CapturedModule, "_guard_failure", return_value=broken):
        module(next(loop))
        following = next(loop)
        sent.since()
        module(following)
        assert sent.since() == ["count", "look_up_table"]  # by the original
        next(loop)
        assert sent.since() == []


def test_nothing_is_fetched_for_an_evaluation_in_another_grad_mode_for_which_there_is_no_graph(
    sent: Sent, module: CapturedModule
) -> None:
    run(fxlib.pipeline(batches(6), module), lambda batch: train(module, batch))
    check = CapturedModule._guard_failure

    def fails_without_gradients(self: CapturedModule, *args: Any, grad_enabled: bool) -> GuardFailure | None:
        return check(self, *args, grad_enabled=True) if grad_enabled else GuardFailure("grad mode is another one")

    loop = fxlib.pipeline(batches(20), module)
    with mock.patch.object(CapturedModule, "_guard_failure", fails_without_gradients):
        for batch in loop:
            with torch.no_grad():
                module(batch)
    assert loop.taken == 0
    assert loop.unused <= 4  # of the first batches


def test_each_of_several_batches_with_the_same_tensors_has_what_was_read_for_it(
    sent: Sent, module: CapturedModule
) -> None:
    steps = iter(fxlib.pipeline([torch.ones(2, 4)] * 4, module))
    train(module, next(steps))
    for _ in range(2):
        sent.since()
        following = next(steps)
        assert sent.since() == ["count"]  # of the batch after it
        module(following).sum().backward()
        assert sent.since() == []  # not the read that has just left
        fxlib.push_gradients(module)
    assert sent.since() == ["push_table", "look_up_table"]


def test_deeper_pipelines_read_further_ahead_within_their_memory(sent: Sent, module: CapturedModule) -> None:
    next(iter(fxlib.pipeline(batches(), module, depth=3)))
    assert sent.since().count("count") == 3
    next(iter(fxlib.pipeline(batches(), module, depth=3, memory_bytes=64)))
    assert sent.since().count("count") == 1
    next(iter(fxlib.pipeline(batches(), module, depth=3, memory_bytes=1)))
    assert sent.since().count("count") == 0


def test_other_tensors_are_looked_up_and_told_of_once(sent: Sent, module: CapturedModule) -> None:
    with pytest.warns(FxlibWarning, match="other tensors") as told:
        run(fxlib.pipeline(batches(), module), lambda batch: module(batch + 1))
    assert len(told) == 1


def test_a_changed_batch_is_looked_up_as_it_is(sent: Sent, module: CapturedModule) -> None:
    with pytest.warns(FxlibWarning, match="changed"):
        found = run(fxlib.pipeline(batches(), module), lambda batch: module(batch.mul_(2)))
    assert all(map(torch.equal, found, run(batches(), lambda batch: module(batch.mul_(2)))))


def test_a_batch_that_is_changed_behind_torch_s_back_is_looked_up_as_it_is(sent: Sent, module: CapturedModule) -> None:
    def changed(batch: torch.Tensor) -> torch.Tensor:
        version = batch._version
        batch.numpy()[:] *= 2
        batch.data.add_(1)
        assert batch._version == version
        return batch

    with pytest.warns(FxlibWarning, match="changed"):
        found = run(fxlib.pipeline(batches(), module), lambda batch: module(changed(batch)))
    assert all(map(torch.equal, found, run(batches(), lambda batch: module(changed(batch)))))


def test_an_evaluation_in_the_middle_and_a_second_pipeline_do_what_they_do_alone(
    sent: Sent, module: CapturedModule
) -> None:
    expected = [train(module, batch) for batch in batches()]
    sent.world.states["ps1"] = simulation.first_state("ps1")
    module.weight.grad = None
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in fxlib.pipeline(batches(), module):
            for other in fxlib.pipeline(batches(2), module):
                module(other)
            found.append(train(module, batch))
    assert all(map(torch.equal, found, expected))


def test_without_pushes_all_reads_of_later_steps_run_ahead(sent: Sent, module: CapturedModule) -> None:
    loop = fxlib.pipeline(batches(5), module)
    for batch in loop:
        module(batch)
    assert loop.taken == 4 + 3  # both calls, once the loop has shown that it does not push
    assert loop.unused == 0


def test_reads_that_the_loop_itself_writes_over_are_soon_left_to_the_forward(
    sent: Sent, module: CapturedModule
) -> None:
    loop = fxlib.pipeline(batches(6), module)
    for batch in loop:
        module(batch)
        rpc.rpc_sync("ps1", push_table, args=(batch, torch.ones(2, 4)))  # in place of fxlib.push_gradients
    assert loop.unused == MOST_IN_VAIN
    assert loop.taken == 5


def test_reads_stay_behind_the_push_of_micro_batches(sent: Sent, module: CapturedModule) -> None:
    loop = fxlib.pipeline(batches(12), module)
    for place, batch in enumerate(loop):
        module(batch).sum().backward()
        if place % 3 == 2:
            fxlib.push_gradients(module)
    first_push = 1  # what was read in vain before the loop had shown how it pushes
    assert loop.unused <= first_push
    assert loop.taken >= 2 * 11 - 3


def test_under_distributed_autograd_nothing_is_taken_and_after_the_first_step_nothing_is_read_ahead(
    sent: Sent, module: CapturedModule
) -> None:
    loop = fxlib.pipeline(batches(), module)
    with (
        mock.patch("fxlib.batch.in_autograd_context", return_value=True),
        pytest.warns(FxlibWarning, match="distributed autograd"),
    ):
        run(loop, module)
    assert loop.taken == 0
    assert sent.since().count("count") == 4 + 2  # each step's own, and those for the second step and the third


def test_the_ends_of_a_loop_leave_nothing_fetched(sent: Sent, module: CapturedModule) -> None:
    for batch in fxlib.pipeline(batches(), module):
        module(batch)
        break
    assert not watch.WATCH.is_watching
    with pytest.raises(KeyboardInterrupt):
        run(fxlib.pipeline(batches(), module), interrupted)
    assert not watch.WATCH.is_watching
    assert all(each.landed for each in sent.world._flying)


def interrupt(*args: Any, **options: Any) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("name", ["make", "begin_spans"])
@pytest.mark.parametrize("prefetches", [False, True])
def test_an_interrupt_while_reads_are_sent_leaves_nothing_fetched(
    sent: Sent, module: CapturedModule, name: str, prefetches: bool
) -> None:
    with mock.patch.object(Request, name, interrupt), pytest.raises(KeyboardInterrupt):
        _ = fxlib.prefetch(module, batches()[0]) if prefetches else next(iter(fxlib.pipeline(batches(), module)))
    assert not ahead_of(module)._entries
    assert not watch.WATCH.is_watching


def test_an_interrupt_while_a_loop_begins_leaves_it_closed(sent: Sent, module: CapturedModule) -> None:
    add = watch.Watch.add

    def interrupted_add(listeners: watch.Watch, *args: Any) -> None:
        interrupt()
        add(listeners, *args)

    with mock.patch.object(watch.Watch, "add", interrupted_add), pytest.raises(KeyboardInterrupt):
        next(iter(fxlib.pipeline(batches(), module)))
    assert ahead_of(module)._loops == 0
    assert not watch.WATCH.is_watching


def test_a_failing_push_is_raised_where_it_is_made_and_nothing_that_was_fetched_is_used(
    sent: Sent, module: CapturedModule
) -> None:
    rewritten = fxlib.optimize(module)
    loop = iter(fxlib.pipeline(batches(), rewritten))
    rewritten(next(loop)).sum().backward()
    del sent.world.states["ps1"]["table"]
    with pytest.raises(Exception, match="table"):
        fxlib.push_gradients(rewritten)
    sent.world.states["ps1"] = simulation.first_state("ps1")
    batch = next(loop)
    sent.since()
    expected = sent.world.states["ps0"]["count"] + batch.sin() + look_up_of(sent.world, batch)
    assert torch.equal(rewritten(batch), expected)


def look_up_of(world: World, batch: torch.Tensor) -> torch.Tensor:
    return world.states["ps1"]["table"] * 0.5 + batch * 0.25


def test_a_prefetch_of_ones_own_is_taken_once(sent: Sent, module: CapturedModule) -> None:
    (batch,) = batches(1)
    assert fxlib.prefetch(module, batch)
    sent.since()
    module(batch)
    assert sent.since() == ["look_up_table"]
    module(batch)
    assert sent.since() == ["count", "look_up_table"]


def test_a_module_that_was_not_captured_prefetches_nothing(sent: Sent) -> None:
    assert not fxlib.prefetch(Clicks(), torch.ones(2, 4))
    assert captured_in(Clicks()) is None
    assert sent.since() == []


def test_a_write_of_the_loop_has_the_row_read_again(sent: Sent, module: CapturedModule) -> None:
    (batch,) = batches(1)
    module(batch)  # a forward without a push: the next reads need not wait for one
    fxlib.prefetch(module, batch)
    sent.since()
    rpc.rpc_sync("ps1", push_table, args=(batch, torch.ones(2, 4)))
    expected = sent.world.states["ps0"]["count"] + batch.sin() + look_up_of(sent.world, batch)
    assert torch.equal(module(batch), expected)
    assert sent.since() == ["push_table", "look_up_table"]


@pytest.mark.parametrize("depth", [0, -1])
def test_a_depth_of_nothing_is_refused(module: CapturedModule, depth: int) -> None:
    with pytest.raises(FxlibError, match=f"depth={depth}"):
        fxlib.pipeline(batches(), module, depth=depth)


def test_a_module_that_is_none_is_refused() -> None:
    with pytest.raises(FxlibError, match="str is no module"):
        fxlib.pipeline(batches(), "module")  # type: ignore[arg-type]


def test_what_no_forward_takes_is_not_kept(sent: Sent, module: CapturedModule) -> None:
    def step(batch: torch.Tensor) -> int:
        module(batch.clone())
        sent.world.drain()
        return len(ahead_of(module)._forgotten)

    with pytest.warns(FxlibWarning, match="other tensors"):
        kept = run(fxlib.pipeline(batches(8), module), step)
    assert max(kept) <= 2


def test_a_pipeline_as_deep_as_what_is_kept_takes_what_was_fetched(sent: Sent, module: CapturedModule) -> None:
    loop = fxlib.pipeline(batches(MOST_AHEAD + 8), module, depth=MOST_AHEAD)
    run(loop, module)
    assert loop.taken > MOST_AHEAD
    assert loop.unused == 0


class Offset(nn.Module):
    """Looks up what depends on a buffer, too, and what depends on constants alone."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.all = nn.Buffer(torch.ones(2, 4)), nn.Buffer(torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = rpc.rpc_sync("ps0", simulation.count, args=(x + self.offset,))
        return found + rpc.rpc_sync("ps0", simulation.count, args=(self.all,))


@pytest.mark.filterwarnings("error::fxlib.errors.FxlibWarning")
def test_a_forward_is_known_by_its_inputs_and_not_by_buffers() -> None:
    module = fxlib.capture(Offset())
    with simulated(5):
        loop = fxlib.pipeline(batches(3), module)
        for batch in loop:
            module(torch.zeros(2, 4))  # of no batch of the loop
            module(batch)
    assert loop.taken == 2 * 2


@pytest.mark.filterwarnings("error::fxlib.errors.FxlibWarning")
def test_what_depends_on_constants_alone_is_taken_by_any_forward() -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + rpc.rpc_sync("ps0", simulation.pure, args=(torch.ones(2, 4),))

    module = fxlib.capture(Constant())
    with simulated(5):
        loop = fxlib.pipeline(batches(3), module)
        found = run(loop, module)
        assert all(torch.equal(each, Constant()(x)) for each, x in zip(found, batches(3), strict=True))
    assert loop.taken == 2


def test_a_write_of_the_loop_that_is_in_flight_when_another_loop_begins_is_known_to_that(
    sent: Sent, module: CapturedModule
) -> None:
    with mock.patch.object(sent.world, "stir"):  # nothing is answered before somebody waits for it
        for batch in fxlib.pipeline(batches(1), module):
            module(batch)
            write: Any = rpc.rpc_async("ps0", simulation.add, args=(torch.ones(2, 4),))
        loop = iter(fxlib.pipeline(batches(2), module))
        sent.since()
        next(loop)
        assert not write.landed
        assert "count" not in sent.since()
        write.wait()
    del loop


def test_a_copy_of_a_module_has_nothing_fetched(sent: Sent, module: CapturedModule) -> None:
    loop = iter(fxlib.pipeline(batches(), module))
    next(loop)
    assert ahead_of(module).result_bytes == 0
    assert copy.deepcopy(module)._fxlib.ahead is None


def test_a_function_that_another_graph_says_writes_is_no_longer_taken_for_one_that_reads(
    sent: Sent, module: CapturedModule
) -> None:
    told: list[frozenset[ServerState]] = []
    listener, own = mock.Mock(written=told.append), watch.Watch()
    name = functions.name_of(simulation.count)
    for contract, writes in ((Contract(reads=frozenset({"x"})), 0), (Contract(writes=frozenset({"x"})), 1)):
        own.add(listener, {name: contract})
        for _ in range(2):
            rpc.rpc_sync("ps0", simulation.count, args=(torch.ones(1),))
        assert len(told) == 2 * writes
    own.remove(listener)


def test_what_was_fetched_for_a_forward_is_watched_until_this_very_forward_ends(
    sent: Sent, module: CapturedModule
) -> None:
    """Here a forward of another thread begins and ends meanwhile."""
    _, batch, *_ = given = batches(3)
    loop = iter(fxlib.pipeline(given, module))
    module(next(loop))
    assert next(loop) is batch
    ahead, take = ahead_of(module), Request.take
    entry = next(each for each in ahead._entries if each.is_due)
    kept: list[bool] = []

    def interrupted(request: Request) -> Any:
        with mock.patch.object(Request, "take", take), ThreadPoolExecutor(1) as threads:
            threads.submit(module, batch + 1).result()
        kept.append(entry in ahead._kept())
        return take(request)

    with mock.patch.object(Request, "take", interrupted):
        output = module(batch)
    assert kept == [True]
    assert entry not in ahead._kept()
    assert torch.equal(output, module(batch.clone()))
    loop.close()  # type: ignore[attr-defined]
