"""Turns at one host."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fxlib_workers.process.host_lock import HostLock


class GivenUpError(Exception):
    """The waiting was ended."""


def give_up() -> None:
    raise GivenUpError


def carry_on() -> None:
    pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host.lock"


def test_rewrites_run_beside_each_other(path: Path) -> None:
    with HostLock(path).rewriting(carry_on), HostLock(path).rewriting(carry_on):
        pass


def waits(lock: HostLock, kind: str) -> bool:
    """Whether the lock is held against us: the second look while waiting gives up."""
    looks = iter([carry_on, give_up])

    def look() -> None:
        next(looks)()

    try:
        with getattr(lock, kind)(look):
            return False
    except GivenUpError:
        return True


def test_a_trial_runs_alone(path: Path) -> None:
    with HostLock(path).measuring(carry_on):
        assert waits(HostLock(path), "measuring")
        assert waits(HostLock(path), "rewriting")
    with HostLock(path).rewriting(carry_on):
        assert waits(HostLock(path), "measuring")
    assert not waits(HostLock(path), "measuring")


@pytest.mark.slow
def test_who_waits_gets_its_turn(path: Path) -> None:
    done = threading.Event()

    def other() -> None:
        with HostLock(path).measuring(carry_on):
            done.set()

    with HostLock(path).measuring(carry_on):
        thread = threading.Thread(target=other)
        thread.start()
        assert not done.wait(0.3)
    thread.join(60)
    assert done.is_set()


def test_a_link_in_the_locks_place_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"), HostLock(path).measuring(carry_on):
        pass
