"""One word for one concept: what the glossary has retired is used nowhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
RETIRED = frozenset(
    word
    for row in re.findall(
        r"^\| ([\w, ]+) \|", GLOSSARY.read_text().partition("## Words that are not used")[2], re.MULTILINE
    )
    for word in row.split(", ")
) - {"not"}
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
