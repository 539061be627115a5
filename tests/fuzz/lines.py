"""Measures how many lines of each parser its corpus reaches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fxlib
from fxlib.utils.text import table
from tests.fuzz.targets import TARGETS

_FOLDERS = ("wire", "protocol", "client/answer_policy.py", "client/own_objects.py", "client/value_numbering.py")
_ROOT = Path(fxlib.__file__).parent


def report(corpora: Path, names: Sequence[str]) -> list[str]:
    """Read each corpus once, and return a table of the lines within functions that were reached, by file."""
    wanted = {str(path): _lines_of(path) for each in _FOLDERS for path in _files(_ROOT / each)}
    reached: dict[str, set[int]] = {name: set() for name in wanted}

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            reached[frame.f_code.co_filename].add(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename in reached else None

    for name in names:
        target = TARGETS[name]
        inputs = [path.read_bytes() for path in sorted((corpora / name).glob("*"))]
        before = sys.gettrace()
        sys.settrace(call)
        try:
            for data in [*target.seeds(), *inputs]:
                try:
                    target.read(data)
                except target.refusals:
                    continue
        finally:
            sys.settrace(before)
    rows = [["file", "lines", "reached", ""]]
    for path, lines in wanted.items():
        if lines:
            rows.append(_row(str(Path(path).relative_to(_ROOT.parent)), len(lines), len(lines & reached[path])))
    for folder in _FOLDERS[:2]:
        inside = [path for path in wanted if path.startswith(f"{_ROOT / folder}/")]
        count = sum(len(wanted[path]) for path in inside)
        rows.append(_row(f"fxlib/{folder}", count, sum(len(wanted[path] & reached[path]) for path in inside)))
    return table(rows, right=(1, 2, 3), indent="")


def _row(name: str, lines: int, reached: int) -> list[str]:
    return [name, str(lines), str(reached), f"{reached / lines:.0%}"]


def _files(path: Path) -> list[Path]:
    return [path] if path.suffix else sorted(path.glob("*.py"))


def _lines_of(path: Path) -> set[int]:
    """Return the numbers of the lines of functions: what a module runs when it is imported does not count."""
    module = compile(path.read_text(), str(path), "exec")
    return {number for code in _codes(module) if code.co_flags & 0x2 for number in _numbers(code)}


def _numbers(code: CodeType) -> Iterator[int]:
    for _, _, number in code.co_lines():
        if number is not None and number != code.co_firstlineno:
            yield number


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)
