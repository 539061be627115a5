"""What other processes take of the cores is not booked as the program's own work."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from fxlib.profiling.step_samples import (
    CallSample,
    ForwardSample,
    StepSample,
    handling_s,
    own_s,
    services_s,
    undisturbed,
)


def test_work_counts_with_the_time_of_its_thread_and_with_what_is_always_idle_in_it() -> None:
    assert own_s([1.0, 3.0, 1.1], [0.9, 0.9, 1.0]) == pytest.approx([1.0, 1.0, 1.1])


def test_sleeping_is_the_programs_own() -> None:
    assert own_s([2.0, 2.0], [0.0, 0.0]) == [2.0, 2.0]


def step(passed_s: float, cpu_s: float) -> StepSample:
    """One node, a loss, a backward and the rest, each of which takes as long."""
    forward = ForwardSample(seconds={"work": passed_s}, cpu_s={"work": cpu_s}, graph_s=passed_s, graph_cpu_s=cpu_s)
    spans, own = ({"loss": each, "backward": each, "push": 0.0} for each in (passed_s, cpu_s))
    return StepSample(
        forwards=(forward,), step_s=4 * passed_s, spans_s=spans, pushed_s=(), step_cpu_s=4 * cpu_s, spans_cpu_s=own
    )


def test_each_part_of_a_step_loses_what_others_took_and_their_share_is_told() -> None:
    steps, others = undisturbed([step(1.0, 1.0), step(3.0, 1.0)])
    assert [each.step_s for each in steps] == pytest.approx([4.0, 4.0])
    assert [each.forwards[0].seconds["work"] for each in steps] == pytest.approx([1.0, 1.0])
    assert others == pytest.approx(0.5)


def test_an_undisturbed_step_is_as_it_was() -> None:
    given = [step(1.0, 0.98), step(1.01, 0.99)]
    steps, others = undisturbed(given)
    assert [each.step_s for each in steps] == pytest.approx([each.step_s for each in given])
    assert others == pytest.approx(0.0, abs=0.01)


def test_the_wait_for_an_answer_that_nobody_tells_of_counts_as_it_passed() -> None:
    sample = CallSample(node=None, to="ps0", request_bytes=0, issue_s=1.0, issue_cpu_s=0.5, wait_s=2.0)  # type: ignore[arg-type]
    assert handling_s([sample]) == ([1.0], [2.0])


def test_what_others_take_of_an_issue_is_time_in_which_the_server_works() -> None:
    samples = [
        CallSample(node=None, to="ps0", request_bytes=0, issue_s=issue_s, issue_cpu_s=0.9, service_s=service_s)  # type: ignore[arg-type]
        for issue_s, service_s in ((1.0, 5.0), (3.0, 3.0))
    ]
    issues_s, _ = handling_s(samples)
    assert issues_s == pytest.approx([1.0, 1.0])
    assert services_s(samples) == pytest.approx([5.0, 5.0])


def spin() -> None:
    while True:
        pass


@pytest.mark.slow
def test_processes_that_take_the_cores_do_not_make_work_longer() -> None:
    def work() -> tuple[float, float]:
        start, cpu_s = time.perf_counter(), time.thread_time()
        sum(range(200_000))
        return time.perf_counter() - start, time.thread_time() - cpu_s

    alone = [work() for _ in range(20)]
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=spin, daemon=True) for _ in range(2 * multiprocessing.cpu_count())]
    for each in others:
        each.start()
    try:
        time.sleep(1.0)
        crowded = [work() for _ in range(40)]
    finally:
        for each in others:
            each.kill()
            each.join()
    usual_s = sorted(own_s(*zip(*alone, strict=True)))[10]
    assert sorted(own_s(*zip(*crowded, strict=True)))[20] < 2.0 * usual_s
