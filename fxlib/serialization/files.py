"""Captured modules as files: the wire format, and the weights behind it, in one container.

A file is a mark of eight bytes, the length of the graph as a little-endian 64-bit number, the graph's SHA-256, the
graph, and then each blob that the graph refers to, once, in the order in which its storages name them. The graph holds
the blobs' digests. So a file that a disk or a transfer has damaged is refused. Nothing in a file is ever executed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import nn
from torch.fx import GraphModule

from fxlib import wire
from fxlib.errors import LimitError, WireError
from fxlib.runtime import CapturedModule
from fxlib.v1 import graph_pb2

MARK = b"\x93FXG\r\n\x1a\n"
"""Bytes at the beginning of every file; like PNG's, they show when a transfer has changed line ends or the eighth
bit."""

_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_DEVICES = ("/dev/", "/proc/")
"""The beginnings of paths to devices, and to what a process has open, which may be a file: /dev/stdout leads there."""
_NO_FUNCTIONS: Mapping[str, Callable[..., Any]] = {}
_DEFAULT_LIMITS = wire.Limits()


def save(module: GraphModule, path: str | os.PathLike[str], *, weights: bool = True) -> None:
    """Write a module to a file, atomically.

    Args:
        module: the module, a CapturedModule or any other GraphModule.
        path: the file, by convention `*.fxg`.
        weights: whether to write the values of its tensors, too. Without them the file only holds the structure.

    Raises:
        WireError: something in the graph cannot be written; the message names the node and the field.
        OSError: the file cannot be written.
    """
    write_whole(Path(path), contents(module, weights=weights))


def contents(module: GraphModule, *, weights: bool = True) -> tuple[bytes, ...]:
    """Return the bytes of a module's file, in parts.

    Raises:
        WireError: something in the graph cannot be written; the message names the node and the field.
    """
    encoded = wire.encode(module, weights=weights)
    graph = wire.serialize(encoded.graph)
    head = MARK + len(graph).to_bytes(_LENGTH_BYTES, "little") + digest_of(graph)
    return (head, graph, *(encoded.blobs[blob.sha256] for blob in wire.values_of(encoded.graph)))


def digest_of(content: bytes) -> bytes:
    """Return the digest that stands before a content in a file."""
    return hashlib.sha256(content).digest()


def write_whole(target: Path, parts: Iterable[bytes]) -> None:
    """Write a file atomically; devices and pipes, such as /dev/stdout, are written to, and not replaced.

    Raises:
        OSError: the file cannot be written.
    """
    if str(target.absolute()).startswith(_DEVICES) or (target.exists() and not target.is_file()):
        with target.open("wb") as device:
            device.writelines(parts)
        return
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with unfinished.open("xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str],
    *,
    root: nn.Module | None = None,
    functions: Mapping[str, Callable[..., Any]] = _NO_FUNCTIONS,
    limits: wire.Limits = _DEFAULT_LIMITS,
) -> CapturedModule:
    """Read a module from a file.

    Args:
        path: the file.
        root: a module whose own parameters, submodules and callables the graph uses; see `fxlib.wire.decode`.
        functions: callables that are on no allow-list, by the names "package.module.function" of their slots.
        limits: how large the file's graph and weights may be.

    Returns:
        The module. Weights that the file does not hold, and `root` does not supply, are drawn from a fixed seed.

    Raises:
        LimitError: the file exceeds a limit.
        WireError: the file is not a graph, is truncated or damaged, or does not fit `root`.
        OSError: the file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            graph = _read_graph(file, limits)
            wire.validate(graph, limits)
            blobs = {blob.sha256: _exactly(file, blob.size, f"blob {blob.sha256}") for blob in wire.values_of(graph)}
            if file.read(1):
                raise WireError("more bytes than the graph accounts for")
        return wire.decode(graph, blobs=blobs, root=root, functions=functions, limits=limits)
    except WireError as error:
        raise type(error)(str(error), where=str(path)) from error


def _read_graph(file: BinaryIO, limits: wire.Limits) -> graph_pb2.Graph:
    head = file.read(len(MARK) + _LENGTH_BYTES)
    if not head.startswith(MARK) or len(head) < len(MARK) + _LENGTH_BYTES:
        raise WireError("the file does not begin like one that fxlib.save wrote")
    length = int.from_bytes(head[len(MARK) :], "little")
    if length > limits.graph_bytes:
        raise LimitError(f"a graph of {length:,} bytes exceeds the limit of {limits.graph_bytes:,}")
    digest, graph = _exactly(file, _DIGEST_BYTES, "digest"), _exactly(file, length, "graph")
    if digest_of(graph) != digest:
        raise WireError("the graph does not match its digest: the file is damaged", hint="Save or copy it again.")
    return wire.parse(graph, limits)


def _exactly(file: BinaryIO, length: int, what: str) -> bytes:
    remaining = os.fstat(file.fileno()).st_size - file.tell()
    if length > remaining:  # before memory is allocated for it
        raise WireError(f"the file ends {length - remaining:,} bytes early", where=what)
    return file.read(length)
