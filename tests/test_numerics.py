"""What claims the same bits claims them whatever code path the processor's libraries take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLAIMS = (
    "tests/models/test_whole_models.py::test_a_model_comes_in_whole[llama]",
    "tests/models/test_whole_models.py::test_a_model_comes_in_whole[seresnet10]",
    "tests/models/test_whole_models.py::test_a_model_in_training_draws_and_counts_as_it_did[bert]",
    "tests/serialization/test_to_folder.py::test_names_and_tensors_of_any_kind_make_a_package",
    "tests/random_programs/test_schedule_keeps_programs.py::test_many_scheduled_programs_do_what_the_programs_do_and_have_calls_that_move",
)
"""Tests that compare bits: of exports, of packages in another process, and of rewritten programs."""

SETTINGS = (
    {"MKL_CBWR": "AUTO", "ATEN_CPU_CAPABILITY": "avx2"},
    {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"},
)

PROGRAM = """
import os, sys
import pytest
from tests.test_numerics import CLAIMS, SETTINGS

class Forked:
    def pytest_runtestloop(self):
        import torch._dynamo
        import torch.export
        import transformers.models.bert.modeling_bert
        import transformers.models.llama.modeling_llama

        # Libraries choose their path when they first compute: what is imported leaves that to each fork.
        for number, settings in enumerate(SETTINGS):
            if os.fork() == 0:
                os.dup2(os.open(f"{sys.argv[1]}/{number}", os.O_WRONLY | os.O_CREAT), 1)
                os.environ.update(settings)
                print(torch.backends.cpu.get_cpu_capability(), flush=True)
                return  # pytest goes on
        os._exit(any([os.wait()[1] for _ in SETTINGS]))

sys.exit(pytest.main(["-sq", "-p", "no:cacheprovider", *CLAIMS], plugins=[Forked()]))
"""
"""Runs the claims under each of the settings, once all that they need is imported."""


@pytest.mark.slow
def test_bits_are_the_same_on_other_code_paths(tmp_path: Path) -> None:
    # None of the settings of the run that this is part of: a worker of pytest-xdist is told of its own by variables.
    kept = {key: each for key, each in os.environ.items() if not key.startswith("PYTEST_")}
    kept["FXLIB_PROGRAMS"] = "10"  # how many there are is asked elsewhere; here, what they compute with
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=kept)
    said = [file.read_text() for file in sorted(tmp_path.iterdir())]
    assert ran.returncode == 0, "\n".join([*said, ran.stdout, ran.stderr])
    assert [f"{len(CLAIMS)} passed" in each for each in said] == [True] * len(SETTINGS)
    assert said[1].startswith("DEFAULT")
