"""Checks requests. A valid one becomes a job; any other is refused, with every field at fault."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from fxlib import wire
from fxlib.protocol import blobs_of
from fxlib.v1 import graph_pb2, jobs_pb2, workload_pb2
from fxlib_service import content_checks
from fxlib_service.blobs.base import BlobStore, CheckedBlob, damaged
from fxlib_service.check_pool import CheckPool
from fxlib_service.clock import Clock
from fxlib_service.config import Limits
from fxlib_service.convert import checked_blob
from fxlib_service.errors import LOST, Code, ServiceError, Violation
from fxlib_service.field_checks import DEFAULT_NAME, check_submission
from fxlib_service.job import Job
from fxlib_service.roles import OWNER, Caller
from fxlib_service.stores.base import JobStore

_MAX_VIOLATIONS: Final = 50
_REMEMBERED: Final = 10_000
_FEW: Final = 64
_SMALL_BYTES: Final = 1 << 20
_SMALL_TRIAL_BYTES: Final = 4 << 10
"""Size in bytes of the largest serialized trial that is cached. A trial has a dozen numbers, apart from unknown
fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The facts about a valid request, which hold for every request with the same content.

    Attributes:
        key: the cache key.
        trial: the trial, completed, as bytes.
        blobs: sizes in bytes of the blobs that it names, including weights, by SHA-256.
        graphs: the blobs that are graphs.
    """

    key: str
    trial: bytes
    blobs: Mapping[str, int]
    graphs: frozenset[str]


class Admission:
    """Checks a whole request before anything is stored.

    Attributes:
        checks: the processes in which graphs, requests and results are checked.
    """

    def __init__(
        self,
        blobs: BlobStore,
        limits: Limits,
        store: JobStore,
        clock: Clock | None = None,
    ) -> None:
        self._blobs = blobs
        self._clock = clock or Clock()
        self._store = store
        self._limits = limits
        self.graph_limits = wire.Limits(nodes=limits.graph_nodes, graph_bytes=limits.graph_bytes)
        self.checks = CheckPool()
        self._valid: OrderedDict[bytes, Examined] = OrderedDict()

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
        if not request.HasField("graph"):
            raise ServiceError(Code.INVALID_REQUEST, violations=[Violation(field="graph", problem="is not set")])
        data = _content(request)
        content = hashlib.sha256(data).digest()
        key = await self._completed(request, data, content, caller)
        blobs = await self._check_workload(request.workload, "workload", caller)
        blobs |= await self._check_graph(request.graph, "graph", caller, request.recipe)
        blobs |= await self._check_loss(request.workload, "workload", caller)
        for index, each in enumerate(request.variants):
            field = f"variants[{index}]"
            blobs |= await self._check_workload(each.workload, f"{field}.workload", caller)
            blobs |= await self._check_graph(each.graph, f"{field}.graph", caller, request.recipe)
            blobs |= await self._check_loss(each.workload, f"{field}.workload", caller)
        graphs = frozenset(_graphs_of(request))
        trial = request.trial.SerializeToString()
        if is_small(blobs, graphs) and len(trial) <= _SMALL_TRIAL_BYTES:
            self._valid[content] = Examined(key=key, trial=trial, blobs=blobs, graphs=graphs)
            while len(self._valid) > _REMEMBERED:
                self._valid.popitem(last=False)
        return self.job(request, digest, key)

    def recalled(self, request: jobs_pb2.OptimizeRequest) -> Examined | None:
        """Return what is known of a request if an equal one was valid. Its blobs may be gone, or not the caller's."""
        content = hashlib.sha256(_content(request)).digest()
        if content not in self._valid:
            return None
        self._valid.move_to_end(content)
        return self._valid[content]

    def intact(self, blobs: Mapping[str, int], graphs: Collection[str]) -> bool:
        """Return whether blobs are stored with these sizes, and the graphs among them have their digests; blocks.

        Asking counts as a use.
        """
        return all(self._blobs.size(sha256) == size for sha256, size in blobs.items()) and all(
            map(self._blobs.verify, graphs)
        )

    def job(self, request: jobs_pb2.OptimizeRequest, digest: str, key: str) -> Job:
        """Return the job that a valid request asks for."""
        return Job(
            id=uuid.uuid4().hex,
            request_id=request.request_id,
            request_digest=digest,
            namespace=request.namespace,
            name=request.name,
            labels=dict(request.labels),
            where=dict(request.where),
            torch_version=request.torch_version,
            cache_key=key,
            fresh=request.fresh,
            created_at=self._clock.now(),
        )

    async def check_graph(self, ref: graph_pb2.BlobRef, field: str) -> None:
        """Check that a blob is stored and holds a valid graph.

        Raises:
            ServiceError: INVALID_REQUEST, INVALID_GRAPH or BLOB_MISSING.
        """
        await self._check_graph(ref, field, OWNER)

    async def check_result(self, result: bytes, trial: bytes, caller: Caller) -> None:
        """Check a worker's serialized answer for a job with this serialized trial; its graphs are not checked.

        Raises:
            ServiceError: INVALID_REQUEST.
        """
        await self.checks.run(content_checks.check_answer, result, trial, tenant=caller.tenant)

    async def still_there(self, ref: graph_pb2.BlobRef, tenant: str) -> bool:
        """Return whether a graph that was checked before is still stored with its weights. Asking counts as a use."""
        blob = checked_blob(ref)
        if await asyncio.to_thread(self._blobs.size, blob.sha256) != blob.size:
            return False
        try:
            weights = await self._weights_of(blob, tenant)
        except ServiceError as error:
            if error.code not in LOST:
                raise
            return False
        return await asyncio.to_thread(lambda: all(self._blobs.size(sha256) == size for sha256, size in weights))

    async def blobs_of_answer(self, result: jobs_pb2.JobResult, tenant: str) -> dict[str, int]:
        """Return the sizes in bytes of the graphs that an answer names, and of their weights, by SHA-256."""
        found = dict[str, int]()
        for each in (result, *(variant.result for variant in result.variants)):
            if each.HasField("graph"):
                blob = checked_blob(each.graph)
                found |= {blob.sha256: blob.size, **dict(await self._weights_of(blob, tenant))}
        return found

    async def _completed(self, request: jobs_pb2.OptimizeRequest, data: bytes, content: bytes, caller: Caller) -> str:
        """Check everything in a request except its blobs, complete its trial, and return its cache key."""
        trial, key = await self.checks.run(content_checks.examined, data, tenant=caller.tenant, key=content)
        request.trial.ParseFromString(trial)
        return key

    async def _check_workload(self, workload: workload_pb2.Workload, field: str, caller: Caller) -> dict[str, int]:
        named = {f"{field}.blobs[{index}]": ref for index, ref in enumerate(blobs_of(workload))}
        if named:
            await asyncio.to_thread(self._check_present, named, caller)
        return {ref.sha256: ref.size for ref in named.values()}

    async def _check_loss(self, workload: workload_pb2.Workload, field: str, caller: Caller) -> dict[str, int]:
        if workload.loss.WhichOneof("kind") != "graph":
            return {}
        return await self._check_graph(workload.loss.graph, f"{field}.loss.graph", caller)

    async def _check_graph(
        self, ref: graph_pb2.BlobRef, field: str, caller: Caller, recipe: jobs_pb2.Recipe | None = None
    ) -> dict[str, int]:
        blob = checked_blob(ref, field)
        asked = None if recipe is None else recipe.SerializeToString(deterministic=True)

        def load(known: bool) -> bytes:
            self._check_present({field: ref}, caller)
            if blob.size > self._limits.graph_bytes:
                problem = f"has {blob.size} bytes, and a graph may have {self._limits.graph_bytes}"
                raise ServiceError(Code.INVALID_GRAPH, violations=[Violation(field=field, problem=problem)])
            try:
                return self._sound(blob, known)
            except ServiceError as error:
                if error.code not in LOST:
                    raise
                raise _missing({field: blob}) from error

        weights = await self.checks.run(
            content_checks.weights_needed,
            field,
            self.graph_limits,
            asked,
            tenant=caller.tenant,
            key=(blob.sha256, field, asked and hashlib.sha256(asked).digest()),
            load=load,
        )
        refs = [graph_pb2.BlobRef(sha256=sha256, size=size) for sha256, size in weights]
        if refs:
            named = {f"{field}.storages[{index}]": ref for index, ref in enumerate(refs)}
            await asyncio.to_thread(self._check_present, named, caller)
        return {blob.sha256: blob.size, **dict(weights)}

    async def _weights_of(self, blob: CheckedBlob, tenant: str) -> content_checks.Sizes:
        return await self.checks.run(
            content_checks.weights_of, tenant=tenant, key=blob.sha256, load=lambda known: self._sound(blob, known)
        )

    def _sound(self, blob: CheckedBlob, known: bool) -> bytes:
        """Return the bytes of a blob, or nothing if they are known; either way they are read and have its digest."""
        if not known:
            return self._blobs.read_all(blob)
        if not self._blobs.verify(blob.sha256):
            raise damaged(blob.sha256)
        return b""

    def _check_present(self, refs: dict[str, graph_pb2.BlobRef], caller: Caller) -> None:
        blobs = {field: checked_blob(ref, field) for field, ref in refs.items()}
        named = {blob.sha256 for blob in blobs.values()}
        known = named if caller.namespace is None else self._store.held(caller.namespace, named)
        missing = {
            field: blob
            for field, blob in blobs.items()
            if self._blobs.size(blob.sha256) != blob.size or blob.sha256 not in known
        }
        if missing:
            raise _missing(missing)


def is_small(blobs: Mapping[str, int], graphs: Collection[str]) -> bool:
    """Return whether the blobs of a request or an answer are small enough to be checked each time that it arrives."""
    return len(blobs) <= _FEW and sum(blobs[sha256] for sha256 in graphs) <= _SMALL_BYTES


def _content(request: jobs_pb2.OptimizeRequest) -> bytes:
    """Return a request without the fields in which equal requests may differ."""
    content = jobs_pb2.OptimizeRequest()
    content.CopyFrom(request)
    for field in ("request_id", "name", "namespace", "labels", "fresh", "traceparent"):
        content.ClearField(field)
    return content.SerializeToString(deterministic=True)


def _graphs_of(request: jobs_pb2.OptimizeRequest) -> Iterator[str]:
    yield from (request.graph.sha256, *(each.graph.sha256 for each in request.variants))
    for workload in (request.workload, *(each.workload for each in request.variants)):
        if workload.loss.WhichOneof("kind") == "graph":
            yield workload.loss.graph.sha256


def _missing(blobs: Mapping[str, CheckedBlob]) -> ServiceError:
    violations = [
        Violation(field=field, problem=f"blob {blob.sha256} of {blob.size} bytes is not here")
        for field, blob in list(blobs.items())[:_MAX_VIOLATIONS]
    ]
    return ServiceError(Code.BLOB_MISSING, violations=violations, hint="Upload it, then ask again.")
