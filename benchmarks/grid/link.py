"""Two network namespaces and a link between them that carries so many megabits a second each way, and no more.

A world that is to feel a network has its trainer in one namespace and its servers in the other. It takes root, `ip`
and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "fxlib-bench"
DEVICE = "fxbench"
"""The link's name at both ends."""
BURST = "32kb"
LATENCY = "400ms"
"""Limits of the token buckets: how much may go at once, and how long a packet may wait for its turn."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """How to be at one end of it: what goes before a command, and what the environment has to say."""

    trainer: Sequence[str]
    environment: Mapping[str, str]
    servers_python: Path
    """An interpreter whose processes are at the servers' end."""


def unavailable() -> str:
    """Why there can be no limited link here, in words; empty if there can."""
    if os.geteuid() != 0:
        return "limiting bandwidth takes root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"limiting bandwidth takes {missing[0]}, which is not installed" if missing else ""


@contextmanager
def limited(mbit_per_s: int, folder: Path) -> Iterator[Link]:
    """Set up a link for the block; `folder` is for what only lives as long."""
    _take_down_orphans()
    ends = [f"{PREFIX}-{os.getpid()}-{side}" for side in ("trainer", "servers")]
    try:
        for end in ends:
            _run("ip", "netns", "add", end)
        _run("ip", "-n", ends[0], "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", ends[1])
        for place, end in enumerate(ends, start=1):
            _run("ip", "-n", end, "address", "add", f"10.0.0.{place}/24", "dev", DEVICE)
            _run("ip", "-n", end, "link", "set", "lo", "up")
            _run("ip", "-n", end, "link", "set", DEVICE, "up")
            bucket = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", BURST, "latency", LATENCY)
            _run("tc", "-n", end, "qdisc", "add", "dev", DEVICE, "root", *bucket)
        yield Link(
            trainer=("ip", "netns", "exec", ends[0]),
            environment={"TP_SOCKET_IFNAME": DEVICE, "GLOO_SOCKET_IFNAME": DEVICE},
            servers_python=_python_within(ends[1], folder),
        )
    finally:
        for end in ends:
            _take_down(end)


def _python_within(end: str, folder: Path) -> Path:
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec ip netns exec {end} {sys.executable} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def _take_down_orphans() -> None:
    """Take down what runs left that were killed: their names say whose they are."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)):
        if not Path("/proc", name.split("-")[2]).exists():
            _take_down(name)


def _take_down(end: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):  # it was never set up
        _run("ip", "netns", "delete", end)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
