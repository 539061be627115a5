"""The reaper leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fxlib_workers.process.child import Child, ChildEndedError
from tests.workers.cases import alive

pytestmark = pytest.mark.slow

BREED = "tests.workers.orphaning_child"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child(BREED, tmp_path, {})
    yield made
    made.end()


def settled(mark: str, deadline_s: float = 200.0) -> list[int]:
    """Processes that carry the mark, once there are none, or after a while."""
    deadline = time.monotonic() + deadline_s
    while (left := alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_a_child_answers_over_its_channel(child: Child) -> None:
    child.channel.send(say="hello")
    assert child.channel.receive(120) == {"said": "hello"}


def test_a_child_sees_no_variables_but_those_that_libraries_need_or_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DATABASE_PASSWORD", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "SHARD_MAP", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    made = Child(BREED, tmp_path, {"TOLD": "1"}, keep_variables=["SHARD_*"])
    try:
        made.channel.send(environment=True)
        seen = (made.channel.receive(120) or {})["environment"]
    finally:
        made.end()
    assert {"PATH", "TOLD", "SHARD_MAP", "OMP_NUM_THREADS"} <= set(seen)
    assert not {"DATABASE_PASSWORD", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN"} & set(seen)


def test_no_orphan_that_ended_is_left_for_the_child_s_lifetime(child: Child) -> None:
    child.channel.send(breed=True)
    assert child.channel.receive(120) == {"bred": True}
    below = psutil.Process(child.pid)
    (orphan,) = [each for each in below.children() if each.ppid() == child.pid and "sleep" in each.cmdline()[-1]]
    orphan.kill()
    assert psutil.wait_procs([orphan], timeout=60)[1] == []
    assert len(below.children()) == 1


def test_ending_a_child_ends_even_those_that_its_children_orphaned(child: Child) -> None:
    mark = str(child.folder)
    child.channel.send(breed=True)
    message = child.channel.receive(120)
    assert message is not None
    assert len(alive(mark)) >= 3  # reaper, child, and a grandchild that init would have adopted
    child.end()
    assert settled(mark) == []
    assert not child.folder.exists()


def test_what_a_child_leaves_when_it_ends_is_ended_too(child: Child) -> None:
    mark = str(child.folder)
    child.channel.send(breed=True)
    assert child.channel.receive(120) is not None
    child.channel.send(exit=3)
    assert child.status() == 3
    assert settled(mark) == []
    with pytest.raises(ChildEndedError):
        child.channel.receive(1)


def test_a_child_ended_by_a_signal_tells_which(child: Child) -> None:
    child.channel.send(kill=int(signal.SIGSEGV))
    assert child.status() == 128 + signal.SIGSEGV


def test_killing_the_worker_ends_its_children_and_deletes_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "job").write_text("left over")
    program = (
        "import sys, time; from pathlib import Path; from fxlib_workers.process.child import Child;"
        f"c = Child({BREED!r}, Path(sys.argv[1]), {{}}); c.channel.send(breed=True); c.channel.receive();"
        "print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"up\n"
        assert len(alive(str(root))) >= 3
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    assert settled(str(root)) == []
    assert not root.exists()
