"""One word for one concept: what the glossary has retired is used nowhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"


def listed(heading: str) -> frozenset[str]:
    """Return the words in the first column of the glossary's table below a heading."""
    section = GLOSSARY.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\w, ]+) \|", section, re.MULTILINE)
    return frozenset(word for row in rows for word in row.split(", ")) - {"not"}


RETIRED = listed("Words that are not used")
NO_NAMES = listed("Words that are not names")
FINISHED = [
    *(
        f"fxlib/{folder}"
        for folder in (
            "analysis",
            "batch",
            "cli",
            "capture",
            "client",
            "dashboard",
            "equivalence",
            "inspection",
            "integrations",
            "pages",
            "passes",
            "pipeline",
            "profiling",
            "protocol",
            "ps",
            "recipes",
            "rules",
            "runtime",
            "serialization",
            "spec",
            "utils",
            "wire",
            "zoo",
        )
    ),
    *(f"fxlib/{file}.py" for file in ("__init__", "config", "errors", "reasons", "render")),
    "service/fxlib_service",
    "workers/fxlib_workers",
]
"""Folders and files whose names and docstrings follow the glossary's third table and `FRAGMENTS`; others join them."""
FRAGMENTS = ("Of", "That", "Those", "What", "Which", "Where")
"""Words with which no docstring begins: a sentence needs a subject, and an attribute's docstring says what it is."""
PUBLIC = {"place"}  # `fxlib.Culprit.place`
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "protos/**/*.proto", "examples/**/*.py")
    for path in sorted(ROOT.glob(pattern))
    if path != GLOSSARY
]
SOURCES = [
    path
    for folder in ("fxlib", "service", "workers", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]


def words(text: str) -> set[str]:
    """Return the words of a text, and those that make its identifiers up, in small letters; not others' own names."""
    return {each.lower() for each in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text.replace("TensorBoard", ""))}


def identifiers(path: Path) -> Iterator[str]:
    """Yield the names that a file gives to itself, classes, functions, arguments and variables."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file: of the module, of classes and functions, and those below attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        for each in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.value.value.strip()


def finished() -> list[Path]:
    """Return the files below `FINISHED`."""
    files = [
        file for each in FINISHED for file in ([ROOT / each] if each.endswith(".py") else (ROOT / each).rglob("*.py"))
    ]
    return sorted(file for file in files if "_pb2" not in file.name)


def test_the_glossary_lists_retired_words() -> None:
    assert {"convoy", "fan", "fans", "kin"} <= RETIRED


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_uses_no_retired_word(path: Path) -> None:
    assert words(path.read_text()) & RETIRED == set()


def test_no_identifier_holds_a_retired_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        if words(f"{path.stem} {path.read_text()}") & RETIRED  # most files need no parsing
        for name in identifiers(path)
        if words(name) & RETIRED
    ]
    assert found == []


def test_no_identifier_of_a_finished_folder_holds_a_word_that_is_not_a_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in finished()
        if words(f"{path.stem} {path.read_text()}") & NO_NAMES  # most files need no parsing
        for name in identifiers(path)
        if name not in PUBLIC and words(re.sub(r"in_place|IN_PLACE", "", name)) & NO_NAMES
    ]
    assert {"apart", "nest", "place"} <= NO_NAMES
    assert found == []


def test_docstrings_of_finished_folders_are_sentences_or_say_what_an_attribute_is() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in finished()
        if any(f'"""{each}' in path.read_text() for each in FRAGMENTS)  # most files need no parsing
        for text in docstrings(path)
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0] in FRAGMENTS
    ]
    assert found == []
