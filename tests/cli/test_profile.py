"""Profiles from a shell."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import fxlib as library
from fxlib import Workload
from fxlib.ps.local import local
from fxlib.spec.profile import CallProfile, NodeProfile, Opaque, Profile, ServerProfile, Spread
from tests.cli.conftest import Run
from tests.cli.test_hostile_service import harmless
from tests.client.models import Clicks, workload
from tests.shared.forked import Module

PROFILE = Profile(
    calls=(
        CallProfile(
            call="lookup",
            function="my.ps:lookup",
            to="ps\x1b[2J0\nforged",
            request_bytes=2048,
            response_bytes=3 << 20,
            returns=Opaque(),
            issue_s=1e-4,
            wait_s=1e-5,
            service_s=Spread.of([2e-3]),
        ),
    ),
    nodes=(NodeProfile(node="bottom", seconds=3e-3, output_bytes=128),),
    servers=(ServerProfile(name="ps0", round_trip_s=3e-4, concurrency=4, bytes_per_s=1e9),),
    steps=10,
    notes=("something was not measured\nforged",),
)


@contextmanager
def world() -> Iterator[tuple[nn.Module, Workload]]:
    """A world, as `fxlib profile` takes it."""
    asked = workload()
    with local(asked.servers):
        yield library.capture(Clicks()), asked


def no_world() -> int:
    return 3


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "clicks.fxp"
    library.save_profile(PROFILE, path)
    return str(path)


def test_a_profile_is_shown_with_calls_servers_and_local_work(fxlib: Run, file: str) -> None:
    out = fxlib("show", file).out
    assert out.startswith("1 remote calls, 1 local nodes; 3.0 ms forward's local work")
    for part in ("my.ps:lookup", "2.0 KiB", "3.0 MiB", "100 us", "2.0 ms", "bottom", "something was not measured"):
        assert part in out


def test_what_is_shown_steers_no_terminal(fxlib: Run, file: str) -> None:
    harmless(fxlib("show", file).out)


def test_the_same_for_programs(fxlib: Run, file: str) -> None:
    told = json.loads(fxlib("show", file, "--json").out)
    assert told["calls"][0]["function"] == "my.ps:lookup"
    assert told["servers"][0]["concurrency"] == 4


def test_a_profile_has_no_code(fxlib: Run, file: str) -> None:
    ran = fxlib("show", file, "--code")
    assert (ran.code, len(ran.err.splitlines())) == (1, 1)


def test_a_profile_that_is_none_is_one_line(fxlib: Run, file: str) -> None:
    Path(file).write_bytes(Path(file).read_bytes()[:-1])
    for ran in (fxlib("show", file), fxlib("optimize", "tests.client.models:made", "--profile", file)):
        assert ran.code == 1
        assert len(ran.err.splitlines()) == 1


def test_a_profile_that_is_not_there_is_one_line(fxlib: Run) -> None:
    ran = fxlib("optimize", "tests.client.models:made", "--profile", "none.fxp")
    assert (ran.code, ran.err) == (2, "fxlib: none.fxp: No such file or directory\n")


@pytest.mark.parametrize(
    "name, problem",
    [("jobs", "not of the form"), ("tests.cli.test_profile:no_world", "returned int, not a context manager")],
)
def test_a_world_that_is_none_is_one_line(fxlib: Run, tmp_path: Path, name: str, problem: str) -> None:
    ran = fxlib("profile", name, "-o", str(tmp_path / "clicks.fxp"))
    assert ran.code == 2
    assert problem in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.slow
def test_a_model_is_measured_in_its_world(tmp_path: Path) -> None:
    path = tmp_path / "clicks.fxp"
    out, log = tmp_path / "out", tmp_path / "log"
    asked = ["profile", "tests.cli.test_profile:world", "-o", str(path), "--json"]
    assert Module("fxlib.cli", *asked, log=log, out=out).wait(280) == 0, log.read_text()
    (call,) = library.load_profile(path).calls
    assert (call.function, call.to) == ("fxlib.ps:lookup", "ps0")
    assert torch.Size([4, 8]) == call.returns.shape  # type: ignore[union-attr]
    assert json.loads(out.read_text())["calls"][0]["function"] == "fxlib.ps:lookup"
