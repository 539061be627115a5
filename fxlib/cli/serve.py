"""`fxlib serve`: the service, and a worker beside it, until told to end."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fxlib.cli.children import Child
from fxlib.cli.extras import require
from fxlib.cli.stop import Stop
from fxlib.errors import FxlibError

if TYPE_CHECKING:
    from types import FrameType

    from fxlib.cli.options import Commands

_READY_S = 60.0
_POLL_S = 0.1
_STEADY_S = 30.0
"""A worker that ran for so long before it died is started again without delay."""
_RESTARTS = 5
"""Deaths in a row of a worker, each before it was steady, after which it is given up."""

_SERVICE = {
    "listen": ("HOST:PORT", "where clients and workers reach the service (default: 127.0.0.1:8470)"),
    "metrics": ("HOST:PORT", "where Prometheus finds the metrics (default: 127.0.0.1:8471)"),
    "data": (
        "DIR",
        "folder of the database and the blobs (default: fxlib in $XDG_DATA_HOME, or else in ~/.local/share)",
    ),
    "database": ("URL", "SQLAlchemy URL of the database (default: SQLite in DIR)"),
    "tls-cert": ("FILE", "PEM certificate of the service; turns TLS on"),
    "tls-key": ("FILE", "PEM key of the certificate"),
    "client-ca": ("FILE", "PEM authority of clients' certificates; turns mutual TLS on"),
}


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="run the service on this machine, and a worker beside it",
        description="Run the service, and a worker beside it, until Ctrl-C or SIGTERM. Options of the service that are "
        "not listed here: python -m fxlib_service --help.",
    )
    for name, (metavar, text) in _SERVICE.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=text)
    parser.add_argument(
        "--insecure", action="store_true", help="serve without TLS where other machines reach it; refused otherwise"
    )
    parser.add_argument("--no-worker", action="store_true", help="start no worker here; see fxlib worker")
    parser.add_argument(
        "--allow-module",
        metavar="MODULE",
        action="append",
        default=[],
        help="for the worker: a module whose functions servers of a trial may run; repeatable",
    )
    parser.add_argument("--ray-address", metavar="ADDRESS", help="for the worker: a Ray cluster to measure on")
    parser.add_argument(
        "--interface", metavar="NAME", help="for the worker: network interface that the cluster's hosts share"
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="for the worker: authority to trust (default: --tls-cert)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until told to end; return 0 then, and 1 if the service, or its worker again and again, died.

    Raises:
        FxlibError: an application is not installed, the service does not start, or the options contradict each other.
    """
    require("fxlib-service", "service")
    if not options.no_worker:
        require("fxlib-workers", "workers")
        _check_worker(options)
    stop = Stop()
    data = _data_folder(options.data)
    ready_file = data / "ready"
    ready_file.unlink(missing_ok=True)
    with _ending(stop), ExitStack() as children:
        children.callback(ready_file.unlink, missing_ok=True)
        service = children.enter_context(Child("fxlib_service", _service_arguments(options, data, ready_file)))
        addresses = _addresses(service, ready_file, stop)
        if addresses is None:
            return 0
        scheme = "https" if options.tls_cert else "http"
        print(
            f"fxlib: the service is at {addresses['listen']}, its metrics at {scheme}://{addresses['metrics']}/metrics",
            flush=True,
        )
        if options.no_worker:
            return _attend(service, stop)
        return _attend_with_worker(service, _worker_arguments(options, addresses["listen"]), stop)


def _check_worker(options: argparse.Namespace) -> None:
    if options.client_ca:
        raise FxlibError(
            "a worker needs a certificate of its own",
            where="--client-ca",
            hint="Say --no-worker, and start it with fxlib worker.",
        )
    if options.ray_address and not options.interface:
        raise FxlibError(
            "the processes of a trial on a cluster cannot speak to each other on loopback",
            where="--ray-address",
            hint="Name the network interface that the cluster's hosts share, with --interface.",
        )


def _service_arguments(options: argparse.Namespace, data: Path, ready_file: Path) -> list[str]:
    arguments = ["--data", str(data), "--ready-file", str(ready_file)]
    for name in sorted(_SERVICE.keys() - {"data"}):
        value = getattr(options, name.replace("-", "_"))
        if value is not None:
            arguments += [f"--{name}", value]
    return [*arguments, *(["--insecure"] if options.insecure else [])]


def _data_folder(given: str | None) -> Path:
    """Make the folder that `--data` names, or the default one, for this user's eyes alone."""
    shared = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    folder = Path(given or shared / "fxlib")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FxlibError(error.strerror or str(error), where=f"--data {folder}") from error
    return folder


def _worker_arguments(options: argparse.Namespace, listen: str) -> list[str]:
    host, _, port = listen.rpartition(":")
    everywhere = host in ("0.0.0.0", "[::]")  # noqa: S104 - an address to compare with
    arguments = ["--service", f"localhost:{port}" if everywhere else listen]
    for module in options.allow_module:
        arguments += ["--allow-module", module]
    if options.ray_address:
        arguments += ["--ray-address", options.ray_address]
    if options.interface:
        arguments += ["--interface", options.interface]
    if options.tls_cert:
        arguments += ["--tls-ca", options.tls_ca or options.tls_cert]
    return arguments


@contextmanager
def _ending(stop: Stop) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM tell `stop`."""

    def note(_number: int, _frame: FrameType | None) -> None:
        stop.tell()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _addresses(service: Child, ready_file: Path, stop: Stop) -> dict[str, str] | None:
    """Wait until the service says where it listens; None if it is told to end before."""
    end = time.monotonic() + _READY_S
    while not ready_file.exists():
        if stop.wait(_POLL_S):
            return None
        if service.code is not None:
            raise FxlibError(f"it ended with exit code {service.code}; see its words above", where="the service")
        if time.monotonic() > end:
            raise FxlibError(f"it is not ready after {_READY_S:.0f} s", where="the service")
    told: dict[str, str] = json.loads(ready_file.read_text())
    return told


def _attend(service: Child, stop: Stop) -> int:
    while not stop.wait(_POLL_S):
        if service.code is not None:
            raise FxlibError(f"it ended with exit code {service.code}", where="the service")
    return 0


def _attend_with_worker(service: Child, arguments: list[str], stop: Stop) -> int:
    """Keep a worker running for as long as the service does."""
    deaths = 0
    while not stop.told:
        started = time.monotonic()
        with Child("fxlib_workers", arguments) as worker:
            while worker.code is None:
                if stop.wait(_POLL_S):
                    return 0
                if service.code is not None:
                    raise FxlibError(f"it ended with exit code {service.code}", where="the service")
        deaths = 1 if time.monotonic() - started > _STEADY_S else deaths + 1
        print(f"fxlib: the worker ended with exit code {worker.code}; starting another", file=sys.stderr, flush=True)
        if deaths > _RESTARTS:
            raise FxlibError(f"it died {deaths} times in a row", where="the worker")
        stop.wait(min(0.5 * 2**deaths, 15.0) if deaths > 1 else 0.0)
    return 0
