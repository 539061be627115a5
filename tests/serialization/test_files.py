"""Files are written whole or not at all; what is no file is written to."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from threading import Thread

import pytest

from fxlib.serialization.files import write_whole


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, [b"one", b"two"])
    reader.join(10)
    assert found == [b"onetwo"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_to_a_device_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(os.devnull)
    write_whole(link, [b"one"])
    assert link.is_symlink()
    assert link.is_char_device()


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    def parts() -> list[bytes]:
        raise OSError("no space")

    path = tmp_path / "file"
    path.write_bytes(b"before")
    with pytest.raises(OSError, match="no space"):
        write_whole(path, (part for each in [parts] for part in each()))
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
