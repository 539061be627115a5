"""Groups that bound what a job takes as a whole."""

from __future__ import annotations

import os
import threading
import time

import pytest

from fxlib_workers.process import cgroup
from fxlib_workers.process.cgroup import CgroupUnavailableError, job_cgroup
from fxlib_workers.process.containment import Part
from tests.workers.process.contained import ChildFailedError, everything, finish, host, run, start

MIB = 1 << 20

pytestmark = pytest.mark.skipif(Part.MEMORY not in host().parts, reason=f"no cgroup here: {dict(host().missing)}")


def fill(mib: int) -> str:
    held = [os.urandom(MIB) for _ in range(mib)]
    return f"{len(held)} MiB"


def fill_and_stay(mib: int) -> str:
    """Fill memory, and hold it until another process has had the time to."""
    held = [os.urandom(MIB) for _ in range(mib)]
    time.sleep(3.0)
    return f"{len(held)} MiB"


def start_threads(count: int) -> None:
    done = threading.Event()
    for _ in range(count):
        threading.Thread(target=done.wait, daemon=True).start()


@pytest.mark.slow
def test_memory_is_bounded_for_all_processes_together() -> None:
    with job_cgroup(256 * MIB, 512) as group:
        policy = everything(cgroup=group.joins)
        assert run(lambda: fill(64), policy) == "64 MiB"
        assert not group.ran_out()
        children = [start(lambda: fill_and_stay(160), policy) for _ in range(2)]
        ended = []
        for child in children:
            try:
                ended.append(finish(*child))
            except ChildFailedError as error:
                ended.append(str(error)[:9])
        assert "status -9" in ended, ended
        assert group.ran_out()
    assert not any(folder.exists() for folder in group.folders)


@pytest.mark.slow
def test_threads_and_processes_are_bounded_for_all_together() -> None:
    with job_cgroup(256 * MIB, 40) as group:
        with pytest.raises(ChildFailedError, match="can't start new thread"):
            run(lambda: start_threads(60), everything(cgroup=group.joins))
        assert run(lambda: start_threads(10), everything(cgroup=group.joins)) == "None"


def test_a_group_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxlib_workers.process.cgroup._own_groups", dict)
    with pytest.raises(CgroupUnavailableError, match="no hierarchy"), job_cgroup(MIB, 1):
        pass


def test_groups_of_killed_workers_are_removed_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)
    parents = list(cgroup._parents(MIB, 1))
    with job_cgroup(256 * MIB, 64) as living:
        left = [parent / f"fxlib-{ended}-0badcafe" for parent in parents]
        for each in left:
            each.mkdir()
        cgroup.remove_abandoned()
        assert all(each.exists() for each in left)  # another container's worker may be about to join it
        monkeypatch.setattr(cgroup, "_JOINED_S", -1.0)
        cgroup.remove_abandoned()
        assert not any(each.exists() for each in left)
        assert all(folder.exists() for folder in living.folders)
