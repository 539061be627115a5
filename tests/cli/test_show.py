"""A saved graph, printed without being executed, and what `fxlib reasons` tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fxlib as library
from fxlib.cli.main import main
from fxlib.reasons import Reason
from fxlib.runtime import is_call
from tests.cli.conftest import Run
from tests.cli.test_hostile_service import EVIL, harmless
from tests.client.models import Clicks

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reasons.md"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "clicks.fxg"
    library.save(library.capture(Clicks()), path)
    return str(path)


def test_nodes_and_remote_calls_with_their_contracts(fxlib: Run, file: str) -> None:
    out = fxlib("show", file).out
    assert out.startswith("Clicks: ")
    nodes, calls = out.split("remote calls\n")
    assert "call_module" in nodes
    assert "fxlib.ps:lookup" in calls
    assert "reads tables; gradient fxlib.ps:push" in calls
    assert "models.py:" in calls


def test_its_code(fxlib: Run, file: str) -> None:
    assert fxlib("show", file, "--code").out.startswith("def forward(self, x")


@pytest.mark.parametrize("command", ["show", "analyze"])
def test_a_file_of_a_stranger_steers_no_terminal(fxlib: Run, tmp_path: Path, command: str) -> None:
    module, path = library.capture(Clicks()), str(tmp_path / "evil.fxg")
    call = next(node for node in module.graph.nodes if is_call(node))
    call.meta["source"] = EVIL
    call.args = (EVIL, *call.args[1:])
    library.save(module, path)
    inputs = ("--input", "4x8", "--input", "4:int64") if command == "analyze" else ()
    assert "owned" in harmless(fxlib(command, path, *inputs).out)


@pytest.mark.slow
def test_what_each_pass_of_a_recipe_does_to_it(fxlib: Run, file: str) -> None:
    out = fxlib("show", file, "--diff", "schedule").out
    assert "+++ after split_calls" in out
    assert "issue_call(" in out
    assert "dead_code: no change" in out
    assert "\x1b[" not in out


def test_the_same_for_programs(fxlib: Run, file: str) -> None:
    told = json.loads(fxlib("show", file, "--json").out)
    assert told.keys() == {"nodes", "calls", "parameters"}
    assert told["calls"][0]["function"] == "fxlib.ps:lookup"
    assert told["parameters"]["top.weight"] == [1, 8]


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x80\x04\x95pickle"])
def test_a_file_that_is_no_graph_is_one_line(fxlib: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.fxg"
    path.write_bytes(content)
    ran = fxlib("show", str(path))
    assert (ran.code, ran.out) == (1, "")
    assert len(ran.err.splitlines()) == 1


def test_a_file_that_is_not_there_is_one_line(fxlib: Run) -> None:
    ran = fxlib("show", "no-such-file.fxg")
    assert (ran.code, ran.err) == (2, "fxlib: no-such-file.fxg: No such file or directory\n")


def test_every_reason_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(Reason.__members__)


def test_one_reason_is_explained_however_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", "coalesced", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"COALESCED": "travels in one message with ..."}


def test_an_unknown_reason_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", "NOPE"]) == 2
    assert "no reason is called NOPE" in capsys.readouterr().err


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reasons", "--markdown"])
    assert capsys.readouterr().out in PAGE.read_text(), "run: fxlib reasons --markdown, and put it into the page"


def test_passes_and_recipes_fit_the_terminal(fxlib: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = fxlib("passes").out
        assert max(map(len, out.splitlines())) <= columns
        for name in ("schedule", "overlap_calls", "quantize"):
            assert f"\n  {name}\n" in out
