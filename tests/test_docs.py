"""Every Python example of the documents runs as it is printed, and their links lead somewhere."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxlib.cli.main import _parser
from tests.shared.forked import Module, python
from tests.shared.real_service import adopt, real_service, scripted_worker

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PYTHON = re.compile(r"^```python\n(?!# \w+\.py\n)", re.MULTILINE)
"""Python that is no file of a program."""
# The architecture page's Python is a list of signatures.
EXAMPLES = [each for each in DOCUMENTS if PYTHON.search(each.read_text()) and each.name != "architecture.md"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sections(path: Path) -> set[str]:
    """Return the headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_service(tmp_path_factory.mktemp("service")) as address, scripted_worker(address, adopt):
        yield address


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("document", EXAMPLES, ids=name)
def test_the_examples_run(document: Path, address: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ran = Module("tests.run_document", str(document), address, log=log, out=tmp_path / "out", folder=tmp_path)
    assert ran.wait(280) == 0, log.read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_files_that_a_page_names_are_there(document: Path) -> None:
    others = ("CHANGELOG.md", "benchmarks.md", "trackers.md")  # the past; rows; metrics, whose names have slashes
    text = document.read_text() if document.name not in others else ""
    folders = "fxlib|service|workers|tests|benchmarks|examples"
    named = re.findall(rf"(?<![\w/.])((?:{folders})/[a-z_/]*[a-z_](?:\.py)?)(?![\w/.*]|\.\w)", text)
    assert [each for each in named if not (ROOT / each).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_the_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", document.read_text())
    found = [(document.parent / path if path else document, section) for path, section in links]
    assert [path for path, _ in found if not path.exists()] == []
    assert [(name(path), section) for path, section in found if section and section not in sections(path)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_documented_command_exists(document: Path) -> None:
    known = set(_parser().format_help().split())
    documented = re.findall(r"^\$ fxlib ([a-z]+)", document.read_text(), re.MULTILINE)
    assert set(documented) <= known


def programs(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the files that a page prints, by name, and the commands that run them."""
    files = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ ((?:python|torchrun) [^#\n]*?\w+\.py)", path.read_text(), re.MULTILINE)
    return dict(files), [each for each in commands if each.split()[-1] in dict(files)]


PROGRAMS = [(document, command) for document in DOCUMENTS for command in programs(document)[1]]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("document, command", PROGRAMS, ids=[each.split()[-1] for _, each in PROGRAMS])
def test_a_program_runs_as_pasted_from_a_fresh_folder(
    document: Path, command: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = str(free_port())
    files = programs(document)[0]
    for file, text in files.items():
        (tmp_path / file).write_text(text.replace("localhost:8470", address).replace("29500", port))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHON_EXEC", str(python(tmp_path)))  # of torchrun's ranks
    out, log = tmp_path / "out", tmp_path / "log"
    ran = Module(*_module(command), log=log, out=out, folder=tmp_path)
    assert ran.wait(280) == 0, log.read_text() + out.read_text()
    asks = "fxlib.connect(" in files[command.rsplit(maxsplit=1)[-1]]
    assert ("ADOPT the rewritten module" in out.read_text()) == asks


def _module(command: str) -> list[str]:
    """Return the module that a command runs as its program, and the arguments."""
    match command.split():
        case ["python", "-m", *words]:
            return words
        case ["torchrun", *words]:
            return ["torch.distributed.run", *words]
        case ["python", file]:
            return [file.removesuffix(".py")]
    raise AssertionError(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_file_that_a_page_prints_is_run_or_used_by_one_that_is(document: Path) -> None:
    files, commands = programs(document)
    run = [files[command.split()[-1]] for command in commands]
    used = {module for text in run for module in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)}
    used |= {each for text in files.values() for each in re.findall(r"^import (\w+)$", text, re.MULTILINE)}
    unused = {file for file in files if file.removesuffix(".py") not in used} - {each.split()[-1] for each in commands}
    assert unused == ({"train.py"} if document.name == "README.md" else set())  # README's is a part of the tutorial's


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_readme_s_launcher_is_that_of_the_tutorial_in_fifteen_lines() -> None:
    launcher = programs(ROOT / "README.md")[0]["train.py"]
    assert launcher in programs(ROOT / "docs" / "tutorials" / "launcher.md")[0]["train.py"]
    assert len(launcher.splitlines()) <= 15


def test_the_tutorial_s_program_is_short_and_has_a_few_lines_of_fxlib() -> None:
    files = programs(ROOT / "docs" / "tutorials" / "launcher.md")[0]
    lines = [line for text in files.values() for line in text.strip().splitlines()]
    assert len(lines) <= 80
    assert len([line for line in lines if "fxlib" in line]) <= 12


@pytest.mark.slow
def test_the_pages_are_a_site_without_dead_links(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    command = [str(mkdocs), "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    listed = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in listed] == []
