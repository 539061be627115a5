"""`fxlib serve`: run the service, and a worker beside it, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fxlib.cli.applications import Child, command, require, started_as
from fxlib.cli.printing import say, say_json, warn
from fxlib.errors import FxlibError
from fxlib.utils.locked_folder import LockedFolder

if TYPE_CHECKING:
    from types import FrameType

    from fxlib.cli.options import Commands

_READY_S = 60.0
_POLL_S = 0.1
_STEADY_S = 30.0
"""Seconds after which a worker counts as steady: if it dies later, it is restarted without delay."""
_RESTARTS = 5
"""Number of restarts in a row, each of a worker that died before it was steady, after which the command ends if no
worker was ever steady: its options may be wrong. Otherwise the service goes on, and workers are tried now and then."""
_LONGEST_PAUSE_S = 15.0
_CLOSE_S = 12.0
"""Seconds that the service has to end beyond its grace for calls: it ends itself after ten."""

_DESCRIPTION = """Run the service, and a worker beside it, until Ctrl-C or SIGTERM.

Besides the options below it takes all those of the service. Those of the worker that are not listed here come from
the table [worker] of the file, and from FXLIB_WORKER_...; see docs/reference/options.md.
"""

NAME = "serve"


class Stop:
    """Records that this process was asked to end.

    It is not a `threading.Event`, because a signal handler that sets one can deadlock: the code that the signal
    interrupted may hold the event's lock.
    """

    def __init__(self) -> None:
        """Start without being set."""
        self.is_set = False

    def set(self) -> None:
        """Record the request. A signal handler may call this."""
        self.is_set = True

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, for at most `seconds`; return whether it is."""
        end = time.monotonic() + seconds
        while not self.is_set and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
        return self.is_set


def add_to(commands: Commands) -> None:
    """Add the command to the list; `run` reads its options."""
    commands.add_parser(NAME, help="run the service on this machine, and a worker beside it")


def run(arguments: Sequence[str]) -> int:
    """Serve until asked to end, and return 0 then; return 2 if an option of the applications is wrong.

    Raises:
        FxlibError: an application is not installed, the service does not start, or the options contradict each other.
    """
    options, given = options_parser().parse_known_args(arguments)
    require("fxlib-service", "service")
    if not options.no_worker:
        require("fxlib-workers", "workers")
    given += ["--config", options.config] if options.config else []
    settled = _settled("fxlib_service", given)
    if settled is None:
        return 2
    own = {} if options.no_worker else _settled("fxlib_workers", _worker_arguments(options, settled))
    if own is None:
        return 2
    if settled["client-ca"] and not options.no_worker:
        raise FxlibError(
            "a worker needs a certificate of its own",
            where="--client-ca",
            hint="Use --no-worker, and start it with fxlib worker.",
        )
    stop = Stop()
    with _ending(stop), ExitStack() as children:
        # Not in the data folder, where one that another service has would be overwritten.
        folder = children.enter_context(LockedFolder("fxlib-serve-"))
        ready_file = Path(settled["ready-file"] or folder.path / "ready")
        ready_file.unlink(missing_ok=True)
        children.callback(ready_file.unlink, missing_ok=True)
        grace_s = float(settled["shutdown-grace-seconds"]) + _CLOSE_S
        given += ["--ready-file", str(ready_file)]
        service = children.enter_context(Child("fxlib_service", given, grace_s=grace_s))
        addresses = _addresses(service, ready_file, stop)
        if addresses is None:
            return 0
        scheme = "https" if settled["tls-cert"] else "http"
        metrics = f"{scheme}://{addresses['metrics']}/metrics"
        if options.json:
            say_json({"service": addresses["listen"], "metrics": metrics}, indent=None)
        else:
            say(f"fxlib: the service is at {addresses['listen']}, its metrics at {metrics}")
        if options.no_worker:
            return _attend(service, stop)
        met = ["--service", _reached(addresses["listen"]), *_shown(addresses, settled, own)]
        return _attend_with_worker(service, [*met, *_worker_arguments(options, settled)], stop)


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's options, which leaves those of the service."""
    parser = argparse.ArgumentParser(
        prog=f"fxlib {NAME}",
        usage="%(prog)s [OPTION ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this, and the options of the service")
    parser.add_argument("--config", metavar="FILE", help="TOML file with options of the service and of the worker")
    parser.add_argument("--json", action="store_true", help="print the service's addresses as JSON")
    parser.add_argument("--no-worker", action="store_true", help="start no worker here; see fxlib worker")
    parser.add_argument(
        "--allow-module",
        metavar="PKG.MOD",
        action="append",
        default=[],
        help="for the worker: a module whose functions servers of a trial may run; repeatable",
    )
    parser.add_argument("--ray-address", metavar="ADDR", help="for the worker: a Ray cluster to measure on")
    parser.add_argument(
        "--interface", metavar="NAME", help="for the worker: network interface that the cluster's hosts share"
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="for the worker: authority to trust (default: --tls-cert)")
    return parser


class _Help(argparse.Action):
    """Prints the options of this command, and those of the service if that is installed."""

    @override
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        parser.print_help()
        with suppress(FxlibError):
            require("fxlib-service", "service")
            asked = command("fxlib_service", ["--help"])
            shown = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True, env=started_as(NAME)).stdout
            say("\noptions of the service:\n" + _options_in(shown, without=parser._option_string_actions))
        parser.exit()


def _options_in(shown: str, *, without: Collection[str]) -> str:
    """Return the options in a parser's help, without those of these names."""
    entries = re.split(r"^(?=  -)", shown.partition("\noptions:\n")[2], flags=re.MULTILINE)
    return "".join(each for each in entries if each.split()[:1] and each.split()[0].rstrip(",") not in without)


def _settled(application: str, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return an application's effective options, by name; None if they are wrong, which it has printed."""
    asked = command(application, [*arguments, "--print-options"])
    ran = subprocess.run(asked, check=False, stdout=subprocess.PIPE, env=started_as(NAME))
    if ran.returncode:
        return None
    return {name: each["value"] for name, each in json.loads(ran.stdout).items()}


def _worker_arguments(options: argparse.Namespace, settled: Mapping[str, Any]) -> list[str]:
    arguments = []
    for module in options.allow_module:
        arguments += ["--allow-module", module]
    if options.ray_address:
        arguments += ["--ray-address", options.ray_address]
    if options.interface:
        arguments += ["--interface", options.interface]
    if settled["tls-cert"]:
        arguments += ["--tls-ca", options.tls_ca or settled["tls-cert"]]
    if options.config:
        arguments += ["--config", options.config]
    return arguments


def _reached(listen: str) -> str:
    """Return the address at which this machine reaches a service that listens on `listen`."""
    host, _, port = listen.rpartition(":")
    everywhere = host in ("0.0.0.0", "[::]")  # noqa: S104 - an address to compare with
    return f"localhost:{port}" if everywhere else listen


def _shown(addresses: Mapping[str, str], settled: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return the variables that give the worker the owner's token, unless its own options name one.

    On loopback it finds by itself the token that the service made, but not one of a file that the service was given.
    """
    on_loopback = _reached(addresses["listen"]).startswith(("127.", "localhost:", "[::1]:"))
    found = own["token-file"] or (on_loopback and not settled["token-file"])
    token = [] if found else ["--token-file", addresses["token_file"]]
    return [*token, *(["--insecure"] if settled["insecure"] and not on_loopback else [])]


@contextmanager
def _ending(stop: Stop) -> Iterator[None]:
    """Set `stop` on Ctrl-C and SIGTERM, for the length of the block."""

    def note(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _addresses(service: Child, ready_file: Path, stop: Stop) -> dict[str, str] | None:
    """Wait for the ready file, and return its addresses; None if this process is asked to end before."""
    end = time.monotonic() + _READY_S
    while not ready_file.exists():
        if stop.wait(_POLL_S):
            return None
        if service.code is not None:
            raise FxlibError(f"it ended with exit code {service.code}; its message is above", where="the service")
        if time.monotonic() > end:
            raise FxlibError(f"it is not ready after {_READY_S:.0f} s", where="the service")
    addresses: dict[str, str] = json.loads(ready_file.read_text())
    return addresses


def _attend(service: Child, stop: Stop) -> int:
    while not stop.wait(_POLL_S):
        if service.code is not None:
            raise FxlibError(f"it ended with exit code {service.code}", where="the service")
    return 0


def _attend_with_worker(service: Child, arguments: list[str], stop: Stop) -> int:
    """Keep a worker running while the service runs, restarting it when it dies."""
    deaths, was_steady = 0, False
    while not stop.is_set:
        started = time.monotonic()
        with Child("fxlib_workers", arguments) as worker:
            while worker.code is None:
                if stop.wait(_POLL_S):
                    return 0
                if service.code is not None:
                    raise FxlibError(f"it ended with exit code {service.code}", where="the service")
        is_steady = time.monotonic() - started > _STEADY_S
        deaths, was_steady = 1 if is_steady else deaths + 1, was_steady or is_steady
        with suppress(OSError):  # where messages go, the disk may be full, too
            warn(f"fxlib: the worker ended with exit code {worker.code}; starting another")
        if deaths > _RESTARTS and not was_steady:
            raise FxlibError(f"it died {deaths} times in a row", where="the worker")
        stop.wait(min(0.5 * 2 ** min(deaths, _RESTARTS), _LONGEST_PAUSE_S) if deaths > 1 else 0.0)
    return 0
