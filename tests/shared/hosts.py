"""Hosts on this machine: network namespaces with addresses of their own, and a line of a rate and a delay between them.

The line is a thread that carries packets from one TUN device to the other: a kernel may come without `netem`.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

INTERFACE: Final = "fxline0"
"""The line's name on each host."""

_PREFIX: Final = "fxlib-test-"
_TUN: Final = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU: Final = 16_000
_FULL_S: Final = 1.0
"""How far a host may send ahead of the line, in seconds; what it sends then is lost."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host: its address, and what goes before a command that is to run there."""

    address: str
    within: Sequence[str]


@cache
def unavailable() -> str:
    """Why there can be no hosts here, in words; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if shutil.which("ip") is None:
        return "network namespaces take `ip`, of the package iproute2"
    try:
        with two_hosts(delay_s=0.0, bytes_per_s=1e9):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:  # a container may not be allowed to
        return f"no network namespaces can be joined here: {error}"


@contextmanager
def two_hosts(*, delay_s: float, bytes_per_s: float) -> Iterator[tuple[Host, Host]]:
    """Have two hosts for a block; a packet takes `delay_s` one way, and each way has the rate."""
    _take_down_orphans()
    hosts, ends = list[Host](), list[int]()
    with ExitStack() as undo:
        for number in (1, 2):
            name, address = f"{_PREFIX}{os.getpid()}-{number}", f"10.213.7.{number}"
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "delete", name)
            end, device = _tun()
            undo.callback(os.close, end)
            _ip("link", "set", device, "netns", name, "name", INTERFACE)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "mtu", str(_MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
            hosts.append(Host(address=address, within=("ip", "netns", "exec", name)))
            ends.append(end)
        over = threading.Event()
        ways = [_Way(*pair, delay_s=delay_s, bytes_per_s=bytes_per_s) for pair in (ends, ends[::-1])]
        carrying = threading.Thread(target=_carry, args=(ways, over))
        carrying.start()
        undo.callback(carrying.join)
        undo.callback(over.set)
        yield hosts[0], hosts[1]


@dataclass(kw_only=True)
class _Way:
    """One way of the line.

    Attributes:
        packets: what is under way, each with the time at which it arrives.
        free_at: when the last packet's last byte has gone.
    """

    source: int = field(kw_only=False)
    target: int = field(kw_only=False)
    delay_s: float
    bytes_per_s: float
    packets: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_at: float = 0.0

    def take(self, now: float) -> None:
        """Take what the source has sent."""
        with suppress(BlockingIOError):
            while packet := os.read(self.source, _MTU + 64):
                begun = max(now, self.free_at)
                if begun - now < _FULL_S:
                    self.free_at = begun + len(packet) / self.bytes_per_s
                    self.packets.append((self.free_at + self.delay_s, packet))

    def give(self, now: float) -> None:
        """Give the target what has arrived by now."""
        while self.packets and self.packets[0][0] <= now:
            with suppress(OSError):  # its queue is full: the packet is lost
                os.write(self.target, self.packets[0][1])
            self.packets.popleft()


def _carry(ways: Sequence[_Way], over: threading.Event) -> None:
    by_source = {way.source: way for way in ways}
    while not over.is_set():
        due = [way.packets[0][0] for way in ways if way.packets]
        wait_s = min([each - time.monotonic() for each in due] + [0.1])
        ready, _, _ = select.select(list(by_source), [], [], max(0.0, wait_s))
        now = time.monotonic()
        for each in ready:
            by_source[each].take(now)
        for way in ways:
            way.give(time.monotonic())


def _tun() -> tuple[int, str]:
    """Return a new TUN device: what its packets are read from and written to, and its name."""
    end = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    told = fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"", _IFF_TUN | _IFF_NO_PI))
    return end, told[:16].rstrip(b"\0").decode()


def _take_down_orphans() -> None:
    """Take down what tests left that were killed: names say whose they are."""
    for name in (line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(_PREFIX)):
        if not Path("/proc", name.removeprefix(_PREFIX).partition("-")[0]).exists():
            with suppress(subprocess.CalledProcessError):  # another test was faster
                _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
