"""Graphs as bytes: deterministic, so that equal modules have equal digests."""

from __future__ import annotations

import hashlib

from google.protobuf.message import DecodeError

from fxlib.errors import WireError
from fxlib.v1 import graph_pb2 as pb
from fxlib.wire.faults import excess
from fxlib.wire.limits import DEFAULT, Limits


def serialize(graph: pb.Graph) -> bytes:
    """Return the bytes of a graph; equal graphs give equal bytes in every process."""
    return graph.SerializeToString(deterministic=True)


def parse(data: bytes, limits: Limits = DEFAULT) -> pb.Graph:
    """Return the graph that bytes hold, unchecked but for its size; `validate` and `decode` check the rest.

    Raises:
        LimitError: there are too many bytes.
        WireError: the bytes are truncated, nested too deeply, or no graph at all.
    """
    if len(data) > limits.graph_bytes:
        raise excess("bytes of a graph", len(data), limits.graph_bytes, "graph_bytes").at("graph")
    try:
        return pb.Graph.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"the bytes are no graph: {error}", where="graph") from None


def digest(graph: pb.Graph) -> str:
    """Return the SHA-256, in hexadecimal digits, of the graph's serialization."""
    return hashlib.sha256(serialize(graph)).hexdigest()


def values_of(graph: pb.Graph) -> list[pb.BlobRef]:
    """Return the blobs that hold the values of a graph's tensors, each once, in the order of its storages."""
    refs = [storage.data for storage in graph.storages if storage.HasField("data")]
    return list({ref.sha256: ref for ref in refs}.values())
