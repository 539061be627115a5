"""A feature store as a company might have one: a server on a socket, and a blocking client of a few lines."""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from socket import create_connection
from typing import Any

import torch
from typing_extensions import override

import fxlib

_POOL = ThreadPoolExecutor(16)
_HEADER = struct.Struct("!cq")
_WAIT_S = 20.0


class Store(socketserver.ThreadingTCPServer):
    """Answers from one column of numbers, once as many requests are in flight together as `together` says."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.values = torch.arange(100, dtype=torch.float32)
        self.log: list[str] = []
        self.most_in_flight = 0
        self.together = 1
        self._in_flight = 0
        self._changed = threading.Condition()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def reset(self, together: int = 1) -> None:
        self.values = torch.arange(100, dtype=torch.float32)
        self.log, self.most_in_flight, self.together = [], 0, together

    def enter(self, verb: str) -> None:
        with self._changed:
            self.log.append(verb)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most_in_flight >= self.together, _WAIT_S)

    def leave(self) -> None:
        with self._changed:
            self._in_flight -= 1


class _Handler(socketserver.StreamRequestHandler):
    server: Store

    @override
    def handle(self) -> None:
        verb, count = _HEADER.unpack(self.rfile.read(_HEADER.size))
        rows = torch.frombuffer(bytearray(self.rfile.read(8 * count)), dtype=torch.int64)
        self.server.enter(verb.decode())
        if verb == b"p":
            self.server.values[rows] += 1000
        found = self.server.values[rows] if int(rows.max()) < 100 else torch.empty(0)
        self.server.leave()  # before the answer, which may bring the next request at once
        self.wfile.write(found.numpy().tobytes())


@contextmanager
def serving() -> Iterator[Store]:
    with Store() as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        yield store
        store.shutdown()


# The client.


def get(host: str, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return the features of rows.

    Raises:
        LookupError: there is no such row.
    """
    return _ask(b"g", host, rows) * scale


def get_later(host: str, rows: torch.Tensor, scale: float = 1.0) -> Future[torch.Tensor]:
    return _POOL.submit(get, host, rows, scale)


def put(host: str, rows: torch.Tensor) -> torch.Tensor:
    return _ask(b"p", host, rows)


def put_later(host: str, rows: torch.Tensor) -> Future[torch.Tensor]:
    return _POOL.submit(put, host, rows)


@fxlib.remote(reads="features", returns=(None, None))
def get_two(rows: torch.Tensor, *, hosts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (_ask(b"g", host, rows) for host in hosts)
    return first, second


def get_two_later(rows: torch.Tensor, *, hosts: Any) -> Future[Any]:
    return _POOL.submit(get_two, rows, hosts=hosts)


def guess(host: str, rows: torch.Tensor) -> torch.Tensor:
    """Declares nothing."""
    return _ask(b"g", host, rows)


def guess_later(host: str, rows: torch.Tensor) -> Future[torch.Tensor]:
    return _POOL.submit(guess, host, rows)


def join(future: Future[Any]) -> Any:
    return future.result()


def _ask(verb: bytes, host: str, rows: torch.Tensor) -> torch.Tensor:
    name, _, port = host.rpartition(":")
    with create_connection((name, int(port))) as connection, connection.makefile("rwb") as line:
        line.write(_HEADER.pack(verb, rows.numel()) + rows.numpy().tobytes())
        line.flush()
        answer = line.read(4 * rows.numel())
    if len(answer) != 4 * rows.numel():
        raise LookupError(f"no row {int(rows.max())}")
    return torch.frombuffer(bytearray(answer), dtype=torch.float32)


READS, WRITES = fxlib.Contract(reads=frozenset({"features"})), fxlib.Contract(writes=frozenset({"features"}))
fxlib.register_call(name="features", blocking=get, issue=get_later, wait=join, contract=READS, to="host")
fxlib.register_call(name="features: put", blocking=put, issue=put_later, wait=join, contract=WRITES, to="host")
fxlib.register_call(name="features: two", blocking=get_two, issue=get_two_later, wait=join)
fxlib.register_call(name="features: guess", blocking=guess, issue=guess_later, wait=join, to="host")
