"""What is replayed: which calls, and which profiles are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxlib.errors import LimitError
from fxlib.spec.contract import Contract
from fxlib.spec.profile import CallProfile, Opaque, Profile, Push, Result, Spread, TensorShape
from fxlib_workers.trial.replay.plan import ReplayPlan, leaves_of, recorded_calls, reply_bytes, undescribed_servers

ROWS = TensorShape(shape=(4, 2), dtype=torch.float32)
PUSH = Push(function="job.ps:push", request_bytes=64, issue_s=0.0, service_s=Spread(quantiles=(0.002,)), ready_s=0.001)
CALL = CallProfile(
    call="lookup",
    function="job.ps:lookup",
    to="ps0",
    request_bytes=32,
    response_bytes=32,
    returns=ROWS,
    issue_s=0.0,
    wait_s=0.0,
    service_s=Spread(quantiles=(0.001, 0.002)),
    push=PUSH,
)


def test_a_call_and_its_push_go_by_the_calls_name() -> None:
    lines = recorded_calls(Profile(calls=(CALL, replace(CALL, call="lookup_1", to="ps1", push=None))))
    assert {name: set(calls) for name, calls in lines.items()} == {
        "job.ps:lookup": {"lookup", "lookup_1"},
        "job.ps:push": {"lookup"},
    }
    assert lines["job.ps:push"]["lookup"].service_s == PUSH.service_s
    assert lines["job.ps:push"]["lookup"].returns == Opaque()


@pytest.mark.parametrize(
    "returns, words",
    [
        (TensorShape(shape=(1 << 20, 1 << 20), dtype=torch.float32), "bytes exceeds"),
        ([TensorShape(shape=(1 << 14, 1 << 14), dtype=torch.float32)] * 2, "bytes exceeds"),
        (TensorShape(shape=(-1, 4), dtype=torch.float32), "negative"),
        ([Opaque()] * 20_000, "20000 parts"),
    ],
)
def test_replies_too_large_to_make_are_refused(returns: Result, words: str) -> None:
    with pytest.raises(LimitError, match=words) as caught:
        recorded_calls(Profile(calls=(replace(CALL, returns=returns),)))
    assert "Profile.calls['lookup']" in str(caught.value)


def test_times_that_no_trial_waits_for_are_refused() -> None:
    slow = Spread(quantiles=(3600.0,))
    with pytest.raises(LimitError, match="service time"):
        recorded_calls(Profile(calls=(replace(CALL, service_s=slow),)))
    with pytest.raises(LimitError, match="service time"):
        recorded_calls(Profile(calls=(replace(CALL, push=replace(PUSH, service_s=slow)),)))


def test_servers_that_only_the_profile_knows_are_named() -> None:
    profile = Profile(calls=(CALL, replace(CALL, call="a", to="ps2"), replace(CALL, call="b", to="ps1")))
    assert undescribed_servers(profile, ["ps1"]) == ("ps0", "ps2")


def test_what_no_worker_can_be_called_is_no_server() -> None:
    elsewhere = [replace(CALL, call=name, to=name) for name in ("", "ps 0", "features.example.com", "p" * 128)]
    assert undescribed_servers(Profile(calls=(CALL, *elsewhere)), []) == ("ps0",)


def test_only_what_nobody_has_is_replayed() -> None:
    lines = recorded_calls(Profile(calls=(CALL, replace(CALL, call="seen", function="torch:add", to="ps9"))))
    plan = ReplayPlan(calls=lines, functions=frozenset({"job.ps:lookup"}), undescribed=frozenset({"ps9"}))
    assert plan.replays("ps0", "job.ps:lookup", "lookup")
    assert not plan.replays("ps0", "torch:add", "seen")
    assert plan.replays("ps9", "torch:add", "seen")
    assert plan.replays(None, "torch:add", "seen")
    assert not plan.replays(None, "torch:add", "another")
    assert not plan.replays("ps9", "job.ps:never", "lookup")


def test_the_declared_batched_form_of_what_is_replayed_is_served() -> None:
    plan = ReplayPlan(
        calls=recorded_calls(Profile(calls=(CALL,))),
        contracts={
            "job.ps:lookup": Contract(reads=frozenset({"t"}), batched_by="job.ps:lookup_many"),
            "job.ps:other": Contract(reads=frozenset({"t"}), batched_by="job.ps:other_many"),
        },
    )
    assert plan.serves("job.ps:lookup")
    assert plan.serves("job.ps:lookup_many")
    assert not plan.serves("job.ps:other_many")


LEAVES = st.one_of(
    st.builds(TensorShape, shape=st.tuples(st.integers(0, 5)), dtype=st.sampled_from([torch.float32, torch.int64])),
    st.builds(Opaque, value=st.integers()),
)


@pytest.mark.slow
@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)))
def test_leaves_come_in_order_and_their_bytes_add_up(result: Result) -> None:
    def walk(each: Result) -> list[object]:
        if isinstance(each, (list, tuple)):
            return [leaf for inner in each for leaf in walk(inner)]
        if isinstance(each, dict):
            return [leaf for inner in each.values() for leaf in walk(inner)]
        return [each]

    assert list(leaves_of(result)) == walk(result)
    tensors = [leaf for leaf in walk(result) if isinstance(leaf, TensorShape)]
    assert reply_bytes(result) == sum(torch.empty(each.shape, dtype=each.dtype).nbytes for each in tensors)
