"""One line a phase: what happened, and figures as name=value, for people and for log collectors."""

from __future__ import annotations

import json
import logging
import sys

_log = logging.getLogger("fxlib.worker")


def set_up() -> None:
    """Write lines with time and level to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False


def info(event: str, **fields: object) -> None:
    """Tell what happened."""
    _log.info("%s", _line(event, fields))


def warning(event: str, **fields: object) -> None:
    """Tell what went wrong, but not for good."""
    _log.warning("%s", _line(event, fields))


def _line(event: str, fields: dict[str, object]) -> str:
    return " ".join([event, *(f"{name}={_value(value)}" for name, value in fields.items())])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
