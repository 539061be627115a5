"""What a process may not do once it has limited itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_files_and_processes_are_limited_for_good_and_threads_still_start(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "file")], check=True, cwd=Path(__file__).parents[3])
