"""A server that replays, in this process: what calls get, what stands in for functions, what it remembers of writes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxlib import batch
from fxlib.errors import WorkloadError
from fxlib.profiling.single_call import message_bytes
from fxlib.spec.contract import PURE, Contract, contract_of
from fxlib.spec.profile import Opaque, Result, ServerProfile, Spread, TensorShape
from fxlib_workers.trial.replay import server as replay_server
from fxlib_workers.trial.replay.latency_model import LatencyModel
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan
from fxlib_workers.trial.replay.server import ReplayedBatch, ReplayedFunction, ReplayedObject, WriteHistory

READ, WRITE, UNKNOWN = "job.ps:lookup", "job.ps:push", "job.ps:anything"
CALL_S = 0.02
Sent = tuple[tuple[Any, ...], dict[str, Any]]
SMALL = TensorShape(shape=(2,), dtype=torch.float32)
LARGE = TensorShape(shape=(64,), dtype=torch.float32)
TABLES = Contract(reads=frozenset({"tables"}))
WRITES = Contract(writes=frozenset({"tables"}))
DENSE = Contract(writes=frozenset({"dense"}))
ADDS = Contract(writes=frozenset({"tables"}), commutes=True)
A, B = b"a" * 16, b"b" * 16


def line(returns: Result, seconds: float = 0.0, request_bytes: int = 0) -> RecordedCall:
    return RecordedCall(
        to="ps0",
        returns=returns,
        service_s=Spread(quantiles=(seconds,)),
        request_bytes=request_bytes,
        response_bytes=0,
    )


def plan(*, seconds: float = 0.0, per_item_s: float | None = None) -> ReplayPlan:
    return ReplayPlan(
        calls={
            READ: {
                "small": line(SMALL, seconds, message_bytes(torch.zeros(1))),
                "large": line(LARGE, seconds, message_bytes(torch.zeros(64))),
            },
            WRITE: {"small": line(Opaque())},
            UNKNOWN: {"anything": line(SMALL)},
            ".forward": {"forward": line(SMALL)},
        },
        functions=frozenset({READ, WRITE, UNKNOWN}),
        contracts={READ: Contract(reads=frozenset({"tables"})), WRITE: Contract(writes=frozenset({"tables"}))},
        servers={
            "ps0": ServerProfile(name="ps0", round_trip_s=0.0, concurrency=16, bytes_per_s=1e12, per_item_s=per_item_s)
        },
    )


@pytest.fixture(autouse=True)
def replaying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_server, "_server", None)
    replay_server.start(plan(), "ps0")


def test_a_reply_is_decided_by_function_arguments_and_earlier_writes() -> None:
    read = ReplayedFunction(READ, "small")
    first = read("t", torch.tensor([1]))
    assert torch.equal(first, read("t", torch.tensor([1])))
    assert not torch.equal(first, read("t", torch.tensor([2])))
    assert not torch.equal(first, read("u", torch.tensor([1])))
    assert not torch.equal(first, ReplayedFunction(UNKNOWN, "anything")("t", torch.tensor([1])))


def test_a_read_after_a_write_is_another_one() -> None:
    read = ReplayedFunction(READ, "small")
    first = read("t", torch.tensor([1]))
    assert ReplayedFunction(WRITE, "small")("t", torch.ones(2)) is None
    assert not torch.equal(first, read("t", torch.tensor([1])))


def test_the_same_call_of_the_program_twice_is_the_same_reply_whatever_it_is_called() -> None:
    replay_server.start(
        ReplayPlan(calls={READ: {"one": line(SMALL), "two": line(SMALL)}}, functions=frozenset({READ})), "ps0"
    )
    assert not torch.equal(
        ReplayedFunction(READ, "one")(1), ReplayedFunction(READ, "two")(1)
    )  # no contract: the first may write
    replay_server.start(
        ReplayPlan(calls={READ: {"one": line(SMALL), "two": line(SMALL)}}, contracts={READ: Contract(pure=True)}), "ps0"
    )
    assert torch.equal(ReplayedFunction(READ, "one")(1), ReplayedFunction(READ, "two")(1))


def test_a_write_is_there_when_it_is_over_and_not_before() -> None:
    made = replay_server.ReplayServer(
        ReplayPlan(
            calls={WRITE: {"slow": line(Opaque(), CALL_S)}}, contracts={WRITE: Contract(writes=frozenset({"tables"}))}
        ),
        "ps0",
    )
    begun, seen = made.digest(), []

    class Watching(LatencyModel):
        def serve(self, *args: object, **kwargs: object) -> None:
            seen.append(made.digest())

    made.latency = Watching(replay_server.UNMEASURED, 0)
    made.answer(WRITE, "slow", (1,), {})
    assert seen == [begun]
    assert made.digest() != begun


def test_a_reset_brings_the_first_replies_back() -> None:
    read, write = ReplayedFunction(READ, "small"), ReplayedFunction(WRITE, "small")
    first, digest = read(1), replay_server.active().digest()
    write(1)
    assert replay_server.active().digest() != digest
    replay_server.active().reset()
    assert replay_server.active().digest() == digest
    assert torch.equal(read(1), first)


def test_each_call_of_the_program_has_its_own_shape() -> None:
    assert ReplayedFunction(READ, "small")(1).shape == (2,)
    assert ReplayedFunction(READ, "large")(1).shape == (64,)


def test_a_call_of_unknown_name_takes_the_record_with_the_nearest_request() -> None:
    assert ReplayedFunction(READ)(torch.zeros(1)).shape == (2,)
    assert ReplayedFunction(READ)(torch.zeros(200)).shape == (64,)
    few = torch.sparse_coo_tensor(
        torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (1000, 1000), check_invariants=True
    )
    assert ReplayedFunction(READ)(few).shape == (2,)


def test_what_was_never_recorded_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"no call of 'job\.ps:other'"):
        ReplayedFunction("job.ps:other")(1)


def test_a_process_that_replays_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_server, "_server", None)
    with pytest.raises(WorkloadError, match="replays nothing"):
        ReplayedFunction(READ)(1)


def test_a_stand_in_travels_by_name_and_has_the_contract_of_its_function() -> None:
    contract = Contract(writes=frozenset({"tables"}), batchable=True)
    made = ReplayedFunction(WRITE, "small", contract)
    assert contract_of(made) is contract
    travelled = pickle.loads(pickle.dumps(made))
    assert travelled == made
    assert contract_of(travelled) is None


@pytest.mark.parametrize(
    "calls, same",
    [
        ([((1, "a"), {}), ((2, "b"), {})], True),
        ([((1, "a"), {}), ((2,), {"table": "b"})], True),
        ([((1, "a"), {}), ((2, "a"), {})], False),
    ],
)
def test_the_order_of_writes_shows_only_within_one_part_of_the_state(calls: list[Sent], same: bool) -> None:
    parts = Contract(writes=frozenset({"tables"}), part="table", part_at=1)
    digests = []
    for order in (calls, calls[::-1]):
        playing = replay_server.start(replace(plan(), contracts={WRITE: parts}), "ps0")
        for args, kwargs in order:
            ReplayedFunction(WRITE, "small")(*args, **kwargs)
        digests.append(playing.digest())
    assert (digests[0] == digests[1]) is same


@pytest.mark.parametrize("run", [batch.run, batch.run_in_order])
def test_a_batch_gives_what_the_single_calls_give(run: Callable[[list[batch.Call]], list[object]]) -> None:
    read = ReplayedFunction(READ, "small")
    single = [read(index) for index in range(5)]
    batched = [batch.result(each) for each in run([(read, (index,), {}) for index in range(5)])]
    assert all(torch.equal(one, other) for one, other in zip(single, batched, strict=True))


def test_the_declared_batched_form_gives_what_the_single_calls_give() -> None:
    items = (ReplayedFunction(READ, "small"), ReplayedFunction(READ, "large"))
    calls: list[batch.Call] = [(item, (1,), {}) for item in items]
    outcomes = batch.run_batched(pickle.loads(pickle.dumps(ReplayedBatch(items))), calls)
    assert [each.shape for each in outcomes] == [(2,), (64,)]
    assert torch.equal(outcomes[0], items[0](1))


@pytest.mark.parametrize("per_item_s, share", [(0.0, 1.0), (CALL_S / 2, 2.0)])
def test_a_batch_takes_what_the_profile_says_of_further_calls(per_item_s: float, share: float) -> None:
    replay_server.start(plan(seconds=CALL_S, per_item_s=per_item_s), "ps0")
    read = ReplayedFunction(READ, "small")
    start = time.perf_counter()
    batch.run([(read, (index,), {}) for index in range(3)])
    assert time.perf_counter() - start >= share * CALL_S


def test_an_object_answers_any_method_that_was_recorded() -> None:
    made = ReplayedObject("near")
    method = getattr(made, "forward#forward")
    assert not torch.equal(method(1), ReplayedObject("near").forward(1))  # a method may write
    replay_server.active().reset()
    first = method(1)
    replay_server.active().reset()
    assert torch.equal(first, ReplayedObject("near").forward(1))
    replay_server.active().reset()
    assert not torch.equal(first, ReplayedObject("far").forward(1))
    with pytest.raises(WorkloadError, match="no call"):
        made.backward(1)


def test_the_class_of_an_object_has_its_methods_and_no_private_ones() -> None:
    assert callable(ReplayedObject.forward)
    assert not hasattr(ReplayedObject, "_private")
    assert not hasattr(ReplayedObject("near"), "__wrapped__")


def after(*writes: tuple[Contract | None, bytes]) -> WriteHistory:
    history = WriteHistory()
    for contract, call in writes:
        history.write(contract, call)
    return history


def test_a_read_sees_the_writes_of_what_it_reads() -> None:
    assert after((WRITES, A)).visible_to(TABLES) != after().visible_to(TABLES)
    assert after((WRITES, A)).visible_to(TABLES) != after((WRITES, A), (WRITES, A)).visible_to(TABLES)


def test_a_read_does_not_see_writes_of_other_state() -> None:
    assert after((DENSE, A)).visible_to(TABLES) == after().visible_to(TABLES)


def test_a_pure_call_sees_nothing() -> None:
    assert after((None, A), (WRITES, B)).visible_to(PURE) == after().visible_to(PURE)


def test_a_call_without_a_contract_sees_and_writes_everything() -> None:
    assert after((None, A)).visible_to(TABLES) != after().visible_to(TABLES)
    assert after((DENSE, A)).visible_to(None) != after().visible_to(None)
    assert after((ADDS, A)).visible_to(None) != after().visible_to(None)


def test_a_star_is_everything() -> None:
    assert after((Contract(writes=frozenset({"*"})), A)).visible_to(TABLES) != after().visible_to(TABLES)
    assert after((DENSE, A)).visible_to(Contract(reads=frozenset({"*"}))) != after().visible_to(
        Contract(reads=frozenset({"*"}))
    )


def test_reads_leave_nothing_behind() -> None:
    assert after((TABLES, A), (PURE, B)).digest() == after().digest()


def test_the_order_of_writes_shows() -> None:
    assert after((WRITES, A), (WRITES, B)).digest() != after((WRITES, B), (WRITES, A)).digest()
    assert after((None, A), (None, B)).digest() != after((None, B), (None, A)).digest()


def test_the_order_of_writes_of_different_state_does_not_show() -> None:
    assert after((WRITES, A), (DENSE, B)).digest() == after((DENSE, B), (WRITES, A)).digest()


@given(st.permutations([A, B, b"c" * 16, A]))
def test_writes_that_commute_may_come_in_any_order(calls: list[bytes]) -> None:
    history = after(*((ADDS, call) for call in calls))
    assert history.digest() == after((ADDS, A), (ADDS, A), (ADDS, B), (ADDS, b"c" * 16)).digest()
    assert history.digest() != after((ADDS, A), (ADDS, B), (ADDS, b"c" * 16)).digest()


def test_a_write_that_commutes_does_not_tell_which_came_before_it() -> None:
    assert after((ADDS, A)).visible_to(ADDS) == after().visible_to(ADDS)
    assert after((WRITES, A)).visible_to(ADDS) != after().visible_to(ADDS)


def test_writes_that_commute_keep_their_order_with_others() -> None:
    assert after((ADDS, A), (WRITES, B)).digest() != after((WRITES, B), (ADDS, A)).digest()


def test_writes_to_different_parts_may_come_in_any_order_and_those_to_one_may_not() -> None:
    def parts(*writes: tuple[str, bytes]) -> WriteHistory:
        history = WriteHistory()
        for part, call in writes:
            history.write(WRITES, call, part)
        return history

    assert parts(("x", A), ("y", B)).digest() == parts(("y", B), ("x", A)).digest()
    assert parts(("x", A), ("x", B)).digest() != parts(("x", B), ("x", A)).digest()
    assert parts(("x", A), ("", B)).digest() != parts(("", B), ("x", A)).digest()
    assert parts(("x", A)).visible_to(WRITES, "y") == parts().visible_to(WRITES, "y")
    assert parts(("x", A)).visible_to(TABLES) != parts().visible_to(TABLES)


CONTRACTS = (
    *(None, PURE, TABLES, WRITES, DENSE, ADDS, Contract(reads=frozenset({"dense"}))),
    *(Contract(reads=frozenset({"*"})), Contract(writes=frozenset({"*"}))),
    Contract(reads=frozenset({"dense"}), writes=frozenset({"tables"})),
)
ANYTHING = Contract(writes=frozenset({"*"}))
Steps = list[tuple[Contract | None, bytes]]


def conflict(one: Contract | None, other: Contract | None) -> bool:
    """Whether two calls must keep their order: one may write what the other touches."""
    one, other = (ANYTHING if each is None else each for each in (one, other))
    if one.commutes and other.commutes:
        return meet(one.writes, other.reads) or meet(one.reads, other.writes)
    return meet(one.writes, other.reads | other.writes) or meet(other.writes, one.reads | one.writes)


def meet(some: frozenset[str], others: frozenset[str]) -> bool:
    return bool(some & others) or bool(some and others and "*" in some | others)


def outcome(steps: Steps) -> tuple[dict[bytes, bytes], str]:
    """What each call sees, and what is left at the end."""
    history, seen = WriteHistory(), {}
    for contract, call in steps:
        seen[call] = history.visible_to(contract)
        history.write(contract, call)
    return seen, history.digest()


PROGRAMS = st.lists(st.sampled_from(CONTRACTS), min_size=2, max_size=8).map(
    lambda contracts: [(contract, bytes([place + 1]) * 16) for place, contract in enumerate(contracts)]
)


@pytest.mark.slow
@given(PROGRAMS, st.data())
def test_a_legal_motion_does_not_show_and_an_illegal_one_does(steps: Steps, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(steps) - 2))
    moved = [*steps[:place], steps[place + 1], steps[place], *steps[place + 2 :]]
    assert (outcome(steps) == outcome(moved)) is not conflict(steps[place][0], steps[place + 1][0])
