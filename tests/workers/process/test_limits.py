"""What a process may not do once it has limited itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fxlib_workers.process import limits

PROGRAM = """
import errno, resource, sys, threading
from pathlib import Path
from fxlib_workers.process.limits import limit_files, limit_processes

limit_files(1000)
limit_processes()
Path(sys.argv[1]).write_bytes(bytes(1000))
try:
    Path(sys.argv[1]).write_bytes(bytes(1001))
except OSError as error:
    assert error.errno == errno.EFBIG
else:
    raise AssertionError("a larger file was written")
most, hardest = resource.getrlimit(resource.RLIMIT_NPROC)
assert most == hardest > 4096
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
threads = [threading.Thread(target=lambda: None) for _ in range(100)]
for thread in threads:
    thread.start()
limit_files(5000)  # none is raised again
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (1000, 1000)
"""


@pytest.mark.parametrize(
    "name, limit, found",
    [
        ("memory.max", "1000", 1000),
        ("memory.max", "max", 5000),
        ("memory/memory.limit_in_bytes", "1000", 1000),
        ("memory/memory.limit_in_bytes", "9223372036854771712", 5000),
        ("cgroup.procs", "1", 5000),
    ],
)
def test_the_memory_of_a_container_is_what_its_cgroup_allows(
    name: str, limit: str, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_CGROUPS", tmp_path)
    monkeypatch.setattr("fxlib_workers.process.limits.psutil.virtual_memory", lambda: SimpleNamespace(total=5000))
    (file := tmp_path / name).parent.mkdir(exist_ok=True)
    file.write_text(f"{limit}\n")
    assert limits.host_memory_bytes() == found


@pytest.mark.slow
def test_files_and_processes_are_limited_for_good_and_threads_still_start(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "file")], check=True, cwd=Path(__file__).parents[3])
