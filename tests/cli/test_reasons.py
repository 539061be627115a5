"""What `fxlib reasons` tells, and the page that is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxlib.cli.main import main
from fxlib.reasons import Reason

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reasons.md"


def test_every_reason_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(Reason.__members__)


def test_one_reason_is_explained_however_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", "coalesced", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"COALESCED": "travels in one message with ..."}


def test_an_unknown_reason_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasons", "NOPE"]) == 1
    assert "no reason is called NOPE" in capsys.readouterr().err


def test_the_page_has_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reasons", "--markdown"])
    assert capsys.readouterr().out in PAGE.read_text(), "run: fxlib reasons --markdown, and put it into the page"
