"""Every Python example of the documents runs as it is printed, and their links lead somewhere."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxlib.cli.main import _parser
from tests.client.real import adopt, real_service, scripted_worker

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# Its Python is a list of signatures.
EXAMPLES = [each for each in DOCUMENTS if "```python" in each.read_text() and each.name != "architecture.md"]


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
    command = [sys.executable, str(ROOT / "tests" / "run_document.py"), str(document), address]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert ran.returncode == 0, ran.stderr


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


def test_the_readme_s_launcher_has_about_fifteen_lines() -> None:
    launcher = (ROOT / "README.md").read_text().split("```python\n")[2].split("```")[0]
    assert len(launcher.strip().splitlines()) <= 16
