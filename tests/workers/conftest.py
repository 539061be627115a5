"""One Ray for all trials of these tests: it takes seconds to start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from fxlib import TrialOptions
from fxlib.result import Report
from fxlib.workload import Workload
from tests.workers.cases import fill
from tests.workers.trying import ALLOWED, QUICK, Try
from workers.config import TrialSettings
from workers.trials import Trials


@pytest.fixture(scope="package")
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fxlib-test-", dir="/tmp"))  # a socket's path is short
    yield path
    path.rmdir()


@pytest.fixture(scope="package")
def trials(root: Path) -> Iterator[Trials]:
    made = Trials(TrialSettings(allowed_modules=(ALLOWED,), process_memory_bytes=1 << 30), root)
    yield made
    made.end()


@pytest.fixture
def attempt(trials: Trials, tmp_path: Path) -> Try:
    def run(model: nn.Module, workload: Workload, options: TrialOptions = QUICK, **rest: object) -> Report:
        folder = fill(tmp_path / "job", model, workload, options, **rest)  # type: ignore[arg-type]
        return trials.run(folder, lambda *_: None, lambda: None)

    return run
