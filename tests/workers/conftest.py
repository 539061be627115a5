"""One Ray for all trials of these tests: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from torch import nn

from fxlib import TrialOptions
from fxlib.spec.report import Report
from fxlib.spec.workload import Workload
from fxlib_workers.trial.driver import TrialDriver
from fxlib_workers.trial.nodes import Nodes, connected
from tests.workers.cases import fill
from tests.workers.trial_settings import ALLOWED, BACKENDS, QUICK, SETTINGS, Try


@pytest.fixture(scope="package")
def root() -> Iterator[Path]:
    with TemporaryDirectory(prefix="fxlib-test-", dir="/tmp") as folder:  # the path of a socket is short
        yield Path(folder)


@pytest.fixture(scope="package")
def trials(root: Path) -> Iterator[TrialDriver]:
    made = TrialDriver(replace(SETTINGS, allowed_modules=(ALLOWED, BACKENDS)), root)
    yield made
    made.end()


@pytest.fixture(scope="package")
def nodes() -> Iterator[Nodes]:
    """A Ray of this process's own, for tests that look into the processes of a trial."""
    with TemporaryDirectory(prefix="fxlib-test-", dir="/tmp") as folder, connected(SETTINGS, Path(folder)) as made:
        yield made


@pytest.fixture
def attempt(trials: TrialDriver, tmp_path: Path) -> Try:
    def run(model: nn.Module, workload: Workload, options: TrialOptions = QUICK, **rest: object) -> Report:
        folder = fill(tmp_path / "job", model, workload, options, **rest)  # type: ignore[arg-type]
        return trials.run(folder, lambda *_: None, lambda: None)

    return run
