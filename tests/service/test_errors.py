import re
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

from fxlib_service.errors import Code, ServiceError, Violation, invalid
from fxlib_service.interceptor import STATUS, to_status

SOURCES = Path(__file__).parents[2] / "service" / "fxlib_service"

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "service.md").read_text()


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
def test_every_code_of_the_catalogue_has_a_status_and_a_use(code: Code) -> None:
    assert STATUS[code] is not grpc.StatusCode.OK
    uses = [path for path in SOURCES.rglob("*.py") if path.name not in ("errors.py", "status.py")]
    used = any(re.search(rf"\bCode\.{code.name}\b", path.read_text()) for path in uses)
    assert used or code is Code.INVALID_REQUEST  # is raised through `invalid`


def test_no_code_is_raised_that_is_not_in_the_catalogue() -> None:
    named = {name for path in SOURCES.rglob("*.py") for name in re.findall(r"\bCode\.([A-Z_]+)\b", path.read_text())}
    assert named <= set(Code.__members__)


def test_an_error_travels_with_its_code_fields_and_facts() -> None:
    error = ServiceError(
        Code.QUEUE_FULL,
        "full",
        violations=[Violation(field="namespace", problem="is busy")],
        metadata={"namespace": "ads"},
        retry_after_s=2.5,
    )
    status = to_status(error)
    info, request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for packed, message in zip(status.details, (info, request, retry), strict=True):
        assert packed.Unpack(message)
    assert (status.code, status.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "full")
    assert (info.reason, info.domain, dict(info.metadata)) == ("QUEUE_FULL", "fxlib", {"namespace": "ads"})
    assert [(each.field, each.description) for each in request.field_violations] == [("namespace", "is busy")]
    assert retry.retry_delay == duration_pb2.Duration(seconds=2, nanos=500_000_000)


def test_an_error_without_a_message_names_its_fields() -> None:
    assert str(invalid("page_size", "must not be negative")) == "page_size: must not be negative"
    assert str(ServiceError(Code.LEASE_LOST)) == Code.LEASE_LOST.value


def test_what_a_request_held_is_echoed_so_short_that_a_call_s_trailers_can_carry_it() -> None:
    long = "\x1b" + "x" * 100_000
    violations = [Violation(field=long, problem=long)] * 50
    status = to_status(ServiceError(Code.INVALID_REQUEST, violations=violations, metadata={"job_id": long}))
    assert len(status.SerializeToString()) < 10_000
    assert b"\x1b" not in status.message.encode()


def test_it_lists_every_error_with_its_status() -> None:
    told = re.findall(r"^\| `([A-Z_]+)` \| `([A-Z_]+)` \|", GUIDE, re.MULTILINE)
    assert told == [(code.name, status.name) for code, status in STATUS.items()]
