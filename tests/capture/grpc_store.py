"""A feature store behind gRPC, and three functions that make its stub's calls known to fxlib."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import torch

import fxlib

_LOOKUP = "/store.Store/Lookup"
_THREADS = 8


class StoreStub:
    """A stub as `grpcio-tools` generates one: each attribute calls one method."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Lookup: Any = channel.unary_unary(_LOOKUP, request_serializer=encode, response_deserializer=decode)


def lookup(stub: StoreStub, rows: torch.Tensor) -> torch.Tensor:
    """Call the store, and block."""
    found: torch.Tensor = stub.Lookup(rows, timeout=20.0)
    return found


def lookup_later(stub: StoreStub, rows: torch.Tensor) -> Any:
    """Start the call, and return gRPC's future."""
    return stub.Lookup.future(rows, timeout=20.0)


def join(call: Any) -> torch.Tensor:
    """Return the answer, or raise the `grpc.RpcError` that the call raised."""
    found: torch.Tensor = call.result()
    return found


fxlib.register_call(
    name="gRPC store",
    blocking=lookup,
    issue=lookup_later,
    wait=join,
    contract=fxlib.Contract(reads=frozenset({"features"})),
    to="stub",
)


def encode(tensor: torch.Tensor) -> bytes:
    """Write a vector."""
    values = tensor.detach().double().tolist()
    return struct.pack(f"!{len(values)}d", *values)


def decode(message: bytes) -> torch.Tensor:
    """Read a vector."""
    return torch.tensor(struct.unpack(f"!{len(message) // 8}d", message), dtype=torch.float32)


@contextmanager
def serving(log: list[str], answer: Any) -> Iterator[StoreStub]:
    """Yield a stub of a server of this process that answers with `answer(rows)`, and notes each call in `log`."""

    def served(rows: torch.Tensor, _: grpc.ServicerContext) -> torch.Tensor:
        log.append("Lookup")
        found: torch.Tensor = answer(rows)
        return found

    handler = grpc.unary_unary_rpc_method_handler(served, request_deserializer=decode, response_serializer=encode)
    server = grpc.server(ThreadPoolExecutor(_THREADS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("store.Store", {"Lookup": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield StoreStub(channel)
    finally:
        server.stop(None).wait()
