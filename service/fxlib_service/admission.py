"""Checks requests: a valid one becomes a job, and any other is refused with every field at fault."""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Final

from fxlib import wire
from fxlib.protocol import blobs_of
from fxlib.v1 import graph_pb2, jobs_pb2
from fxlib.wire import parse
from fxlib_service import content_checks
from fxlib_service.blobs.base import Blob, BlobStore
from fxlib_service.check_pool import CheckPool
from fxlib_service.config import Limits
from fxlib_service.convert import blob_from_proto
from fxlib_service.errors import Code, ServiceError, Violation
from fxlib_service.field_checks import DEFAULT_NAME, check_submission
from fxlib_service.job import Job
from fxlib_service.roles import OWNER, Caller
from fxlib_service.stores.base import JobStore

_MAX_VIOLATIONS: Final = 50


class Admission:
    """Checks a whole request before anything is stored."""

    def __init__(self, blobs: BlobStore, limits: Limits, store: JobStore) -> None:
        self._blobs = blobs
        self._store = store
        self._limits = limits
        self.graph_limits = wire.Limits(nodes=limits.graph_nodes, graph_bytes=limits.graph_bytes)
        self._checks = CheckPool()

    def identify(self, request: jobs_pb2.OptimizeRequest) -> str:
        """Fill in the job's name where it is missing, and return the digest by which a repeated request is recognized.

        Raises:
            ServiceError: INVALID_REQUEST.
        """
        check_submission(request)
        request.name = request.name or DEFAULT_NAME
        return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()

    async def examine(self, request: jobs_pb2.OptimizeRequest, digest: str, caller: Caller) -> Job:
        """Check graph, workload, profile, recipe and trial, and return the job that the caller's request asks for.

        Raises:
            ServiceError: INVALID_REQUEST, INVALID_GRAPH or BLOB_MISSING.
        """
        return await self._checks.run(self._examine, request, digest, caller)

    async def check_graph(self, ref: graph_pb2.BlobRef, field: str) -> None:
        """Check that a blob is stored, and holds a valid graph.

        Raises:
            ServiceError: INVALID_REQUEST, INVALID_GRAPH or BLOB_MISSING.
        """
        await self._checks.run(self._check_graph, ref, field, OWNER)

    async def still_there(self, ref: graph_pb2.BlobRef) -> bool:
        """Whether a graph that was checked before is still stored, with all of its weights. Asking counts as a use."""
        return await self._checks.run(self._still_there, blob_from_proto(ref))

    async def blobs_of_answer(self, result: jobs_pb2.JobResult) -> dict[str, int]:
        """Return the sizes in bytes of the graphs that an answer names, and of their weights, by SHA-256."""
        return await self._checks.run(self._blobs_of_answer, result)

    def _blobs_of_answer(self, result: jobs_pb2.JobResult) -> dict[str, int]:
        found = dict[str, int]()
        for each in (result, *(variant.result for variant in result.variants)):
            if each.HasField("graph"):
                graph = parse(self._blobs.read_all(blob_from_proto(each.graph)))
                found |= {ref.sha256: ref.size for ref in (each.graph, *wire.values_of(graph))}
        return found

    def _still_there(self, blob: Blob) -> bool:
        if self._blobs.size(blob.sha256) is None:
            return False
        values = wire.values_of(parse(self._blobs.read_all(blob)))
        return all(self._blobs.size(ref.sha256) is not None for ref in values)

    def _examine(self, request: jobs_pb2.OptimizeRequest, digest: str, caller: Caller) -> Job:
        if not request.HasField("graph"):
            raise ServiceError(Code.INVALID_REQUEST, violations=[Violation(field="graph", problem="is not set")])
        content_checks.complete_trial(request)
        content_checks.check_workload(request.workload)
        content_checks.check_profile(request)
        content_checks.check_variants(request)
        key = content_checks.cache_key(request)
        self._check_present({f"workload.blobs[{i}]": ref for i, ref in enumerate(blobs_of(request.workload))}, caller)
        self._check_graph(request.graph, "graph", caller, request.recipe)
        if request.workload.loss.WhichOneof("kind") == "graph":
            self._check_graph(request.workload.loss.graph, "workload.loss.graph", caller)
        for index, each in enumerate(request.variants):
            field = f"variants[{index}]"
            blobs = enumerate(blobs_of(each.workload))
            self._check_present({f"{field}.workload.blobs[{i}]": ref for i, ref in blobs}, caller)
            self._check_graph(each.graph, f"{field}.graph", caller, request.recipe)
            if each.workload.loss.WhichOneof("kind") == "graph":
                self._check_graph(each.workload.loss.graph, f"{field}.workload.loss.graph", caller)
        return Job(
            id=uuid.uuid4().hex,
            request_id=request.request_id,
            request_digest=digest,
            namespace=request.namespace,
            name=request.name,
            labels=dict(request.labels),
            torch_version=request.torch_version,
            cache_key=key,
            fresh=request.fresh,
            created_at=time.time(),
        )

    def _check_graph(
        self, ref: graph_pb2.BlobRef, field: str, caller: Caller, recipe: jobs_pb2.Recipe | None = None
    ) -> None:
        self._check_present({field: ref}, caller)
        blob = blob_from_proto(ref, field)
        if blob.size > self._limits.graph_bytes:
            problem = f"has {blob.size} bytes, and a graph may have {self._limits.graph_bytes}"
            raise ServiceError(Code.INVALID_GRAPH, violations=[Violation(field=field, problem=problem)])
        weights = content_checks.check_graph(self._blobs.read_all(blob), field, self.graph_limits, recipe)
        self._check_present({f"{field}.storages[{index}]": ref for index, ref in enumerate(weights)}, caller)

    def _check_present(self, refs: dict[str, graph_pb2.BlobRef], caller: Caller) -> None:
        blobs = {field: blob_from_proto(ref, field) for field, ref in refs.items()}
        named = {blob.sha256 for blob in blobs.values()}
        known = named if caller.namespace is None else self._store.held(caller.namespace, named)
        missing = {
            field: blob
            for field, blob in blobs.items()
            if self._blobs.size(blob.sha256) != blob.size or blob.sha256 not in known
        }
        if missing:
            violations = [
                Violation(field=field, problem=f"blob {blob.sha256} of {blob.size} bytes is not here")
                for field, blob in list(missing.items())[:_MAX_VIOLATIONS]
            ]
            raise ServiceError(Code.BLOB_MISSING, violations=violations, hint="Upload it, then ask again.")
