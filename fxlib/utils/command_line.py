"""A parser of command lines that names the nearest word to one that it does not know."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from typing_extensions import override

_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the option or the choice that was probably meant.

    A command reports its own unknown options, so that the usage beside the error is the command's.
    """

    @override
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    @override
    def error(self, message: str) -> NoReturn:
        super().error(message + self._meant(message))

    def _meant(self, message: str) -> str:
        if found := _CHOICE.search(message):
            return nearest(found[1], [each.strip(" '") for each in found[2].split(",")])
        _, colon, unknown = message.partition("unrecognized arguments: ")
        option = next((each.partition("=")[0] for each in unknown.split() if each.startswith("-")), "")
        return nearest(option, self._option_string_actions) if colon else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a question that names the known word most like this one; empty if none is."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f". Did you mean {found[0]}?" if found else ""
