"""Folders are gone with their owners, and what killed ones have left goes when the next one begins or ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fxlib.utils.locked_folder import LockedFolder
from fxlib_workers.agent import WorkerFolder

OWNER = """
import sys, time
from fxlib.utils.locked_folder import LockedFolder
print(LockedFolder("fxlib-w-").path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def mine() -> LockedFolder:
    return LockedFolder("fxlib-w-")


@pytest.mark.parametrize("make", [mine, WorkerFolder])
def test_a_folder_is_gone_with_its_owner(tmp_path: Path, make: Callable[[], LockedFolder]) -> None:
    folder = make()
    (folder.path / "job").mkdir()
    folder.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [mine, WorkerFolder])
def test_what_a_killed_owner_has_left_goes_when_the_next_one_begins_or_ends(
    tmp_path: Path, make: Callable[[], LockedFolder]
) -> None:
    killed = make()
    (killed.path / "job").mkdir()
    living = make()
    assert {killed.path, living.path} == set(tmp_path.iterdir())
    os.close(killed.lock)  # as the kernel does
    next_one = make()
    assert {living.path, next_one.path} == set(tmp_path.iterdir())
    os.close(next_one.lock)
    living.delete()
    assert list(tmp_path.iterdir()) == []


def test_a_living_process_keeps_its_folder_and_a_killed_one_loses_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        mine().delete()
        assert list(tmp_path.iterdir()) == [path]
        owner.send_signal(signal.SIGKILL)
        owner.wait(60)
        mine().delete()
        assert list(tmp_path.iterdir()) == []


def test_what_is_nobody_s_or_another_kind_s_stays(tmp_path: Path) -> None:
    (tmp_path / "fxlib-w-of-somebody").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / "fxlib-w-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "fxlib-w-file").touch()
    (tmp_path / "fxlib-w-led-away").mkdir()
    (tmp_path / "fxlib-w-led-away" / "lock").symlink_to(tmp_path / "elsewhere" / "lock")
    there = set(tmp_path.iterdir())
    mine().delete()
    assert set(tmp_path.iterdir()) == there


def test_the_folder_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = mine()
    os.close(left.lock)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    mine()
    assert left.path.exists()


def test_a_folder_whose_owner_is_about_to_lock_it_stays(tmp_path: Path) -> None:
    beginning = tmp_path / "fxlib-w-beginning"
    beginning.mkdir()
    (beginning / "lock.new").touch()
    mine().delete()
    assert beginning.exists()


def test_threads_touch_a_folder_side_by_side() -> None:
    with LockedFolder("fxlib-test-") as folder, ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(folder.touch) for _ in range(400)]:
            each.result()
        assert sorted(path.name for path in folder.path.iterdir()) == ["lock"]
