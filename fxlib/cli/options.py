"""The options that several commands share."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fxlib.config import DEFAULT_ADDRESS, SERVICE, read_address, service_address
from fxlib.errors import FxlibError
from fxlib.spec.labels import is_namespace, read_label
from fxlib.utils.local_service import TOKEN_FILE

if TYPE_CHECKING:
    from fxlib.client import Endpoint

    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


class UsageError(FxlibError):
    """The error for a command line that names what there is not."""


def unreadable(error: OSError, where: str, hint: str = "") -> FxlibError:
    """Return the error for a file of the command line that cannot be read: a wrong command line if there is none."""
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
    return (UsageError if missing else FxlibError)(error.strerror or str(error), where=where, hint=hint)


def add_service(parser: argparse.ArgumentParser, *, optional: bool = False, patience_s: float = 2.0) -> None:
    """Add the options for reaching the service.

    Args:
        parser: the command's parser.
        optional: whether the command also works without a service.
        patience_s: the default of `--patience`: longer where a service may just be starting.
    """
    default = "" if optional else f" (default: what {SERVICE} says, else {DEFAULT_ADDRESS})"
    parser.add_argument(
        "--service",
        type=_address,
        metavar="HOST:PORT",
        default=None if optional else service_address(),
        help=f"address of the service{default}",
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        default=patience_s,
        metavar="SECONDS",
        help="how long to try to reach it (default: %(default)s)",
    )
    parser.add_argument("--tls", action="store_true", help="speak TLS, with the system's authorities")
    parser.add_argument("--tls-ca", metavar="FILE", help="speak TLS; PEM file of the authority to trust")
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM file of this client's certificate (mutual TLS)")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file of its key")
    parser.add_argument("--token-file", metavar="FILE", help=f"file of the service's token (default: {TOKEN_FILE})")
    parser.add_argument("--insecure", action="store_true", help="send the token unencrypted to another machine")


def endpoint_of(options: argparse.Namespace) -> Endpoint:
    """Return the address and credentials of the service that the options give.

    Raises:
        UsageError: a certificate or a key is given alone, or a file that is not there.
    """
    from fxlib.client import Endpoint

    if (options.tls_cert is None) != (options.tls_key is None):
        given, missing = ("--tls-cert", "--tls-key") if options.tls_key is None else ("--tls-key", "--tls-cert")
        raise UsageError(f"it needs {missing}, too", where=given)
    files = {
        "--tls-ca": options.tls_ca,
        "--tls-cert": options.tls_cert,
        "--tls-key": options.tls_key,
        "--token-file": options.token_file,
    }
    for flag, path in files.items():
        if path is not None and (not Path(path).exists() or Path(path).is_dir()):
            raise UsageError("there is no such file", where=f"{flag} {path}")
    return Endpoint(
        address=options.service,
        tls=options.tls,
        ca=options.tls_ca,
        certificate=options.tls_cert,
        key=options.tls_key,
        token_file=options.token_file,
        insecure=options.insecure,
        patience_s=options.patience,
    )


def _address(text: str) -> str:
    try:
        return read_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output(text: str) -> str:
    """Read the path of a file to write; its folder must exist already, before a long measurement begins."""
    folder = Path(text).parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {folder}")
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text or '.'} is a folder")
    return text


def count(text: str) -> int:
    """Read a number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return int(text)


def seconds(text: str) -> float:
    """Read a time, which may be infinite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0.0:  # NaN is not, either
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds")
    return value


def written(text: str) -> str:
    """Read a text that can be sent: Python takes bytes of a command line that are not UTF-8 for halves of letters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8") from None
    return text


def namespace(text: str) -> str:
    """Read the name of a namespace; an empty one stands for the service's default."""
    if text and not is_namespace(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no namespace: up to 63 letters, digits or ._-")
    return text


def label(text: str) -> tuple[str, str]:
    """Read KEY=VALUE."""
    try:
        return read_label(written(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def step(text: str) -> tuple[str, dict[str, object]]:
    """Read NAME[:OPTION=VALUE,...], where a value is JSON, or else text without a comma."""
    name, _, rest = text.partition(":")
    options: dict[str, object] = {}
    while rest:
        option, value = label(rest)
        try:
            options[option], end = json.JSONDecoder().raw_decode(value)
        except (ValueError, RecursionError):
            end = len(value.partition(",")[0])
            options[option] = value[:end]
        if value[end : end + 1] not in ("", ","):
            raise argparse.ArgumentTypeError(f"{value!r} is not a list of OPTION=VALUE, separated by commas")
        rest = value[end + 1 :]
    return name, options


def called(name: str, where: str, hint: str) -> Any:
    """Import a function, call it without arguments, and return what it returns.

    Raises:
        UsageError: the name has another form, or there is no such function; `where` names the argument. Exceptions
            of the function itself are passed on.
        FxlibError: the module or the function called `sys.exit`, which would end the command without a word.
    """
    try:
        return _found(name, where, hint)()
    except SystemExit as error:
        raise FxlibError(f"it called sys.exit({error.code!r})", where=where) from None


def _found(name: str, where: str, hint: str) -> Any:
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function) or module_name.startswith("."):
        raise UsageError(f"{name!r} is not of the form pkg.mod:function", where=where.partition(" ")[0], hint=hint)
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)  # named by the user, on their own command line
    except ModuleNotFoundError as error:
        raise UsageError(f"{error} in {here}, on PYTHONPATH or installed", where=where, hint=hint) from error
    for part in function.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module_name} has no {function!r}", where=where, hint=hint)
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{function!r} is not a function", where=where, hint=hint)
    return found
