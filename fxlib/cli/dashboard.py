"""`fxlib dashboard`: a service's workers, queue, jobs and models in a browser, and the runs of zoos."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fxlib.cli.options import UsageError, add_service, endpoint_of, output
from fxlib.cli.printing import warn
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    from fxlib.cli.options import Commands

_EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, not listened on


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "dashboard",
        help="a service's workers, queue, jobs and models in a browser",
        description="Show a service in a browser. Give it the token of a viewer; visitors sign in with their own to "
        "cancel and retry jobs.",
    )
    add_service(parser)
    parser.add_argument(
        "--listen",
        type=_address,
        default=("127.0.0.1", 8480),
        metavar="HOST:PORT",
        help="address to listen on (default: 127.0.0.1:8480)",
    )
    parser.add_argument(
        "--host",
        type=_name,
        action="append",
        default=[],
        metavar="NAME",
        help="name under which visitors reach it, such as dashboard.example.org; repeatable",
    )
    parser.add_argument(
        "--zoo",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder of a zoo's runs (zoo.runs), which are shown, too; repeatable",
    )
    parser.add_argument("--https-cert", type=Path, metavar="FILE", help="serve HTTPS; PEM file of the certificate")
    parser.add_argument("--https-key", type=Path, metavar="FILE", help="PEM file of its key")
    parser.add_argument(
        "--ready-file", type=output, metavar="FILE", help="file to write the address to once the dashboard is ready"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise FxlibError(
                f"{package} is not installed, which the dashboard needs", hint="Run: pip install 'fxlib[dashboard]'"
            )
    if options.https_key is not None and options.https_cert is None:
        raise UsageError("it is the key of no certificate", where="--https-key", hint="Name it: --https-cert FILE.")
    from fxlib.dashboard.app import Door, serve
    from fxlib.dashboard.zoos import Zoos
    from fxlib.serialization.files import write_whole

    try:
        Zoos(options.zoo)
    except FxlibError as error:
        raise UsageError(str(error)) from None
    host, port = options.listen
    if host in _EVERYWHERE and not options.host:
        raise FxlibError(
            "name the hosts under which visitors reach it, so that no other site's name leads here",
            where=f"--listen {host}:{port}",
            hint="For example: --host dashboard.example.org",
        )
    door = Door(host=host, port=port, names=options.host, certificate=options.https_cert, key=options.https_key)

    def listening(address: str) -> None:
        scheme = "http" if options.https_cert is None else "https"
        warn(f"dashboard of {options.service}: {scheme}://{address}/ (Ctrl-C ends it)")
        if options.ready_file is not None:
            write_whole(Path(options.ready_file), [f"{address}\n".encode()])

    with endpoint_of(options).connect() as client:
        serve(client, door, zoos=options.zoo, listening=listening)
    return 0


def _name(text: str) -> str:
    """Read a host's name; all names are `*`, and all within a domain `*.example.org`."""
    if text != "*" and "*" in text.removeprefix("*."):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a host, such as *.example.org")
    return text


def _address(text: str) -> tuple[str, int]:
    """Read HOST:PORT."""
    host, colon, port = text.rpartition(":")
    if not (colon and port.isdecimal() and int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
