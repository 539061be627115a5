"""The scheduled program fails as the program does when a server dies: same error, same state on those that live."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shared.forked import Module
from tests.shared.many import many


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", range(1, 1 + many(13), 13))
def test_programs_whose_server_dies_end_alike(first: int, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    world = Module("tests.random_programs.mortal_world", str(first), str(first + 13), log=log, out=out)
    assert world.wait(380) == 0, log.read_text()
    found = json.loads(out.read_text())
    assert len(found) >= 8
    assert sum(each["moved"] for each in found) > 20
    assert sum(each["after"] == each["before"][0] for each in found) >= len(found) - 1  # at the very call, but for one
    for each in found:
        assert each["after"]["error"], each
        assert each["after"] in each["before"], each
