"""Finds the blobs that a job names, in its request and answer and in the graphs that they refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from fxlib.errors import WireError
from fxlib.protocol import blobs_of
from fxlib.v1 import graph_pb2, jobs_pb2
from fxlib.wire import parse, values_of
from fxlib_service.blobs.base import CheckedBlob
from fxlib_service.convert import checked_blob
from fxlib_service.errors import LOST, Code, ServiceError

_NAMES_NOTHING: Final = LOST | {Code.INVALID_REQUEST}


class NamedBlobs:
    """Reads requests and answers, and each graph that they name once.

    A graph that is missing or damaged, or was never valid, names nothing. A fault of the storage says nothing about a
    graph, so it is raised by every method.

    Args:
        read: returns the bytes of a graph; raises ServiceError if it is missing. The bytes may be damaged.
    """

    def __init__(self, read: Callable[[CheckedBlob], bytes]) -> None:
        self._read = read
        self._graphs: dict[str, frozenset[str]] = {}

    def in_request(self, request: bytes) -> set[str]:
        """Return the SHA-256 of each blob that a serialized request names."""
        asked = jobs_pb2.OptimizeRequest.FromString(request)
        workloads = [asked.workload, *(each.workload for each in asked.variants)]
        graphs = [asked.graph, *(each.graph for each in asked.variants)]
        graphs += [each.loss.graph for each in workloads if each.loss.WhichOneof("kind") == "graph"]
        return {ref.sha256 for each in workloads for ref in blobs_of(each)} | self._with_weights(graphs)

    def in_result(self, result: bytes) -> set[str]:
        """Return the SHA-256 of each blob that a serialized answer names."""
        answer = jobs_pb2.JobResult.FromString(result)
        answers = (answer, *(variant.result for variant in answer.variants))
        return self._with_weights(each.graph for each in answers if each.HasField("graph"))

    def _with_weights(self, graphs: Iterable[graph_pb2.BlobRef]) -> set[str]:
        named = set[str]()
        for ref in graphs:
            if ref.sha256 not in self._graphs:
                self._graphs[ref.sha256] = frozenset(self._weights(ref))
            named |= {ref.sha256, *self._graphs[ref.sha256]}
        return named

    def _weights(self, ref: graph_pb2.BlobRef) -> Iterator[str]:
        try:
            graph = parse(self._read(checked_blob(ref)))
        except WireError:
            return
        except ServiceError as error:
            if error.code not in _NAMES_NOTHING:
                raise
            return
        yield from (storage.sha256 for storage in values_of(graph))
