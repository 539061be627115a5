"""One Ray for all trials of these tests, and one fork server for a module's: they take seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from torch import nn
from typing_extensions import override

from fxlib import TrialOptions
from fxlib.spec.report import Report
from fxlib.spec.workload import Workload
from fxlib_workers.config import TrialSettings
from fxlib_workers.process.forking import Forker
from fxlib_workers.rewrite.sandbox import REWRITING
from fxlib_workers.trial.driver import TrialDriver
from fxlib_workers.trial.nodes import Nodes, connected
from tests.workers.cases import fill
from tests.workers.trial_settings import ALLOWED, BACKENDS, HOST_MEMORY_BYTES, QUICK, SETTINGS, Try


class Driver(TrialDriver):
    """One whose processes have a folder of their own for temporary files."""

    def __init__(self, settings: TrialSettings, root: Path, temporary: Path) -> None:
        super().__init__(settings, root)
        self._temporary = temporary

    @override
    def start(self) -> None:
        with mock.patch.dict(os.environ, TMPDIR=str(self._temporary)):
            super().start()


@pytest.fixture(scope="package")
def root() -> Iterator[Path]:
    with TemporaryDirectory(prefix="fxlib-test-", dir="/tmp") as folder:  # the path of a socket is short
        yield Path(folder)


@pytest.fixture(scope="package")
def temporary(root: Path) -> Path:
    """The folder that all trials have for temporary files."""
    (made := root / "tmp").mkdir()
    return made


@pytest.fixture(scope="package")
def trials(root: Path, temporary: Path) -> Iterator[TrialDriver]:
    settings = replace(SETTINGS, allowed_modules=(ALLOWED, BACKENDS), host_memory_bytes=HOST_MEMORY_BYTES)
    made = Driver(settings, root, temporary)
    yield made
    made.end()
    assert list(temporary.iterdir()) == []


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


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    made = Forker(REWRITING, tmp_path_factory.mktemp("forker"))
    yield made
    made.end()
