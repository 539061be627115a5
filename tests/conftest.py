"""What every test relies on."""

import gc
import os
import sys
from collections.abc import Generator
from typing import Any

# Nothing here needs what other packages add to Hypothesis; trio's part imports all of trio in each process.
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from tests.shared import forked

# Where gRPC was used, it starts its threads again in each process that a test forks; a process with threads cannot be
# contained. It reads this when it is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# What OpenVINO and ONNX Runtime make in a test is not kept in the folder of whoever runs it.
os.environ["FXLIB_CACHE"] = ""

# The same programs on every run, so that a failure belongs to a change; `--hypothesis-profile=explore` seeks new ones.
settings.register_profile("fxlib", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "explore", settings.get_profile("fxlib"), derandomize=False, print_blob=True, max_examples=1000
)
settings.load_profile("fxlib")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without looking for garbage: what is imported stays, and there is much of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Have one process, from which the workers' tests fork others, import what these need while tests are collected."""
    if hasattr(config, "workerinput"):
        forked.share()
    elif config.getoption("numprocesses", None):
        forked.begin()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Have several processes that run tests forked, too; a single one may as well import by itself."""
    program = (
        f'import sys; sys.path.insert(0, "{config.rootpath}"); from tests.shared.forked import python_c; python_c()'
    )
    if len(specs) > 1:
        for each in specs:
            each.python = f"{sys.executable} -c '{program}'"
