"""What has to agree with each other does: stubs with protocol, versions with pins, commands with documents."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from fxlib import config

ROOT = Path(__file__).parent.parent
FOLDERS = [ROOT / each for each in (".", "service", "workers")]
DESCRIPTIONS = [tomllib.loads((each / "pyproject.toml").read_text()) for each in FOLDERS]
PROJECTS = [each["project"] for each in DESCRIPTIONS]
OURS = {project["name"] for project in PROJECTS}
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PUBLIC_MODULES = {"fxlib", "fxlib.ps", "fxlib.ps.local", "fxlib.render"}
"""The modules whose names in `__all__` are for programs; these names, and the modules, are all that examples import."""
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
APPLICATIONS = ["ray", "fxlib_service", "fxlib_workers", "prometheus_client", "sqlalchemy"]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, (line for line in lines if line[0] != "#"))}


def requirements() -> list[Requirement]:
    groups = [
        group
        for project in PROJECTS
        for group in [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    ]
    return [needed for line in dict.fromkeys(chain(*groups)) if (needed := Requirement(line)).name not in OURS]


def stubs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*_pb2*.py*")}


def modules_in(folder: Path) -> list[Path]:
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    return files + [path for path in folder.iterdir() if (path / "__init__.py").exists()]


def ours(module: str) -> bool:
    return module.partition(".")[0] == "fxlib"


def is_fxlib(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "fxlib"


def is_public(module: str, name: str) -> bool:
    whole = f"{module}.{name}"
    return whole in PUBLIC_MODULES or (module in PUBLIC_MODULES and name in import_module(module).__all__)


def test_the_range_of_torch_that_is_installed_is_the_one_that_a_launcher_checks() -> None:
    (torch,) = (needed for needed in requirements() if needed.name == "torch")
    first, after = (".".join(map(str, version)) for version in config.TORCH_VERSIONS)
    assert torch.specifier == SpecifierSet(f">={first},<{after}")
    assert torch.specifier.contains(str(pins()["torch"].specifier).removeprefix("=="))


def test_committed_stubs_are_what_the_protocol_generates(tmp_path: Path) -> None:
    protos = sorted(str(path) for path in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'protos'}", *outputs, *protos]
    subprocess.run(command, check=True)

    fresh, committed = stubs(tmp_path / "fxlib" / "v1"), stubs(ROOT / "fxlib" / "v1")

    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    assert not stale, "run `make protos`"


@pytest.mark.slow
def test_the_library_loads_no_application() -> None:
    program = f"import sys, fxlib; print(*sorted(sys.modules.keys() & {set(APPLICATIONS)}))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == []


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project["name"])
def test_the_installed_version_is_the_project_s(project: dict[str, Any]) -> None:
    assert version(project["name"]) == project["version"], "run `make install`"


def test_the_applications_are_of_the_library_s_version() -> None:
    library, *applications = PROJECTS
    assert [(other["version"], other["dependencies"][0]) for other in applications] == [
        (library["version"], f"fxlib=={library['version']}")
    ] * len(applications)


@pytest.mark.slow
def test_each_wheel_installs_one_package(tmp_path: Path) -> None:
    needed = {each for description in DESCRIPTIONS for each in description["build-system"]["requires"]}
    builder = tmp_path / "builder"  # one for all three: by itself, pip makes one for each
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), *map(str, FOLDERS)]
    subprocess.run([*pip, "install", "--target", str(builder), *needed], check=True, capture_output=True)
    subprocess.run(build, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(builder)})
    installed = []
    for wheel in sorted(tmp_path.glob("*.whl")):
        with zipfile.ZipFile(wheel) as files:
            tops = {name.split("/")[0] for name in files.namelist()}
        installed.append({top for top in tops if not top.endswith(".dist-info")})
    assert installed == [{"fxlib"}, {"fxlib_service"}, {"fxlib_workers"}]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_a_requirement_is_pinned_to_a_version_that_it_allows(requirement: Requirement) -> None:
    pinned = str(pins()[canonicalize_name(requirement.name)].specifier).removeprefix("==")
    assert pinned in requirement.specifier


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_documented_make_command_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documented = set(re.findall(r"(?:^|`|&& |\$ )make ([a-z-]+)", document.read_text(), re.MULTILINE))
    assert documented <= targets


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fxlib", "fxlib_service", "fxlib_workers"])
def test_every_folder_of_three_modules_or_more_has_layers_that_leave_no_module_out(name: str) -> None:
    (package,) = (found for folder in FOLDERS if (found := folder / name / "__init__.py").exists())
    contracts = DESCRIPTIONS[0]["tool"]["importlinter"]["contracts"]
    layered = {each for it in contracts if it["type"] == "layers" and it.get("exhaustive") for each in it["containers"]}
    independent = {each for it in contracts if it["type"] == "independence" for each in it["modules"]}

    folders = {
        ".".join(init.parent.relative_to(package.parents[1]).parts): modules_in(init.parent)
        for init in package.parent.rglob("__init__.py")
    }

    large = {folder for folder, modules in folders.items() if len(modules) >= 3 and f"{folder}.*" not in independent}
    assert large - layered == set(), "name its modules in a contract of import-linter's, in pyproject.toml"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_imports_nothing_of_the_library_but_public_names(example: Path) -> None:
    program = list(ast.walk(ast.parse(example.read_text())))
    plain = {each.name for node in program if isinstance(node, ast.Import) for each in node.names}
    named = {
        (node.module or "", each.name) for node in program if isinstance(node, ast.ImportFrom) for each in node.names
    }
    asked = {("fxlib", node.attr) for node in program if isinstance(node, ast.Attribute) and is_fxlib(node.value)}

    internal = {module for module in plain if ours(module)} - PUBLIC_MODULES
    internal |= {f"{module}.{name}" for module, name in named | asked if ours(module) and not is_public(module, name)}
    assert not internal
