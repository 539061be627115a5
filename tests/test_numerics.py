"""What claims the same bits claims them whatever code path the processor's libraries take."""

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

CLAIMS = (
    "tests/models/test_whole_models.py::test_a_model_comes_in_whole[llama]",
    "tests/models/test_whole_models.py::test_a_model_comes_in_whole[seresnet10]",
    "tests/models/test_whole_models.py::test_a_model_in_training_draws_and_counts_as_it_did[bert]",
    "tests/serialization/test_to_folder.py::test_names_and_tensors_of_any_kind_make_a_package",
    "tests/random_programs/test_schedule_keeps_programs.py::test_a_scheduled_program_does_what_the_program_does",
)
"""Tests that compare bits: of exports, of packages in another process, and of rewritten programs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"MKL_CBWR": "AUTO", "ATEN_CPU_CAPABILITY": "avx2"},
        {"MKL_CBWR": "COMPATIBLE"},
        {"ATEN_CPU_CAPABILITY": "default"},
    ],
    ids=["auto", "compatible", "default"],
)
def test_bits_are_the_same_on_another_code_path(settings: Mapping[str, str]) -> None:
    # None of the settings of the run that this is part of: a worker of pytest-xdist is told of its own by variables.
    kept = {key: each for key, each in os.environ.items() if not key.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CLAIMS],
        check=False,
        capture_output=True,
        text=True,
        env={**kept, **settings},
    )
    assert ran.returncode == 0, ran.stdout
    assert f"{len(CLAIMS)} passed" in ran.stdout
