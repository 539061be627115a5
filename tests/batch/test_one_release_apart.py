"""Servers and their trainer are rolled out one after the other: what travels between two releases is understood."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.shared.released import python_of_the_release

PROGRAM = Path(__file__).with_name("one_release_apart.py")


def together(pythons: Sequence[Path], folder: Path) -> str:
    """Run a trainer and its servers, each by a Python, and return what the trainer prints."""
    folder.mkdir()
    started = [
        subprocess.Popen(
            [str(python), "-P", str(PROGRAM), str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1"},
        )
        for rank, python in enumerate(pythons)
    ]
    try:
        out, err = started[0].communicate(timeout=200)
        assert started[0].returncode == 0, err
        for each in started[1:]:
            _, err = each.communicate(timeout=60)
            assert each.returncode == 0, err
    finally:
        for each in started:
            each.kill()
    return out


@pytest.mark.slow
def test_a_trainer_and_servers_of_two_releases_compute_the_same(tmp_path: Path) -> None:
    old, new = python_of_the_release(tmp_path), Path(sys.executable)
    assert str(tmp_path / "code") in together([old, new, new], tmp_path / "old trainer")
    assert str(tmp_path / "code") not in together([new, old, new], tmp_path / "new trainer, one server old")
