"""The limited link of `benchmarks.overlap`: two network namespaces that are gone afterwards, whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.grid import link

pytestmark = pytest.mark.skipif(bool(link.unavailable()), reason=link.unavailable() or "there can be a link")


def ours() -> list[str]:
    """Namespaces of this process."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{link.PREFIX}-{os.getpid()}-")]


def test_both_ends_are_of_the_rate_asked_for(tmp_path: Path) -> None:
    with link.limited(100, tmp_path):
        rates = [
            subprocess.run(["tc", "-n", end, "qdisc", "show"], check=True, capture_output=True, text=True).stdout
            for end in ours()
        ]
    assert ["rate 100Mbit" in each for each in rates] == [True, True]


def test_the_servers_python_is_at_the_other_end(tmp_path: Path) -> None:
    with link.limited(100, tmp_path) as found:
        command = [str(found.servers_python), "-c", "import socket; print(socket.if_nameindex())"]
        servers = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        address = subprocess.run(
            [*found.trainer, "ip", "-json", "address", "show", link.DEVICE], check=True, capture_output=True, text=True
        ).stdout
    assert link.DEVICE in servers
    assert json.loads(address)[0]["addr_info"][0]["local"] == "10.0.0.1"
    assert found.servers_python.read_text().count(sys.executable) == 1


def interrupted(folder: Path) -> None:
    """Be interrupted while a link is up."""
    with link.limited(100, folder):
        assert len(ours()) == 2
        raise KeyboardInterrupt


def test_nothing_is_left_after_an_interrupt(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    assert ours() == []


def test_what_a_killed_run_left_is_taken_down_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"{link.PREFIX}-{gone.pid}-trainer"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with link.limited(100, tmp_path):
        listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert left not in listed
