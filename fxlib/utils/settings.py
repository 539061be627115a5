"""Options of an application, each declared once: as a field of a frozen dataclass.

A declaration has an option's name, its meaning, and how to read a value. It gives rise to

- the flag of the command line: `--lease-seconds 30`,
- the environment variable: `FXLIB_SERVE_LEASE_SECONDS=30`,
- the key of a TOML file that `--config` names: `lease-seconds = 30` in the table `[serve]`,
- the option's row in docs/reference/options.md.

A flag wins over a variable, a variable over the file, and the file over the default.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from fxlib.errors import OptionError
from fxlib.utils.command_line import Parser
from fxlib.utils.text import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONFIG: Final = "FXLIB_CONFIG"
"""Environment variable that names the TOML file, unless `--config` does."""

STARTED_AS: Final = "FXLIB_STARTED_AS"
"""Environment variable by which `fxlib serve` and `fxlib worker` make the application name them in its usage."""

TABLES: Final = ("serve", "worker")
"""The tables that the file may have, one for each command that starts an application."""

GIB: Final = 1 << 30

_OPTION: Final = "fxlib.option"
_GROUP: Final = "fxlib.group"
_TRUTHS: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}

C = TypeVar("C", bound="DataclassInstance")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[T]):
    """How a value is read and written.

    Attributes:
        read: turns text into the value; raises ValueError with a sentence that says what is wrong.
        metavar: the placeholder for the value in help and tables.
        toml: the types that a TOML file may give it as.
        show: turns the value into text that `read` understands.
    """

    read: Callable[[str], T]
    metavar: str
    toml: tuple[type, ...] = (str,)
    show: Callable[[T], str] = str


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise ValueError(f"{text} is not positive")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if value < 0:
        raise ValueError(f"{text} is negative")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number above zero")
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not positive")
    if value > _LARGEST:
        raise ValueError(f"{text} is more than {_LARGEST}")
    return value


_LARGEST: Final = 2**63 - 1
"""The largest count: messages and databases hold no larger integers."""
TEXT: Final = Kind(read=str, metavar="TEXT")
FILE: Final = Kind(read=Path, metavar="FILE")
FOLDER: Final = Kind(read=Path, metavar="DIR")
COUNT: Final = Kind(read=_count, metavar="N", toml=(int,))
BYTES: Final = Kind(read=_count, metavar="BYTES", toml=(int,))
SECONDS: Final = Kind(read=_positive, metavar="SECONDS", toml=(int, float), show="{:g}".format)
DAYS: Final = Kind(read=_not_negative, metavar="DAYS", toml=(int, float), show="{:g}".format)
GIBIBYTES: Final = Kind(
    read=lambda text: int(_positive(f"{_positive(text) * GIB}")),
    metavar="GIB",
    toml=(int, float),
    show=lambda value: f"{value / GIB:g}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of an option.

    Attributes:
        name: the flag without its dashes, which is also the key in the file.
        meaning: what it does, for help and tables.
        kind: how its value is read; None for a switch, which is on or off.
        default: words that describe the default, if its value does not.
        variable: the name of its environment variable, if that does not follow from the option's name.
        repeatable: whether it takes several values: a repeated flag, a variable with commas, an array.
    """

    name: str
    meaning: str
    kind: Kind[Any] | None = TEXT
    default: str = ""
    variable: str = ""
    repeatable: bool = False


def option(
    name: str,
    meaning: str,
    kind: Kind[Any] | None = TEXT,
    *,
    default: str = "",
    variable: str = "",
    repeatable: bool = False,
) -> Mapping[str, Option]:
    """Return the metadata that makes a field of a dataclass an option; see `Option`."""
    declared = Option(name=name, meaning=meaning, kind=kind, default=default, variable=variable, repeatable=repeatable)
    return {_OPTION: declared}


def group(kind: type[DataclassInstance]) -> Mapping[str, type[DataclassInstance]]:
    """Return the metadata of a field whose value is a dataclass with options of its own.

    A group whose default is None is created only if one of its options is given.
    """
    return {_GROUP: kind}


@dataclass(frozen=True, slots=True)
class _Given:
    """A value that was given, and where: by a flag, a variable, or FILE:TABLE.KEY."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Application(Generic[C]):
    """An application with options.

    Attributes:
        command: the command of `fxlib` that starts it; its table in the file and its variables are named after it.
        program: its name in its own help.
        description: what it does, for its help.
        config: the dataclass that declares its options.
    """

    command: str
    program: str
    description: str
    config: type[C]

    def read(self, arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> C:
        """Make the configuration from the command line, the environment and the file.

        Raises:
            OptionError: a value cannot be used; the message names the flag, the variable or the file's key that gave
                it.
            SystemExit: the command line cannot be read, or asks only for help or for the options in force.
        """
        parser = _parser(self, os.environ.get(STARTED_AS, self.program))
        parsed = vars(parser.parse_args(arguments))
        print_options, file = parsed.pop("print-options"), parsed.pop("config") or environment.get(CONFIG)
        given = self._from_file(Path(file)) if file else {}
        given |= self._from_environment(environment)
        given |= {
            name: _Given(tuple(value) if isinstance(value, list) else value, f"--{name}")
            for name, value in parsed.items()
        }
        try:
            config = _make(self.config, given)
        except OptionError as error:
            if error.option not in given:
                raise
            raise error.given_by(given[error.option].where) from None
        if print_options:
            print(json.dumps(dict(_in_force(config, self.config, given)), indent=2))  # noqa: T201 - a command's answer
            raise SystemExit(0)
        return config

    def options(self) -> list[tuple[Option, str, str]]:
        """Return each option with its variable and the words for its default."""
        return [(each, self._variable(each), _default(field, each)) for field, each in _options(self.config)]

    def _variable(self, declared: Option) -> str:
        return declared.variable or f"FXLIB_{self.command}_{declared.name}".upper().replace("-", "_")

    def _from_environment(self, environment: Mapping[str, str]) -> dict[str, _Given]:
        found = {}
        for _, declared in _options(self.config):
            variable = self._variable(declared)
            if text := environment.get(variable):  # an empty one says nothing
                found[declared.name] = _given(declared, text, _of_text, variable)
        return found

    def _from_file(self, path: Path) -> dict[str, _Given]:
        try:
            tables = tomllib.loads(path.read_text())
        except OSError as error:
            raise OptionError(error.strerror or str(error), option="config", where=str(path)) from None
        except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
            raise OptionError(f"it is not TOML: {error}", option="config", where=str(path)) from None
        _check_names(tables, TABLES, f"{path}:", "table")
        table = tables.get(self.command, {})
        if not isinstance(table, dict):
            raise OptionError("it is not a table", option="config", where=f"{path}:{self.command}")
        known = {declared.name: declared for _, declared in _options(self.config)}
        _check_names(table, known, f"{path}:{self.command}.", "option")
        return {
            name: _given(known[name], value, _of_toml, f"{path}:{self.command}.{name}") for name, value in table.items()
        }


@cache
def _parser(application: Application[Any], program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description=application.description,
        epilog=f"Each option may be given by an environment variable (FXLIB_{application.command.upper()}_...) and in "
        f"the table [{application.command}] of a TOML file, too; docs/reference/options.md names them.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", default=None, help=f"TOML file with options (default: what {CONFIG} says)")
    add(
        "--print-options",
        dest="print-options",
        action="store_true",
        default=False,
        help="print the options in force as JSON, and where each comes from, and end",
    )
    for declared, _, default in application.options():
        meaning = f"{declared.meaning} (default: {default})" if default else declared.meaning
        meaning, flag = meaning.replace("%", "%%"), f"--{declared.name}"
        if declared.kind is None:
            add(flag, dest=declared.name, action=argparse.BooleanOptionalAction, help=meaning)
        else:
            add(
                flag,
                dest=declared.name,
                metavar=declared.kind.metavar,
                action="append" if declared.repeatable else "store",
                type=_argument(declared.kind),
                help=f"{meaning}; repeatable" if declared.repeatable else meaning,
            )
    return parser


def _options(config: type[DataclassInstance]) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields that are options, with their declarations; those of groups, too."""
    for field in fields(config):
        if _GROUP in field.metadata:
            yield from _options(field.metadata[_GROUP])
        elif _OPTION in field.metadata:
            yield field, field.metadata[_OPTION]


def _make(config: type[C], given: Mapping[str, _Given]) -> C:
    """Make a configuration, or a group, from given values and defaults.

    Raises:
        OptionError: some of its options were given, and others without a default were not.
    """
    values: dict[str, Any] = {}
    missing = []
    for field in fields(config):
        if _GROUP in field.metadata:
            inner = field.metadata[_GROUP]
            if field.default is not None or any(declared.name in given for _, declared in _options(inner)):
                values[field.name] = _make(inner, given)
        elif _OPTION in field.metadata:
            name = field.metadata[_OPTION].name
            if name in given:
                values[field.name] = given[name].value
            elif field.default is field.default_factory is MISSING:
                missing.append(f"--{name}")
    if missing:
        there = next(declared.name for _, declared in _options(config) if declared.name in given)
        raise OptionError(f"it needs {' and '.join(missing)}, too", option=there)
    return config(**values)


def _in_force(config: Any, kind: type[DataclassInstance], given: Mapping[str, _Given]) -> Iterator[tuple[str, object]]:
    """Yield the name of each option, its value in JSON, and where it comes from."""
    for field in fields(kind):
        value = None if config is None else getattr(config, field.name)
        if _GROUP in field.metadata:
            yield from _in_force(value, field.metadata[_GROUP], given)
        elif _OPTION in field.metadata:
            declared: Option = field.metadata[_OPTION]
            where = given[declared.name].where if declared.name in given else "default"
            yield declared.name, {"value": _shown(declared, value), "from": where}


def _shown(declared: Option, value: Any) -> Any:
    if value is None or declared.kind is None:
        return value
    if declared.repeatable:
        return [declared.kind.show(each) for each in value]
    return declared.kind.show(value)


def _default(field: Field[Any], declared: Option) -> str:
    if declared.default or declared.repeatable or declared.kind is None or field.default in (None, MISSING):
        return declared.default
    return declared.kind.show(field.default)


def _given(declared: Option, value: Any, read: Callable[[Option, Any], Any], where: str) -> _Given:
    try:
        return _Given(read(declared, value), where)
    except ValueError as error:
        raise OptionError(str(error), option=declared.name, where=where) from None


def _of_text(declared: Option, text: str) -> Any:
    """Read the value of a variable."""
    if declared.kind is None:
        if text.lower() not in _TRUTHS:
            raise ValueError(f"{text!r} is neither 1 nor 0")
        return _TRUTHS[text.lower()]
    if declared.repeatable:
        return tuple(declared.kind.read(each.strip()) for each in text.split(",") if each.strip())
    return declared.kind.read(text)


def _of_toml(declared: Option, value: Any) -> Any:
    """Read a value of the file."""
    if declared.kind is None:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return value
    if declared.repeatable:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not an array")
        return tuple(_scalar(declared.kind, each) for each in value)
    return _scalar(declared.kind, value)


def _scalar(kind: Kind[T], value: Any) -> T:
    if isinstance(value, bool) or not isinstance(value, kind.toml):
        wanted = "a text" if str in kind.toml else f"a number of the kind {kind.metavar}"
        raise ValueError(f"{value!r} is not {wanted}")  # noqa: TRY004 - what is wrong is the file's, not the program's
    return kind.read(str(value))


def _argument(kind: Kind[T]) -> Callable[[str], T]:
    """Return a function by which argparse reads a flag's value; argparse only shows an ArgumentTypeError's message."""

    def read(text: str) -> T:
        try:
            return kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _check_names(given: Iterable[str], known: Iterable[str], where: str, what: str) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            raise OptionError(
                f"there is no such {what}",
                option="config",
                where=f"{where}{name}",
                hint=did_you_mean(name, known) or f"Known: {', '.join(sorted(known))}.",
            )
