"""What handles records of logs while a forward is captured is none of the forward's doing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fxlib.capture.intercept import Call, Interception, suspended


def install(interception: Interception) -> None:
    """Let factories and handlers of log records run unobserved, those of libraries such as Ray among them.

    torch logs what it does while it exports; whether the forward itself logs is seen where it calls the logger.
    """
    for function in (logging.Logger.makeRecord, logging.Logger.handle):
        interception.function(function, _unobserved)


def _unobserved(original: Call) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return original(*args, **kwargs)

    return call
