"""Running the command in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fxlib.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def fxlib(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Ran:
        try:
            code = main(arguments)
        except SystemExit as ended:  # argparse: help, or a wrong command line
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run
