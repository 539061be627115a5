"""The scheduled program fails as the program does when a server dies: same error, same state on those that live."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", [1, 14, 27])
def test_programs_whose_server_dies_end_alike(first: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.random_programs.mortal_world", str(first), str(first + 13)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=380,
    )
    found = json.loads(done.stdout)
    assert len(found) >= 8
    assert sum(each["moved"] for each in found) > 20
    assert sum(each["after"] == each["before"][0] for each in found) >= len(found) - 1  # at the very call, but for one
    for each in found:
        assert each["after"]["error"], each
        assert each["after"] in each["before"], each
