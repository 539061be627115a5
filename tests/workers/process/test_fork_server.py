"""The fork server: its children work, tell how they end, and never outlive it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import pytest

from fxlib_workers.process.child import CHANNEL, python, search_path
from fxlib_workers.process.containment import Containment
from fxlib_workers.process.forking import SINGLE_THREADED

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
NOTHING = Containment(parts=frozenset()).dumps()


class Server:
    """A fork server of this test's own."""

    def __init__(self, module: str) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(TIMEOUT_S)
        with theirs:
            self.process = subprocess.Popen(
                [*python("fxlib_workers.process.fork_server"), module],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": search_path(), **SINGLE_THREADED, CHANNEL: str(theirs.fileno())},
            )
        self.children: list[socket.socket] = []
        self.first = self.heard()

    def heard(self) -> Mapping[str, Any]:
        message: Mapping[str, Any] = json.loads(self.control.recv(1 << 16))
        return message

    def fork(self, key: str, name: str = "child") -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        self.children.append(ours)
        with theirs:
            request = {"fork": key, "name": name, "containment": NOTHING, "network": ""}
            socket.send_fds(self.control, [json.dumps(request).encode()], [theirs.fileno()])
        told = self.heard()
        assert (told["forked"], told["pid"] > 0) == (key, True)
        return ours

    def end(self) -> None:
        for each in (self.control, *self.children):
            each.close()
        self.process.kill()
        self.process.wait()

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def told(child: socket.socket, word: str) -> str:
    child.sendall(word.encode())
    return child.recv(100).decode()


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    return not alive


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("tests.workers.forked_child")
    yield made
    made.end()


def test_a_child_serves_its_socket_under_its_name_at_once(server: Server) -> None:
    assert server.first == {"ready": True}
    begin = time.monotonic()
    child = server.fork("1", "trainer0")
    assert told(child, "name") == "trainer0"
    assert time.monotonic() - begin < 1.0  # the machine may be busy


def test_children_draw_numbers_of_their_own(server: Server) -> None:
    assert told(server.fork("1"), "draw") != told(server.fork("2"), "draw")


def test_how_a_child_ended_is_told(server: Server) -> None:
    for key, word, status in (("1", "exit", 7), ("2", "kill", -9)):
        server.fork(key).sendall(word.encode())
        assert server.heard() == {"ended": key, "status": status}


def test_a_child_that_is_to_end_is_killed_with_what_it_orphaned_and_others_stay(server: Server) -> None:
    first, second = server.fork("1"), server.fork("2")
    assert told(first, "breed") == "bred"
    below = server.below()
    assert len(below) == 3
    server.control.send(json.dumps({"end": ["1", "unknown"]}).encode())
    assert server.heard() == {"ended": "1", "status": -9}
    assert len(server.below()) == 1
    assert told(second, "name") == "child"


@pytest.mark.parametrize("end", [lambda server: server.control.close(), lambda server: server.process.kill()])
def test_no_child_outlives_the_fork_server_or_who_asked_it(server: Server, end: Callable[[Server], None]) -> None:
    children = [server.fork("1"), server.fork("2")]
    below = server.below()
    end(server)
    assert gone(below)
    assert [child.recv(1) for child in children] == [b"", b""]


def test_a_module_that_starts_a_thread_is_refused() -> None:
    server = Server("tests.workers.threaded_module")
    try:
        assert server.first == {
            "failed": "RuntimeError: the import of tests.workers.threaded_module started threads: 1"
        }
        assert server.process.wait(TIMEOUT_S) == 1
    finally:
        server.end()
