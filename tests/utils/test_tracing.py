import logging
import sys
from collections.abc import Iterator

import pytest

from fxlib.utils import tracing
from tests.shared.collector import Collector, attributes, collecting, forget_tracer

pytestmark = pytest.mark.slow

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget_tracer()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.mark.parametrize(
    "sent",
    [
        "",
        PARENT.upper(),
        f"{PARENT}\n",
        f"{PARENT}-extra",
        PARENT.replace("00-", "ff-", 1),
        "00-" + 32 * "0" + PARENT[35:],
        PARENT[:36] + 16 * "0" + "-01",
        "\x1b]0;owned\x07",
        "0" * 10_000,
    ],
)
def test_what_is_no_traceparent_is_dropped(sent: str) -> None:
    assert tracing.valid(sent) == ""
    assert tracing.valid(PARENT) == PARENT


def test_without_a_collector_nothing_is_imported_and_nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing._own.cache_clear()
    for name in [each for each in sys.modules if each.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    with tracing.span("a", PARENT) as span:
        span.note(job_id="x")
        tracing.note(job_id="x")
        assert (span.traceparent, tracing.traceparent()) == ("", "")
    assert tracing.begin_process("fxlib-client") == ""
    assert not [each for each in sys.modules if each.partition(".")[0] == "opentelemetry"]


@pytest.mark.parametrize(
    "missing, protocol, told",
    [("opentelemetry.sdk.trace", "", "pip install 'fxlib[otel]'"), ("", "grpc", "fxlib speaks http/protobuf")],
)
def test_what_keeps_traces_from_being_sent_is_told_with_the_way_out_and_stops_nothing(
    missing: str, protocol: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    tracing._own.cache_clear()
    sentence = tracing.begin_process("fxlib-client")
    assert sentence.startswith("no traces are sent to http://127.0.0.1:1: ")
    assert told in sentence
    assert tracing.begin("a").recorded is None
    tracing._own.cache_clear()


def test_a_span_continues_its_parent_and_is_sent_with_clean_attributes(collector: Collector) -> None:
    def fail() -> None:
        with tracing.span("inner") as inner:
            inner.note(gain=0.0, reason=None, cached=False)
        raise ValueError("bad\nluck")

    with pytest.raises(ValueError, match="bad"), tracing.span("outer", PARENT, model="a\x1b[31m\u202e\n" + "b" * 500):
        fail()
    collector.until(lambda: len(collector.spans) == 2)
    spans = {span.name: span for _, span in collector.spans}
    outer, inner = spans["outer"], spans["inner"]
    assert {process for process, _ in collector.spans} == {"fxlib-client"}
    assert outer.parent_span_id.hex() == PARENT[36:52]
    assert inner.parent_span_id == outer.span_id
    assert attributes(inner) == {"fxlib.gain": 0.0, "fxlib.cached": False}
    model = attributes(outer)["fxlib.model"]
    assert model.startswith("a [31m  b")
    assert len(model) == 256
    assert (outer.status.code, outer.status.message) == (2, "ValueError: bad luck")


def test_a_log_line_names_its_trace(collector: Collector) -> None:
    formatter, record = tracing.TracedFormatter("%(message)s"), logging.makeLogRecord({"msg": "said"})
    assert formatter.format(record) == "said"
    with tracing.span("a", PARENT):
        assert formatter.format(record) == f"said trace_id={PARENT[3:35]}"


def test_a_program_that_records_traces_itself_has_these_among_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with trace.use_span(provider.get_tracer("theirs").start_span("theirs")) as _:
        theirs = trace.get_current_span().get_span_context()
        with tracing.span("ours") as ours:
            assert ours.trace_id == f"{theirs.trace_id:032x}"
