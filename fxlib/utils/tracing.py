"""OpenTelemetry traces: one job is one trace, from its launcher through the service to the phases of its worker.

A span continues the one that its `traceparent` (in the format of W3C Trace Context) names; this text travels with a
request. Spans go to the collector that the standard variables OTEL_* name or, in a program that records traces itself,
into that program's own. Without either, or without the extra `otel`, nothing is imported and this module does nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import Any, Final

from typing_extensions import override

from fxlib.utils.text import PlainFormatter, plain

_FORM: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN: Final = "http/protobuf"
_LONGEST: Final = 256
"""Maximum number of characters of a text in a span."""
_LAST_S: Final = 2.0
"""Seconds that a process waits at its end for a collector that does not answer."""

_TRACE_ID: Final = slice(3, 35)
"""The part of a `traceparent` that holds the id of its trace."""


class Span:
    """A span that has begun and lasts until `end`; if nothing is recorded, it does nothing.

    Attributes:
        recorded: OpenTelemetry's own span, or None.
        traceparent: text by which others continue it; "" if nothing is recorded.
        trace_id: id of its trace, which is part of that text.
    """

    def __init__(self, recorded: Any = None) -> None:
        self.recorded = recorded
        self.traceparent = "" if recorded is None else _written(recorded.get_span_context())
        self.trace_id = self.traceparent[_TRACE_ID]

    def note(self, **attributes: object) -> None:
        """Add attributes to it; names get the prefix `fxlib.`, and texts are cleaned as log lines are."""
        if self.recorded is not None:
            self.recorded.set_attributes(_named(attributes))

    def fail(self, error: BaseException | str) -> None:
        """Record an error in it: its class and its message, without a traceback."""
        if self.recorded is not None:
            from opentelemetry.trace import StatusCode

            problem = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            self.recorded.set_status(StatusCode.ERROR, _text(problem))

    def end(self, at_s: float | None = None) -> None:
        """End it: now, or at a time in seconds since the epoch."""
        if self.recorded is not None:
            self.recorded.end(_nanoseconds(at_s))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it this thread's current span for the length of the block, record the block's error, and end it."""
        if self.recorded is None:
            yield
            return
        from opentelemetry.trace import use_span

        try:
            with use_span(self.recorded, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.end()


def begin(name: str, parent: str = "", *, at_s: float | None = None, **attributes: object) -> Span:
    """Begin a span.

    Args:
        name: what it measures; one of a few names, without the names of jobs or models.
        parent: the `traceparent` that it continues; without a valid one, it continues this thread's current span.
        at_s: when it began, in seconds since the epoch; None: now.
        **attributes: attributes that are known by now; see `Span.note`.
    """
    tracer = _tracer()
    if tracer is None:
        return Span()
    context = _continued(parent) if valid(parent) else None
    return Span(tracer.start_span(name, context, attributes=_named(attributes), start_time=_nanoseconds(at_s)))


@contextmanager
def span(name: str, parent: str = "", **attributes: object) -> Iterator[Span]:
    """Make a new span this thread's current one for the length of the block; see `begin` and `Span.current`."""
    begun = begin(name, parent, at_s=None, **attributes)
    with begun.current():
        yield begun


def note(**attributes: object) -> None:
    """Add attributes to this thread's current span; see `Span.note`."""
    if _tracer() is not None:
        from opentelemetry.trace import get_current_span

        Span(get_current_span()).note(**attributes)


def traceparent() -> str:
    """Return the `traceparent` of this thread's current span; "" if there is none."""
    if _tracer() is None:
        return ""
    from opentelemetry.trace import get_current_span

    return _written(get_current_span().get_span_context())


def valid(text: str) -> str:
    """Return a received `traceparent`; "" if it is not valid."""
    return text if _FORM.fullmatch(text) else ""


class TracedFormatter(PlainFormatter):
    """Formats log lines as `PlainFormatter` does, and adds the id of the trace in which they are written."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        line, trace = super().formatMessage(record), traceparent()[_TRACE_ID]
        return f"{line} trace_id={trace}" if trace else line


def begin_process(name: str) -> str:
    """Name a process of fxlib's own, and return where its traces go, or why they do not; "" if they go nowhere.

    Args:
        name: its name in traces, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES set another one.
    """
    global _process  # noqa: PLW0603 - a process has one name
    _process = name
    if not (endpoint := _endpoint()):
        return ""
    problem = "" if _own() is not None else _problem()
    return f"no traces are sent to {endpoint}: {problem}" if problem else f"traces are sent to {endpoint}"


_process = "fxlib-client"


def _tracer() -> Any:
    """Return the tracer of this process; None if nothing records spans."""
    api = sys.modules.get("opentelemetry.trace")
    if api is not None and not isinstance(provider := api.get_tracer_provider(), api.ProxyTracerProvider):
        return provider.get_tracer("fxlib")  # the program's own
    return _own()


@cache
def _own() -> Any:
    """Return the tracer for the collector that the environment names; None if it names none.

    It does not become the program's own tracer: a launcher may set one up later, which then takes precedence.
    """
    if not _endpoint() or _problem():
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter()
    named = Resource({SERVICE_NAME: _process}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=Resource.create().merge(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    atexit.register(_flush, provider.shutdown, exporter.shutdown)
    return provider.get_tracer("fxlib")


def _flush(send: Callable[[], None], give_up: Callable[[], None]) -> None:
    """Send the remaining spans, without holding the process up if a collector is away."""
    sending = Thread(target=send, daemon=True)
    sending.start()
    sending.join(_LAST_S)
    if sending.is_alive():
        give_up()


def _endpoint() -> str:
    """Return where the environment says that traces go, without a password; "" if they go nowhere."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or _first("OTEL_TRACES_EXPORTER") == "none":
        return ""
    return re.sub(r"//[^/@]*@", "//", plain(_first(*_ENDPOINTS)))


def _problem() -> str:
    """Return why nothing can be sent to the collector that the environment names; "" if nothing prevents it."""
    protocol = _first(*_PROTOCOLS) or _SPOKEN
    if protocol != _SPOKEN:
        return f"{_PROTOCOLS[1]} is {plain(protocol)!r}, and fxlib speaks {_SPOKEN} (usually at port 4318)"
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 - looked for
    except ImportError as error:
        return f"{error}. Run: pip install 'fxlib[otel]'"
    return ""


def _first(*variables: str) -> str:
    return next(filter(None, (os.environ.get(each, "").strip() for each in variables)), "")


def _continued(parent: str) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent})


def _written(context: Any) -> str:
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def _named(attributes: dict[str, object]) -> dict[str, Any]:
    return {
        f"fxlib.{name}": value if isinstance(value, (bool, int, float)) else _text(str(value))
        for name, value in attributes.items()
        if value not in (None, "")
    }


def _text(text: str) -> str:
    return plain(text[:_LONGEST])


def _nanoseconds(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * 1e9)
