"""What the service makes of the trace that a request is part of."""

import json
import logging
from pathlib import Path

import grpc
import pytest

from fxlib.v1 import jobs_pb2
from tests.service.support import claim, make_service, request, submit, work
from tests.service.test_roles import guarded
from tests.shared.collector import attributes, collecting

pytestmark = pytest.mark.slow

FIRST = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECOND = "00-11111111111111111111111111111111-2222222222222222-01"


async def test_requests_that_differ_in_their_trace_alone_are_equal() -> None:
    async with make_service() as core:
        job = await submit(core, request(request_id="r1", traceparent=FIRST))
        assert (await submit(core, request(request_id="r1", traceparent=SECOND))).id == job.id
        lease = await claim(core)
        assert lease is not None
        assert lease.request.traceparent == FIRST
        await submit(core, request(fresh=True))
        await work(core)
        assert (await submit(core, request(traceparent=SECOND))).cached
        assert (await submit(core, request(traceparent=FIRST))).cached


@pytest.mark.parametrize("sent", ["\x1b]0;owned\x07", FIRST.upper(), 1000 * "0"])
async def test_a_trace_that_is_none_goes_no_further(sent: str) -> None:
    async with make_service() as core:
        await submit(core, request(traceparent=sent))
        lease = await claim(core)
        assert lease is not None
        assert lease.request.traceparent == ""


async def test_a_job_that_is_retried_is_part_of_no_earlier_trace() -> None:
    async with make_service() as core:
        job = await submit(core, request(traceparent=FIRST))
        await work(core)
        await core.optimizer.RetryJob(jobs_pb2.RetryJobRequest(job_id=job.id, request_id="again"), None)
        lease = await claim(core)
        assert lease is not None
        assert lease.request.traceparent == ""


async def test_a_job_s_hand_in_and_its_wait_are_spans_which_the_audit_log_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    caplog.set_level(logging.INFO, logger="fxlib.audit")
    with collecting() as collector:
        async with guarded(tmp_path) as service:
            job = await service.submit("ads", fresh=True, traceparent=FIRST)
            lease = await service.claim()
            with pytest.raises(grpc.aio.AioRpcError):
                await service.submit("ads", torch_version="not one", traceparent=SECOND)
        collector.until(lambda: len(collector.spans) == 3)
    spans = {span.name: span for _, span in collector.trace_of(job.id)}
    assert spans.keys() == {"service.OptimizerService/Optimize", "service.queued"}
    handed_in, waited = spans["service.OptimizerService/Optimize"], spans["service.queued"]
    assert handed_in.parent_span_id.hex() == FIRST[36:52]
    assert waited.parent_span_id == handed_in.span_id
    assert lease.request.traceparent == f"{FIRST[:35]}-{handed_in.span_id.hex()}-01"
    assert attributes(handed_in)["fxlib.model"] == "dlrm"
    assert attributes(waited)["fxlib.attempt"] == 1
    (refused,) = (span for _, span in collector.spans if span.trace_id.hex() == SECOND[3:35])
    assert refused.status.code == 2
    assert refused.status.message.startswith("ServiceError: torch_version")
    lines = [json.loads(each.getMessage()) for each in caplog.records if each.name == "fxlib.audit"]
    assert [line["about"] for line in lines if line.get("trace_id") == FIRST[3:35]] == [job.id]
