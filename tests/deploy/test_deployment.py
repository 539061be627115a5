"""The files of `deploy/` name what there is, and are valid where a tool can say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from fxlib_service.config import APPLICATION as SERVICE
from fxlib_workers.config import APPLICATION as WORKER
from fxlib_workers.process import cgroup

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.suffix in (".Dockerfile", ".yaml", ".yml", ".service"))
DOCKERFILES = sorted(DEPLOY.glob("docker/*.Dockerfile"))
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
NOT_OPTIONS = {"FXLIB_CONFIG", "FXLIB_RUNTIME_DIR", "FXLIB_PROMETHEUS_URL"}


def name(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_variable_is_an_option(path: Path) -> None:
    known = {variable for application in (SERVICE, WORKER) for _, variable, _ in application.options()}
    assert set(re.findall(r"\bFXLIB_[A-Z_]+", path.read_text())) <= known | NOT_OPTIONS


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_an_image_copies_what_there_is_and_runs_a_module_as_nobody_in_particular(path: Path) -> None:
    text = path.read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    for each in " ".join(copied).split():
        assert (ROOT / each).exists()
        assert each in sent
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    (module,) = re.findall(r'^ENTRYPOINT \["python", "-P", "-m", "([\w.]+)"[^]]*\]$', text, re.MULTILINE)
    assert module in ("fxlib_service", "fxlib_workers", "fxlib.cli")


@pytest.mark.parametrize("path", DOCKERFILES, ids=name)
def test_an_image_is_written_as_hadolint_wants_it(path: Path) -> None:
    linted = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), path], capture_output=True, text=True, check=False
    )
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("others", [[], ["compose.postgres.yaml"]], ids=str)
def test_compose_builds_what_there_is_and_listens_on_this_machine_alone(others: list[str]) -> None:
    told: dict[str, Any] = {}
    for each in ("compose.yaml", *others):
        told = _merged(told, yaml.safe_load((DEPLOY / each).read_text()))
    for service in told["services"].values():
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        for mounted in service.get("volumes", []):
            source = mounted.partition(":")[0]
            assert source in told["volumes"] or (DEPLOY / source).exists()
        assert set(service.get("secrets", [])) <= set(told["secrets"])
        assert set(service.get("depends_on", {})) <= set(told["services"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert set(service.get("networks", {})) <= {"default", *told.get("networks", {})}


def _merged(below: Any, above: Any) -> Any:
    """Return one file of Compose with another on top, by Compose's own rules as far as these files need them."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {key: _merged(below.get(key), above.get(key)) for key in {**below, **above}}
    if isinstance(below, list) and isinstance(above, list):
        return below + above
    return below if above is None else above


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs `systemd-analyze`, of the package systemd")
@pytest.mark.parametrize("path", UNITS, ids=name)
def test_units_are_valid(path: Path, tmp_path: Path) -> None:
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("/opt/fxlib/bin/python", sys.executable))
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    younger = "Unknown key 'DelegateSubgroup' in section [Service]"  # to systemd before 254
    found = [line for line in ran.stderr.splitlines() if younger not in line]
    assert (ran.returncode, found) == (0, [])


def test_the_folder_of_the_unit_s_token_is_one_that_the_service_takes() -> None:
    """It takes none that other users may enter, which is what systemd makes unless it is told otherwise."""
    unit = (DEPLOY / "systemd" / "fxlib-service.service").read_text()
    assert "RuntimeDirectory=fxlib\nRuntimeDirectoryMode=0700\n" in unit
    assert "FXLIB_RUNTIME_DIR=%t/fxlib" in unit


def test_the_worker_s_unit_runs_in_a_group_beside_which_it_may_make_others(tmp_path: Path) -> None:
    """In the group that systemd delegates itself, it could not: only leaves hold processes."""
    unit = (DEPLOY / "systemd" / "fxlib-worker.service").read_text()
    (subgroup,) = re.findall(r"^DelegateSubgroup=(\w+)$", unit, re.MULTILINE)
    (controllers,) = re.findall(r"^Delegate=(.*)$", unit, re.MULTILINE)
    delegated = tmp_path / "fxlib-worker.service"
    (delegated / subgroup).mkdir(parents=True)
    (delegated / "cgroup.subtree_control").write_text(controllers)
    with (
        mock.patch.object(cgroup, "_own_groups", return_value={"": delegated / subgroup}),
        mock.patch.object(cgroup, "_is_delegated", delegated.__eq__),
    ):
        assert list(cgroup._parents(1 << 30, 64)) == [delegated]


def test_the_worker_s_unit_shares_the_lock_of_the_host_with_workers_of_users() -> None:
    unit = (DEPLOY / "systemd" / "fxlib-worker.service").read_text()
    assert "PrivateTmp=yes" in unit  # so that /tmp and /var/tmp are others there
    assert WORKER.read([], {}).host_lock.parent == Path("/dev/shm")  # noqa: S108 - which it has in common


def test_the_readme_s_file_of_options_is_one(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    (file := tmp_path / "fxlib.toml").write_text(shown)
    port = SERVICE.read(["--config", str(file)], {}).listen.port
    assert str(WORKER.read(["--config", str(file)], {}).token_file) == f"/run/fxlib/{port}.token"
