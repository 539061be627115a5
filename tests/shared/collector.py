"""A collector of OpenTelemetry's traces: it listens on a port of this machine, and keeps what it is sent."""

import atexit
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from fxlib.utils import tracing

_WAIT_S = 30.0


class Collector:
    """The spans that have arrived, as OTLP's own messages, each with the name of its process."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def take(self, data: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        for each in trace_service_pb2.ExportTraceServiceRequest.FromString(data).resource_spans:
            (process,) = (one.value.string_value for one in each.resource.attributes if one.key == "service.name")
            self.spans += [(process, span) for scope in each.scope_spans for span in scope.spans]

    def trace_of(self, job_id: str) -> list[tuple[str, Any]]:
        """Return the spans of the trace that a job's launcher began."""
        traces = {span.trace_id for _, span in self.spans if attributes(span).get("fxlib.job_id") == job_id}
        return [(process, span) for process, span in self.spans if span.trace_id in traces]

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for what must have arrived."""
        deadline = time.monotonic() + _WAIT_S
        while not true():
            assert time.monotonic() < deadline, sorted((process, span.name) for process, span in self.spans)
            time.sleep(0.05)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Have this process, and those that it starts, send their traces to a collector for the length of the block."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, pytest.MonkeyPatch.context() as patched:
        Thread(target=server.serve_forever, daemon=True).start()
        patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        patched.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        tracing._own.cache_clear()
        try:
            yield collector
        finally:
            forget_tracer()
            server.shutdown()


def forget_tracer() -> None:
    """Send what this process has recorded, and let go of what records: each process that is forked gets its threads."""
    tracer = tracing._own()
    tracing._own.cache_clear()
    if tracer is not None:
        tracer.span_processor.shutdown()
        del tracer
        atexit.unregister(tracing._flush)
        gc.collect()
