"""How long a replaying server takes: side by side, in position, over a slow link, and in a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxlib.spec.profile import Opaque, ServerProfile, Spread
from fxlib_workers.trial.replay.latency_model import NOT_BATCHED, BatchPosition, LatencyModel, NetworkCost, at
from fxlib_workers.trial.replay.plan import RecordedCall
from tests.shared.undisturbed import undisturbed

CALL_S = 0.02


def line(seconds: float = CALL_S, *, request_bytes: int = 0, response_bytes: int = 0) -> RecordedCall:
    return RecordedCall(
        to="ps0",
        returns=Opaque(),
        service_s=Spread(quantiles=(seconds,)),
        request_bytes=request_bytes,
        response_bytes=response_bytes,
    )


def latency(
    *, concurrency: int = 16, bytes_per_s: float = 1e12, per_item_s: float | None = None, round_trip_s: float = 0.0
) -> LatencyModel:
    server = ServerProfile(
        name="ps0", round_trip_s=round_trip_s, concurrency=concurrency, bytes_per_s=bytes_per_s, per_item_s=per_item_s
    )
    return LatencyModel(server, seed=0)


def took_s(
    made: LatencyModel, calls: list[RecordedCall], position: Callable[[int], BatchPosition] = lambda _: NOT_BATCHED
) -> float:
    """Make all calls at once and return the seconds until the last is answered."""
    with ThreadPoolExecutor(len(calls)) as pool:
        start = time.perf_counter()
        list(pool.map(lambda i: made.serve("f", calls[i], arrived=start, position=position(i)), range(len(calls))))
        return time.perf_counter() - start


def is_below(limit_s: float, took: Callable[[], float]) -> bool:
    """Whether it takes less, in one of many tries: a busy machine adds to most."""
    return undisturbed(took, lambda seconds: seconds < limit_s, attempts=20) < limit_s


def beside(index: int) -> BatchPosition:
    return BatchPosition(index=index, concurrent=True)


def test_a_call_takes_its_recorded_time() -> None:
    assert took_s(latency(), [line()]) >= CALL_S


def test_a_server_works_on_so_many_calls_at_once_as_recorded() -> None:
    assert took_s(latency(concurrency=1), [line()] * 4) >= 4 * CALL_S
    assert took_s(latency(concurrency=2), [line()] * 4) >= 2 * CALL_S
    assert is_below(2 * CALL_S, lambda: took_s(latency(concurrency=4), [line()] * 4))


def test_messages_pass_a_slow_link_one_after_another() -> None:
    call = line(response_bytes=1_000_000)
    slow, fast = latency(bytes_per_s=1_000_000 / CALL_S), latency()
    assert took_s(slow, [call] * 4) >= 4 * CALL_S
    assert is_below(2 * CALL_S, lambda: took_s(fast, [call] * 4))


def test_what_the_trials_own_network_takes_is_taken_off() -> None:
    made = latency()
    made.network = NetworkCost(call_s=CALL_S)
    assert took_s(made, [line(4 * CALL_S)]) >= 3 * CALL_S
    assert is_below(CALL_S, lambda: took_s(made, [line()]))


def test_further_calls_of_a_batch_take_what_they_add_to_it() -> None:
    each, alone = latency(concurrency=1, per_item_s=CALL_S / 10), latency(concurrency=1)
    assert took_s(alone, [line()] * 5) >= 5 * CALL_S
    assert took_s(each, [line()] * 5, beside) >= 1.4 * CALL_S
    assert is_below(5 * CALL_S, lambda: took_s(each, [line()] * 5, beside))


def test_what_a_batch_of_this_trial_adds_by_itself_is_taken_off() -> None:
    slow, quick = (latency(per_item_s=CALL_S / 2) for _ in range(2))
    quick.network = NetworkCost(item_s=CALL_S)
    slow_s = took_s(slow, [line()] * 5, beside)
    assert is_below(slow_s / 2, lambda: took_s(quick, [line()] * 5, beside))


def test_calls_that_run_in_order_each_take_their_own_time_and_share_one_way() -> None:
    made = latency(round_trip_s=CALL_S)

    def took_in_turn_s(position: Callable[[int], BatchPosition]) -> float:
        start = time.perf_counter()
        for place in range(3):
            made.serve("f", line(2 * CALL_S), arrived=time.perf_counter(), position=position(place))
        return time.perf_counter() - start

    assert took_in_turn_s(lambda _: NOT_BATCHED) >= 6 * CALL_S
    assert took_in_turn_s(lambda place: BatchPosition(index=place)) >= 4 * CALL_S
    assert is_below(6 * CALL_S, lambda: took_in_turn_s(lambda place: BatchPosition(index=place)))


def test_the_same_times_are_drawn_again_after_a_reset() -> None:
    spread, made = Spread(quantiles=(1.0, 2.0, 8.0)), latency()
    first = [made._draw("f", spread) for _ in range(50)]
    made.reset()
    assert [made._draw("f", spread) for _ in range(50)] == first
    assert len(set(first)) == 50
    assert [made._draw("g", spread) for _ in range(50)] != first


@pytest.mark.slow
@given(st.lists(st.floats(0, 60), min_size=1, max_size=12).map(sorted), st.floats(0, 1))
def test_times_lie_between_the_quantiles(quantiles: list[float], share: float) -> None:
    spread = Spread(quantiles=tuple(quantiles))
    assert quantiles[0] <= at(spread, share) <= quantiles[-1] or at(spread, share) == pytest.approx(quantiles[-1])


def test_the_median_is_the_middle_quantile() -> None:
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert at(spread, 0.5) == spread.median == 3.0
