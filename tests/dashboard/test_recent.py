"""A question that many ask at once is looked up once, and its answer is kept for a moment."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fxlib.dashboard.recent import Recent


class Slow:
    """A question that is being looked up until the test says the answer."""

    def __init__(self) -> None:
        self.asked, self.began, self.may_end = 0, threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.asked += 1
        self.began.set()
        assert self.may_end.wait(60)
        return self.asked


def test_a_question_that_many_ask_at_once_is_looked_up_once() -> None:
    recent, slow, together = Recent(), Slow(), threading.Barrier(9)

    def ask() -> int:
        together.wait()
        return recent.get("jobs", slow)

    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask) for _ in range(8)]
        together.wait()
        assert slow.began.wait(60)
        slow.may_end.set()
        assert [each.result() for each in answers] == [1] * 8
    assert recent.get("jobs", slow) == 1


def test_what_is_forgotten_while_it_is_looked_up_is_looked_up_again() -> None:
    recent, slow = Recent(), Slow()
    with ThreadPoolExecutor(1) as threads:
        before = threads.submit(recent.get, "jobs", slow)
        assert slow.began.wait(60)
        recent.forget()
        assert recent.get("jobs", lambda: 7) == 7
        slow.may_end.set()
        assert before.result() == 1
    assert recent.get("jobs", slow) == 7


def test_a_question_that_failed_is_asked_again() -> None:
    recent = Recent()
    with pytest.raises(ZeroDivisionError):
        recent.get("jobs", lambda: 1 // 0)
    assert recent.get("jobs", lambda: 1) == 1
