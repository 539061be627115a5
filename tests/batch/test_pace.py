"""How many threads calls of a function get, by how they spent their time."""

from __future__ import annotations

import threading
import time

import pytest

from fxlib import batch
from fxlib.batch import pace
from fxlib.batch.pace import THREADS, Pace
from tests.shared.undisturbed import undisturbed


def known(*ran: tuple[float, float], running: int = 1) -> Pace:
    """Return the pace of a function whose calls ran by themselves: how long each waited and worked, in ms."""
    made = Pace()
    for waited_ms, worked_ms in ran:
        idle_ms = waited_ms + (running - 1) * worked_ms
        made.ran_by_itself((idle_ms + worked_ms) / 1e3, idle_ms / 1e3, running)
    return made


def in_ten_batches(of: Pace) -> list[int]:
    """Return the threads for each of ten batches, of which those in turn have shown that others are worth it."""
    found = []
    for _ in range(10):
        found.append(of.threads())
        if found[-1] == 1:
            of.looked(in_turn=False)
    return found


def test_calls_of_which_nothing_is_known_get_all_threads() -> None:
    assert Pace().threads() == THREADS


@pytest.mark.parametrize(
    "waits_ms, works_ms, threads",
    [(0.0, 0.1, 1), (0.1, 0.05, 1), (0.0, 0.5, 1), (0.5, 0.25, 3), (2.0, 0.25, 9), (5.0, 0.01, THREADS)],
)
def test_as_many_threads_share_calls_as_keep_the_interpreter_busy(
    waits_ms: float, works_ms: float, threads: int
) -> None:
    of = known((waits_ms, works_ms))
    assert of.threads() == 1  # a look
    of.looked(in_turn=threads == 1)
    assert of.threads() == threads


def test_calls_that_work_long_get_a_thread_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_cores", lambda: 4)
    of = known((0.0, 3.0))
    of.looked(in_turn=False)
    assert of.threads() == 4


def test_calls_that_surely_wait_are_shared_without_a_look() -> None:
    assert set(in_ten_batches(known((20.0, 0.1)))) == {THREADS}


def test_a_look_becomes_seldom_where_it_makes_others_wait_and_frequent_where_it_does_not() -> None:
    of = known((0.5, 0.25))
    assert in_ten_batches(of) == [1, 3, 3, 1, 3, 3, 3, 3, 1, 3]
    for _ in range(8):
        while of.threads() > 1:
            pass
        of.looked(in_turn=True)
    assert of.threads() == of.threads() == 1


def test_calls_that_come_to_last_longer_are_looked_at_soon() -> None:
    of = known((0.5, 0.25), (0.5, 0.25), (0.5, 0.25))
    for _ in range(8):
        while of.threads() > 1:
            of.ran(1e-3)
        of.looked(in_turn=False)
    assert [of.threads() for _ in range(10)] == [3] * 10
    for _ in range(13):
        of.ran(3e-3)
    assert [of.threads() for _ in range(5)] == [3, 3, 3, 3, 1]


def test_a_call_whose_core_was_taken_away_changes_nothing() -> None:
    of = known((0.0, 0.25), (0.0, 0.25))
    assert of.ran_by_itself(1e-3, 0.75e-3, 1) == 1
    of.looked(in_turn=False)
    assert of.threads() == 1


def test_all_behind_a_call_that_lasts_long_run_side_by_side() -> None:
    assert known((0.0, 0.25), (0.0, 0.25)).ran_by_itself(5e-3, 4.75e-3, 1) == THREADS
    of = known((0.5, 0.25), (0.5, 0.25))
    assert of.ran_by_itself(2e-3, 1.75e-3, 1) == 3
    assert of.ran_by_itself(1.0, 0.99975, 1) == THREADS
    assert of.ran(1.0) == THREADS
    assert of.ran(2e-3) == 1


def work_and_wait(work_s: float, wait_s: float) -> None:
    end = time.thread_time() + work_s
    while time.thread_time() < end:
        pass
    time.sleep(wait_s)


@pytest.mark.parametrize("as_usual", [0, 1, 3])
@pytest.mark.parametrize("usual_wait_s", [0.0, 0.0005, 0.002])
def test_a_message_whose_calls_come_to_stall_takes_two_of_them_at_most(usual_wait_s: float, as_usual: int) -> None:
    def took_s() -> float:
        def calls(wait_s: float) -> list[batch.Call]:
            return [(work_and_wait, (0.00025, wait_s), {}) for _ in range(13)]

        for _ in range(6):
            batch.run(calls(usual_wait_s))
        start = time.perf_counter()
        batch.run([*calls(usual_wait_s)[:as_usual], *calls(0.2)[as_usual:]])
        return time.perf_counter() - start

    assert undisturbed(took_s, lambda seconds: seconds < 0.5) < 0.5


def test_those_behind_a_call_that_lasted_long_do_not_wait_for_threads_that_are_stalled() -> None:
    def took_s() -> float:
        for _ in range(6):
            batch.run([(work_and_wait, (0.00025, 0.0005), {}) for _ in range(5)])
        waits_s = [0.1, 0.5, 0.5, 0.4, 0.4]
        start = time.perf_counter()
        batch.run([(work_and_wait, (0.00025, each), {}) for each in waits_s])
        return time.perf_counter() - start

    assert undisturbed(took_s, lambda seconds: seconds < 0.75) < 0.75


def test_waiting_for_the_interpreter_is_no_reason_for_more_threads() -> None:
    of = known((0.0, 0.25), running=4)
    of.looked(in_turn=True)
    assert of.threads() == 1


def test_calls_that_come_to_wait_are_shared() -> None:
    of = known((0.0, 0.25), (0.5, 0.25), (0.5, 0.25))
    assert of.ran_by_itself(0.75e-3, 0.5e-3, 1) == 3


def test_a_call_that_lasts_long_shows_it_though_the_first_of_its_message_was_brief() -> None:
    def took_s() -> float:
        for _ in range(6):
            batch.run([(work_and_wait, (0.00025, 0.0), {}) for _ in range(13)])
        start = time.perf_counter()
        batch.run([(work_and_wait, (0.00025, 0.0), {}), *[(work_and_wait, (0.0001, 0.008), {}) for _ in range(12)]])
        return time.perf_counter() - start

    assert undisturbed(took_s, lambda seconds: seconds < 0.06) < 0.06


_THREADS: list[int] = []


def wait_in_its_thread() -> None:
    _THREADS.append(threading.get_ident())
    time.sleep(0.003)


def test_two_calls_that_wait_seldom_run_in_turn_for_a_look_at_one() -> None:
    def apart() -> int:
        found = 0
        for _ in range(40):
            _THREADS.clear()
            batch.run([(wait_in_its_thread, (), {})] * 2)
            found += len(set(_THREADS)) == 2
        return found

    assert undisturbed(apart, lambda count: count >= 30) >= 30


@pytest.mark.parametrize("brief", [1, 2])
def test_calls_that_wait_are_shared_though_the_first_of_each_message_are_brief(brief: int) -> None:
    def took_s() -> float:
        calls: list[batch.Call] = [(work_and_wait, (0.00002, 0.0), {})] * brief
        calls += [(work_and_wait, (0.0001, 0.0006), {})] * (13 - brief)
        spent = []
        for _ in range(25):
            start = time.perf_counter()
            batch.run(calls)
            spent.append(time.perf_counter() - start)
        return sorted(spent)[12]

    assert undisturbed(took_s, lambda seconds: seconds < 0.007) < 0.007
