"""The hosts that tests have on one machine: their line delays and carries as it is told, and is gone afterwards."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.shared.hosts import Host, two_hosts, unavailable

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "there can be hosts")
ANSWER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.sendall(connection.recv(1))
    left = int(sys.argv[2])
    while left:
        left -= len(connection.recv(1 << 16))
    connection.sendall(b"x")
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000)) as connection:
    for sent in (b"x", bytes(int(sys.argv[2]))):
        began = time.monotonic()
        connection.sendall(sent)
        connection.recv(1)
        print(time.monotonic() - began)
"""
SENT = 1_000_000
"""How many bytes go over the line at once."""


def seconds(hosts: Sequence[Host]) -> tuple[float, float]:
    """Return how long one byte takes there and back, and how long many bytes take."""
    asking, answering = hosts
    script = [*answering.within, sys.executable, "-c", ANSWER, answering.address, str(SENT)]
    with subprocess.Popen(script, stdout=subprocess.PIPE) as answers:
        assert answers.stdout is not None
        assert answers.stdout.readline() == b"ready\n"
        asked = [*asking.within, sys.executable, "-c", ASK, answering.address, str(SENT)]
        told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    one, many = map(float, told.split())
    return one, many


def namespaces() -> str:
    """Return what there is, by name."""
    return subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_the_line_has_the_delay_and_the_rate() -> None:
    with two_hosts(delay_s=0.02, bytes_per_s=4e6) as hosts:
        one, many = seconds(hosts)
    assert one >= 0.04
    assert many >= 0.04 + SENT / 4e6
    assert (
        f"fxlib-test-{os.getpid()}-"
        not in subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    )


@pytest.mark.slow
def test_what_a_killed_test_left_is_taken_down() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"fxlib-test-{gone.pid}-1"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with two_hosts(delay_s=0.0, bytes_per_s=1e9):
        assert left not in namespaces()
