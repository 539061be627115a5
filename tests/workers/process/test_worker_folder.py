"""The folder of a worker, and what killed workers have left."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from fxlib_workers.process.worker_folder import WorkerFolder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_gone_with_its_worker(tmp_path: Path) -> None:
    folder = WorkerFolder()
    (folder.path / "job").mkdir()
    folder.delete()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_worker_has_left_goes_when_the_next_one_begins_or_ends(tmp_path: Path) -> None:
    killed = WorkerFolder()
    (killed.path / "job").mkdir()
    living = WorkerFolder()
    assert {killed.path, living.path} == set(tmp_path.iterdir())
    os.close(killed._lock)  # as the kernel does
    next_one = WorkerFolder()
    assert {living.path, next_one.path} == set(tmp_path.iterdir())
    os.close(next_one._lock)
    living.delete()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_worker_s_stays(tmp_path: Path) -> None:
    (tmp_path / "fxlib-w-of-somebody").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "fxlib-w-link").symlink_to(tmp_path / "elsewhere")
    WorkerFolder().delete()
    assert {path.name for path in tmp_path.iterdir()} == {
        "elsewhere",
        "fxlib-w-link",
        "fxlib-w-of-somebody",
    }
