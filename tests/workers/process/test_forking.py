"""Whoever asks a fork server learns that it says what it never says, and waits for nothing of it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from fxlib_workers.process.containment import Containment
from fxlib_workers.process.forking import ForkError, ForkServer

TIMEOUT_S = 20.0


@pytest.fixture
def server() -> Iterator[tuple[ForkServer, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        yield ForkServer(ours), theirs


@pytest.mark.parametrize(
    "messages",
    [
        ["{"],
        ["[" * 60_000],
        ["[]"],
        ['{"ready": 1}'],
        ['{"ready": true}', '{"ready": true}'],
        ['{"forked": "b", "pid": 3}'],
        ['{"forked": "a"}'],
        ['{"forked": "a", "pid": -1}'],
        ['{"forked": "a", "pid": 3}', '{"forked": "a", "pid": 4}'],
        ['{"ended": "a", "status": 0}'],
    ],
)
def test_a_message_of_another_form_is_the_end_of_a_fork_server(
    server: tuple[ForkServer, socket.socket], messages: list[str]
) -> None:
    asked, theirs = server
    ours, connection = socket.socketpair()
    with ours, connection:
        fork = asked.fork("a", connection, name="a", containment=Containment(parts=frozenset()))
        for message in messages:
            theirs.send(message.encode())
        with pytest.raises(ForkError, match="what it never says"):
            fork.ended.result(TIMEOUT_S)


def test_a_child_is_told_of_as_it_begins_and_ends(server: tuple[ForkServer, socket.socket]) -> None:
    asked, theirs = server
    ours, connection = socket.socketpair()
    with ours, connection:
        fork = asked.fork("a", connection, name="a", containment=Containment(parts=frozenset()))
        for message in ({"ready": True}, {"forked": "a", "pid": 3}, {"ended": "a", "status": -9}):
            theirs.send(json.dumps(message).encode())
        assert (fork.forked.result(TIMEOUT_S), fork.ended.result(TIMEOUT_S)) == (3, -9)
