"""A worker and its child hand each other lines of JSON, and whatever else comes is refused."""

import socket

import pytest

from fxlib_workers.process.child import Channel


@pytest.mark.parametrize(
    "line", [b"nonsense", b"\xff\xfe{\0}\0", b"\x80", b"[1]", b"null", b"[" * 200_000, b'{"a":' * 100_000]
)
def test_a_line_that_is_no_object_is_refused(line: bytes) -> None:
    theirs, ours = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        channel, left = Channel(ours), line + b"\n"
        refusal = ""
        while not refusal:
            left = left[theirs.send(left) :] if left else left
            try:
                assert channel.receive(0.0) is None
            except ValueError as error:
                refusal = str(error)
        assert refusal
        channel.close()


def test_a_message_comes_whole() -> None:
    theirs, ours = socket.socketpair()
    with theirs:
        channel = Channel(ours)
        theirs.sendall(b'{"phase": ')
        assert channel.receive(0.0) is None
        theirs.sendall(b'"qps"}\n{"done"')
        assert channel.receive(5.0) == {"phase": "qps"}
        channel.close()
