"""The real service in a process of its own, and a worker that answers as a test tells it to."""

import json
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import grpc
import torch
from torch.fx import GraphModule

from fxlib import protocol, wire
from fxlib.client.blobs import upload
from fxlib.client.connection import Connection, Deadline
from fxlib.reasons import Reason
from fxlib.recipes import recipes
from fxlib.spec.report import Estimate, Report
from fxlib.v1 import blobs_pb2, graph_pb2, jobs_pb2, workers_pb2, workers_pb2_grpc
from tests.shared.forked import Module

_NO_LABELS: Mapping[str, str] = MappingProxyType({})

Answer = Callable[[workers_pb2.Lease, GraphModule], tuple[Report, GraphModule]]
"""A lease and its graph to a report and the graph that it speaks of."""


@contextmanager
def real_service(data: Path, *options: str, end: signal.Signals = signal.SIGTERM) -> Iterator[str]:
    """Run `python -m fxlib_service` on free ports, or where the options say, and give its address."""
    ready = data / "ready"
    ready.unlink(missing_ok=True)
    data.mkdir(parents=True, exist_ok=True)
    arguments = ["--data", str(data / "service"), "--ready-file", str(ready), *options]
    for option in ("--listen", "--metrics"):
        if option not in options:
            arguments += [option, "127.0.0.1:0"]
    process = Module("fxlib_service", *arguments, log=data / "service.log")
    try:
        yield json.loads(process.until_written(ready))["listen"]
    finally:
        process.end(end)


def free_port() -> int:
    """Return a port to listen on, of those that the system gives to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # tests fix the seed of the usual one
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def scripted_worker(
    address: str, answer: Answer, *, name: str = "scripted", labels: Mapping[str, str] = _NO_LABELS
) -> Iterator[None]:
    """Claim jobs and complete them with `answer`, on a thread."""
    stop = threading.Event()
    info = jobs_pb2.WorkerInfo(worker_id=name, torch_version=torch.__version__, hardware="test", labels=dict(labels))
    thread = threading.Thread(target=_work, args=(address, info, answer, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _work(address: str, info: jobs_pb2.WorkerInfo, answer: Answer, stop: threading.Event) -> None:
    connection = Connection(address)
    stub = workers_pb2_grpc.WorkerServiceStub(connection._channel)
    while not stop.is_set():
        with suppress(grpc.RpcError):
            claimed = stub.Claim(workers_pb2.ClaimRequest(worker=info, wait_s=0.5), timeout=60)
            if claimed.HasField("lease"):
                _complete(connection, stub, claimed.lease, answer)
    connection.close()


def _complete(
    connection: Connection, stub: workers_pb2_grpc.WorkerServiceStub, lease: workers_pb2.Lease, answer: Answer
) -> None:
    stub.Report(
        workers_pb2.ReportRequest(
            job_id=lease.job_id, token=lease.token, phase="rewrite", message="scripted", progress=0.5
        ),
        timeout=60,
    )
    result = _answered(connection, lease, lease.request.graph, answer)
    for each in lease.request.variants:
        result.variants.add(name=each.name, result=_answered(connection, lease, each.graph, answer))
    stub.Complete(workers_pb2.CompleteRequest(job_id=lease.job_id, token=lease.token, result=result), timeout=60)


def _answered(
    connection: Connection, lease: workers_pb2.Lease, asked: graph_pb2.BlobRef, answer: Answer
) -> jobs_pb2.JobResult:
    sent = wire.parse(_read(connection, asked))
    blobs = {ref.sha256: _read(connection, ref) for ref in wire.values_of(sent)}
    original = wire.decode(sent, blobs=blobs)
    report, rewritten = answer(lease, original)
    encoded = wire.encode(rewritten, beside=original)
    graph = wire.serialize(encoded.graph)
    ref = protocol.blob_ref(graph)
    upload(connection, {**encoded.blobs, ref.sha256: graph}, Deadline(60))
    return protocol.report_to_proto(report, graph=protocol.blob_from_proto(ref))


def _read(connection: Connection, blob: graph_pb2.BlobRef) -> bytes:
    return b"".join(chunk.data for chunk in connection.blobs.Read(blobs_pb2.ReadRequest(blob=blob), timeout=60))


def adopt(lease: workers_pb2.Lease, graph: GraphModule) -> tuple[Report, GraphModule]:
    """Schedule the calls of the graph, whatever was asked for, and say that it is faster."""
    rewrite = recipes.apply(graph, "schedule", diffs=lease.request.diffs)
    report = Report(
        decision="adopt",
        reason=Reason.FASTER,
        explanation=Reason.FASTER.sentence(),
        qps_original=Estimate(value=100, low=99, high=101),
        qps_optimized=Estimate(value=150, low=148, high=152),
        gain=Estimate(value=0.5, low=0.48, high=0.52),
        passes=rewrite.passes,
        preserves=rewrite.preserves,
        max_relative_error=0.0,
        hardware="test",
    )
    return report, rewrite.module
