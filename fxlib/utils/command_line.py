"""A parser of command lines that names the nearest word to one that it does not know."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from typing_extensions import override

from fxlib.utils.text import did_you_mean

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
        question = self._meant(message)
        super().error(f"{message}. {question}" if question else message)

    def _meant(self, message: str) -> str:
        if found := _CHOICE.search(message):
            return did_you_mean(found[1], [each.strip(" '") for each in found[2].split(",")])
        _, colon, unknown = message.partition("unrecognized arguments: ")
        option = next((each.partition("=")[0] for each in unknown.split() if each.startswith("-")), "")
        return did_you_mean(option, self._option_string_actions) if colon else ""
