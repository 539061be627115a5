"""Labels, `KEY=VALUE`: a listing can select jobs by label, and a job can require labels of its worker; namespaces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

MAX_LABELS: Final = 32
"""Maximum number of labels that a job or a worker may have, and that a job may require."""

_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_VALUE_LENGTH: Final = 256
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def is_namespace(text: str) -> bool:
    """Return whether a text is a valid name of a namespace."""
    return _NAMESPACE.fullmatch(text) is not None


def read_label(text: str) -> tuple[str, str]:
    """Read KEY=VALUE.

    Raises:
        ValueError: the text is not a label.
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"{text[:64]!r} is not KEY=VALUE")
    return key, value


def show_labels(labels: Mapping[str, str]) -> str:
    """Format labels on one line, sorted by key."""
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def problems_of(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each problem with labels: the key at fault, truncated for display, and the rest of a sentence.

    The key is empty if there are too many labels; only the first ones are then checked.
    """
    if len(labels) > MAX_LABELS:
        yield "", f"must be at most {MAX_LABELS}"
    for key, value in list(labels.items())[:MAX_LABELS]:
        if not _KEY.fullmatch(key):
            yield f"{key[:63]!r}", "must be named by up to 63 letters, digits or ._/-"
        if len(value) > _VALUE_LENGTH or not (not value or value.isprintable()):
            yield f"{key[:63]!r}", f"must be one line of at most {_VALUE_LENGTH} characters"


def may_run(where: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether a job that requires the labels `where` may run on a worker with these labels."""
    return where.items() <= labels.items()
