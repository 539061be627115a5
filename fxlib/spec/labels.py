"""Labels, `KEY=VALUE`: jobs are found by theirs, and a job may ask for a worker that has some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

MOST: Final = 32
"""The most labels that a job or a worker may have, and that a job may ask for."""

_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_VALUE_LENGTH: Final = 256


def read_label(text: str) -> tuple[str, str]:
    """Read KEY=VALUE.

    Raises:
        ValueError: it is none.
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"{text[:64]!r} is not KEY=VALUE")
    return key, value


def show_labels(labels: Mapping[str, str]) -> str:
    """Write labels on one line, sorted by key."""
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def problems_of(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with labels: the key at fault, cut to a length that can be shown, and a sentence's end.

    The key is empty where they are too many; then only the first ones are looked at.
    """
    if len(labels) > MOST:
        yield "", f"must be at most {MOST}"
    for key, value in list(labels.items())[:MOST]:
        if not _KEY.fullmatch(key):
            yield f"{key[:63]!r}", "must be named by up to 63 letters, digits or ._/-"
        if len(value) > _VALUE_LENGTH or not (not value or value.isprintable()):
            yield f"{key[:63]!r}", f"must be one line of at most {_VALUE_LENGTH} characters"


def may_run(where: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a job that asks for a worker with all labels of `where` may run on one with these labels."""
    return where.items() <= labels.items()
