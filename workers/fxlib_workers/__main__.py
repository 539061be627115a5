"""`python -m fxlib_workers`: start a worker."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fxlib.client import Tls
from fxlib.errors import FxlibError
from fxlib.runtime import functions
from fxlib_workers import logs
from fxlib_workers.agent import Agent
from fxlib_workers.config import Config, RewriteLimits, TrialSettings

_GIB: Final = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker; return the exit status."""
    try:
        config = parse(arguments)
        for module in config.trial.allowed_modules:
            functions.allow_module(module)  # a name that is wrong is better told now than in a trial
        logs.set_up()
        Agent(config).run()
    except FxlibError as error:
        print(f"fxlib worker: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    return 0


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Read the command line.

    Raises:
        FxlibError: options contradict each other.
    """
    given = _parser().parse_args(arguments)
    tls = Tls(ca=given.tls_ca, certificate=given.tls_cert, key=given.tls_key)
    return Config(
        service=given.service,
        tls=tls if given.tls_ca or given.tls_cert else None,
        slots=given.slots,
        once=given.once,
        rewrite=RewriteLimits(memory_bytes=int(given.rewrite_memory_gib * _GIB), wall_s=given.rewrite_timeout),
        trial=TrialSettings(
            ray_address=given.ray_address,
            interface=given.interface,
            allowed_modules=tuple(given.allow_module),
            keep_variables=tuple(given.keep_env),
            process_memory_bytes=int(given.trial_memory_gib * _GIB),
            placement_timeout_s=given.placement_timeout,
        ),
        host_lock=given.host_lock,
        **({"name": given.name} if given.name else {}),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fxlib_workers",
        description="Claims jobs of an fxlib service, rewrites graphs in a sandboxed process, measures them on Ray.",
    )
    add = parser.add_argument
    add("--service", default=Config.service, metavar="HOST:PORT", help="the service (default: %(default)s)")
    add("--tls-ca", type=Path, help="PEM file of the authority behind the service's certificate; turns TLS on")
    add("--tls-cert", type=Path, help="PEM file of the worker's own certificate, for mutual TLS")
    add("--tls-key", type=Path, help="PEM file of its key")
    add("--name", default="", help="unique among the service's workers (default: host and process id)")
    add("--slots", type=int, default=1, help="jobs at once; they take turns at measuring (default: %(default)s)")
    add("--once", action="store_true", help="end after one job")
    add("--ray-address", default="", metavar="ADDR", help="a Ray cluster (default: a Ray of one's own on this host)")
    add("--interface", default="lo", metavar="NAME", help="network interface of the trials (default: %(default)s)")
    add(
        "--allow-module",
        action="append",
        default=[],
        metavar="PKG.MOD",
        help="let servers of a trial run this module's functions; repeatable",
    )
    add(
        "--keep-env",
        action="append",
        default=[],
        metavar="NAME",
        help="let trials and rewrites see this variable of the environment, or pattern ('AWS_*'); repeatable",
    )
    add(
        "--trial-memory-gib",
        type=float,
        default=16.0,
        metavar="GIB",
        help="memory that each process of a trial may take (default: %(default)s)",
    )
    add(
        "--rewrite-memory-gib",
        type=float,
        default=8.0,
        metavar="GIB",
        help="memory that a rewrite may take (default: %(default)s)",
    )
    add(
        "--rewrite-timeout",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="time that a rewrite may take (default: %(default)s)",
    )
    add(
        "--placement-timeout",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="time that Ray has to find room for a trial (default: 20)",
    )
    add(
        "--host-lock",
        type=Path,
        default=Config.host_lock,
        metavar="FILE",
        help="lock by which workers on one host take turns at measuring (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
