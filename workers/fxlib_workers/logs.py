"""Log lines for people and log collectors: an event, then its figures as name=value.

A module that logs has a logger with its own name: `_LOG = logs.Log(__name__)`.
"""

from __future__ import annotations

import json
import logging
import sys

from fxlib.utils.tracing import TracedFormatter

_ROOT = logging.getLogger("fxlib_workers")


def set_up() -> None:
    """Write the lines of all modules of this process to standard error, with time, level and module."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TracedFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    _ROOT.addHandler(handler)
    _ROOT.setLevel(logging.INFO)
    _ROOT.propagate = False


class Log:
    """The logger of one module.

    Args:
        module: the module's name, below `fxlib_workers`.
    """

    def __init__(self, module: str) -> None:
        self._log = logging.getLogger(module)

    def debug(self, event: str, **fields: object) -> None:
        """Log what helps to understand a decision afterwards."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log what happened."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log what went wrong, where the worker goes on."""
        self._write(logging.WARNING, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._log.isEnabledFor(level):
            self._log.log(
                level, "%s", " ".join([event, *(f"{name}={_value(value)}" for name, value in fields.items())])
            )


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
