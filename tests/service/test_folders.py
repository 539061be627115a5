"""A folder that cannot be used ends a service, or a worker, with one sentence."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fxlib.errors import of_system
from fxlib_service.stores.sql import SqlJobStore
from tests.service.support import refused

pytestmark = pytest.mark.slow


def sentence(told: str) -> str:
    """Return the last line, which is all that there is of the error."""
    assert "Traceback" not in told
    return told.splitlines()[-1]


def test_a_data_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    assert sentence(refused("--data", str(tmp_path / "data"))).startswith("fxlib service: --data: cannot use")


def test_a_data_folder_that_cannot_be_written_is_one_sentence() -> None:
    assert sentence(refused("--data", "/proc/self/data")).startswith(
        "fxlib service: --data: cannot use /proc/self/data"
    )


def test_a_file_where_the_blobs_belong_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("")
    told = sentence(refused("--data", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"))
    assert told.startswith(f"fxlib service: --data: cannot use {tmp_path / 'blobs'}: ")


def test_a_database_of_a_newer_service_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "service.sqlite"
    SqlJobStore(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE fxlib_version SET version_num = '0099'")
    told = sentence(refused("--data", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"))
    assert "schema version 0099" in told


def test_a_worker_without_a_folder_for_its_files_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fxlib_workers", "--service", "127.0.0.1:1", "--ray-address", "nowhere:1"]
    options = ["--interface", "eth9", "--config", str(tmp_path)]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr


def test_a_failed_system_call_names_its_file() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Path("/no/such/file").rename("/no/other")
    assert str(of_system(caught.value)) == "/no/such/file and /no/other: No such file or directory"
