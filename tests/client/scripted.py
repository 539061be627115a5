"""A service of a few lines, in this process and on a real socket, that fails as a test tells it to."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from typing_extensions import override

from fxlib.v1 import blobs_pb2, blobs_pb2_grpc, graph_pb2, jobs_pb2, jobs_pb2_grpc

Context = grpc.ServicerContext
SUCCEEDED = jobs_pb2.JOB_STATE_SUCCEEDED
RUNNING = jobs_pb2.JOB_STATE_RUNNING
FAILED = jobs_pb2.JOB_STATE_FAILED


class Scripted(jobs_pb2_grpc.OptimizerServiceServicer, blobs_pb2_grpc.BlobServiceServicer):
    """Accepts every job; what becomes of it, and what fails, are attributes.

    `failures` holds status codes by method, each for one call, and `details` are the bytes that come with them in place
    of a `google.rpc.Status`; `cut_after` cuts uploads off after so many bytes.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.failures: dict[str, deque[grpc.StatusCode]] = {}
        self.details = b""
        self.requests: list[jobs_pb2.OptimizeRequest] = []
        self.live: list[jobs_pb2.ReportLiveRequest] = []
        self.blobs: dict[str, bytes] = {}
        self.partial: dict[str, bytes] = {}
        self.written = 0
        self.cut_after: int | None = None
        self.events = [event(1, RUNNING, "rewrite"), event(2, SUCCEEDED, "done")]
        self.events_per_stream = 1000
        self.capabilities = jobs_pb2.GetCapabilitiesResponse()
        self.asked_after: list[int] = []
        self.job = jobs_pb2.Job(id="job-1", state=SUCCEEDED)
        self.job.result.decision = jobs_pb2.DECISION_KEEP_ORIGINAL
        self.job.result.reason_code, self.job.result.reason = "NOT_FASTER", "no gain"

    def fail(self, method: str, *codes: grpc.StatusCode) -> None:
        self.failures[method] = deque(codes)

    def _enter(self, method: str, context: Context) -> None:
        self.calls[method] += 1
        if waiting := self.failures.get(method):
            if self.details:
                context.set_trailing_metadata((("grpc-status-details-bin", self.details),))
            context.abort(waiting.popleft(), f"{method} fails as told")

    @override
    def GetCapabilities(self, request: Any, context: Context) -> jobs_pb2.GetCapabilitiesResponse:
        self._enter("GetCapabilities", context)
        return self.capabilities

    @override
    def ListPasses(self, request: Any, context: Context) -> jobs_pb2.ListPassesResponse:
        self._enter("ListPasses", context)
        return jobs_pb2.ListPassesResponse()

    @override
    def FindMissing(self, request: Any, context: Context) -> blobs_pb2.FindMissingResponse:
        self._enter("FindMissing", context)
        return blobs_pb2.FindMissingResponse(missing=[ref for ref in request.blobs if ref.sha256 not in self.blobs])

    @override
    def QueryWrite(self, request: Any, context: Context) -> blobs_pb2.QueryWriteResponse:
        self._enter("QueryWrite", context)
        name = request.blob.sha256
        return blobs_pb2.QueryWriteResponse(
            committed_bytes=len(self.partial.get(name, b"")), complete=name in self.blobs
        )

    @override
    def Write(self, requests: Iterator[Any], context: Context) -> blobs_pb2.WriteResponse:
        self._enter("Write", context)
        ref = next(requests).blob
        for each in requests:
            kept = self.partial.get(ref.sha256, b"")
            assert each.offset == len(kept)
            self.partial[ref.sha256] = kept + each.data
            self.written += len(each.data)
            if self.cut_after is not None and self.written >= self.cut_after:
                self.cut_after = None
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line went dead")
        data = self.partial.get(ref.sha256, b"")
        if len(data) == ref.size:
            if hashlib.sha256(data).hexdigest() != ref.sha256:
                del self.partial[ref.sha256]
                reject(context, "BLOB_CORRUPT")
            self.blobs[ref.sha256] = data
        return blobs_pb2.WriteResponse(committed_bytes=len(data))

    @override
    def Read(self, request: Any, context: Context) -> Iterator[blobs_pb2.ReadResponse]:
        self._enter("Read", context)
        data = self.blobs[request.blob.sha256][request.offset :]
        half = len(data) // 2
        yield blobs_pb2.ReadResponse(data=data[:half])
        self._enter("Read half", context)
        yield blobs_pb2.ReadResponse(data=data[half:])

    @override
    def Optimize(self, request: Any, context: Context) -> jobs_pb2.OptimizeResponse:
        self.requests.append(request)
        self._enter("Optimize", context)
        return jobs_pb2.OptimizeResponse(job=jobs_pb2.Job(id=self.job.id, state=RUNNING))

    @override
    def WatchJob(self, request: Any, context: Context) -> Iterator[jobs_pb2.WatchJobResponse]:
        self._enter("WatchJob", context)
        self.asked_after.append(request.after_sequence)
        left = [each for each in self.events if each.sequence > request.after_sequence]
        for each in left[: self.events_per_stream]:
            yield jobs_pb2.WatchJobResponse(event=each)

    @override
    def GetJob(self, request: Any, context: Context) -> jobs_pb2.GetJobResponse:
        self._enter("GetJob", context)
        return jobs_pb2.GetJobResponse(job=self.job)

    @override
    def ReportLive(self, request: Any, context: Context) -> jobs_pb2.ReportLiveResponse:
        self.live.append(request)
        self._enter("ReportLive", context)
        return jobs_pb2.ReportLiveResponse()

    @override
    def ListJobs(self, request: Any, context: Context) -> jobs_pb2.ListJobsResponse:
        self._enter("ListJobs", context)
        first = int(request.page_token or 0)
        jobs = [jobs_pb2.Job(id=f"job-{index}", state=SUCCEEDED) for index in range(450)]
        last = first + request.page_size
        return jobs_pb2.ListJobsResponse(jobs=jobs[first:last], next_page_token=str(last) if last < 450 else "")

    def adopt(self, graph: bytes) -> None:
        """Answer with a rewritten graph."""
        ref = graph_pb2.BlobRef(sha256=hashlib.sha256(graph).hexdigest(), size=len(graph))
        self.blobs[ref.sha256] = graph
        self.job.result.decision = jobs_pb2.DECISION_ADOPT
        self.job.result.reason_code, self.job.result.reason = "FASTER", "faster"
        self.job.result.preserves = "bitwise"
        self.job.result.gain.CopyFrom(jobs_pb2.Estimate(value=0.5, low=0.4, high=0.6))
        self.job.result.graph.CopyFrom(ref)


def reject(context: Context, code: str) -> None:
    """End a call with a code of the service's catalogue."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=code, domain="fxlib"))
    status = status_pb2.Status(code=grpc.StatusCode.DATA_LOSS.value[0], message=code, details=[detail])
    context.abort_with_status(rpc_status.to_status(status))


def event(sequence: int, state: jobs_pb2.JobState, phase: str) -> jobs_pb2.JobEvent:
    return jobs_pb2.JobEvent(sequence=sequence, state=state, phase=phase, message=f"event {sequence}", progress=-1)


@contextmanager
def serving(service: Scripted, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve on a free port, or on the given one, and give the address."""
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
        jobs_pb2_grpc.add_OptimizerServiceServicer_to_server(service, server)
        blobs_pb2_grpc.add_BlobServiceServicer_to_server(service, server)
        port = server.add_insecure_port(address)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()
