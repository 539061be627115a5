"""Output of commands to the terminal: they print only through this file, so that nothing they print can steer it.

Text from a service, a file or another user's job may hold escape sequences, or characters that turn the direction of
text. Here they become blanks, wherever they come from.
"""

from __future__ import annotations

import json
import sys
from typing import TextIO

from fxlib.utils.text import as_json, plain_lines


def say(text: object = "", *, to: TextIO | None = None) -> None:
    """Write lines of text, to standard output unless another stream is given; nothing in them steers a terminal."""
    print(plain_lines(str(text)), file=sys.stdout if to is None else to, flush=True)


def say_json(value: object, *, indent: int | None = 2) -> None:
    """Write a value as JSON, in which every character that is not plain ASCII is escaped."""
    print(json.dumps(as_json(value), indent=indent, allow_nan=False).replace("\x7f", "\\u007f"), flush=True)


def warn(text: object) -> None:
    """Write lines of text to standard error, as `say` does."""
    say(text, to=sys.stderr)
