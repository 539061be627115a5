"""Targets of fuzzing: what others say over a connection, besides the messages about jobs."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from starlette.exceptions import HTTPException
from starlette.requests import Request

from fxlib.analysis.effects.process_groups import Groups
from fxlib.client.connection import understand
from fxlib.dashboard import app as dashboard
from fxlib.dashboard.visitors import COOKIE, Visitors
from fxlib.spec.contract import Contract
from fxlib.spec.report import CompiledPart, Span, Timeline
from fxlib.zoo import run_zoo
from fxlib_service.authentication import Authenticator, Proof
from fxlib_service.errors import ServiceError
from fxlib_workers.process.child import Channel
from fxlib_workers.process.exceptions import Raised
from fxlib_workers.process.forking import Fork, ForkServer
from fxlib_workers.trial.answers import (
    FORMS,
    MalformedAnswerError,
    ProcessFailureError,
    read_answer,
    write_answer,
    write_failure,
)
from fxlib_workers.trial.requirements import Requirements
from fxlib_workers.trial.trial_process import StoreAddress
from tests.fuzz.documents import change_document
from tests.fuzz.messages import TEXTS
from tests.fuzz.target import Target, check_line, drawn, of_messages, words_of_json
from tests.protocol import strategies as some

# ----------------------------------------------------------------------------------------------------- clients' headers


@dataclass(frozen=True, slots=True)
class _Headers:
    """A call whose headers say this."""

    value: str

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        return {"peer_dns": [self.value.encode("utf-8", "replace")]}

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return [("authorization", self.value)]


def _read_header(data: bytes) -> None:
    Authenticator(owner_tokens=frozenset({"0" * 64})).caller(Proof.of(_Headers(data.decode("ascii", "ignore"))))


# ----------------------------------------------------------------------------------------------- a service's refusals


class _Refused(grpc.RpcError, grpc.Call):
    """A failed call whose service says this."""

    def __init__(self, status: status_pb2.Status) -> None:
        self._status = status

    def code(self) -> grpc.StatusCode:
        return _CODES.get(self._status.code, grpc.StatusCode.UNKNOWN)

    def details(self) -> str:
        return self._status.message

    def trailing_metadata(self) -> Any:
        return (("grpc-status-details-bin", self._status.SerializeToString()),)

    def initial_metadata(self) -> Any: ...
    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> Any: ...
    def cancel(self) -> Any: ...
    def add_callback(self, callback: Any) -> bool:
        return False


_CODES = {each.value[0]: each for each in grpc.StatusCode}


def _read_refusal(status: status_pb2.Status) -> None:
    failure = understand(_Refused(status))
    check_line(failure.message)
    str(failure.error("a"))
    assert failure.may_pass in (True, False)


def _read_detail(detail: Message) -> None:
    status = status_pb2.Status(code=8, message="m")
    status.details.add().Pack(detail)
    _read_refusal(status)


def _refusals() -> list[Message]:
    found: list[Message] = [error_details_pb2.ErrorInfo(reason="QUEUE_FULL", metadata={"namespace": "ads"})]
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.seconds = 5
    found.append(retry)
    for code in (8, 14, 99):
        status = status_pb2.Status(code=code, message="\x00")
        for detail in found[:2]:
            status.details.add().Pack(detail)
        found.append(status)
    return found


# ---------------------------------------------------------------------------------------------- lines between processes


class _Line:
    """A worker's end of a channel, into which a child writes."""

    def __init__(self) -> None:
        self._theirs, ours = socket.socketpair()
        self._channel = Channel(ours)

    def read(self, data: bytes) -> None:
        self._theirs.sendall(data[:4096].replace(b"\n", b" ") + b"\n")
        self._channel.receive(5.0)


def _lines() -> list[bytes]:
    return [
        json.dumps({"phase": "qps", "message": "block 3 of 12", "progress": 0.25}).encode(),
        json.dumps({"done": True, "error": None, "more": ["a", {"b": [1.5, -2]}]}).encode(),
    ]


@cache
def _asked_fork_server() -> ForkServer:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _KEPT.append(theirs)
    return ForkServer(ours)


_KEPT: list[socket.socket] = []


def _read_of_fork_server(data: bytes) -> None:
    """Read messages, one a line, of a process that was asked for the children "a" and "b", of which "b" runs."""
    server = _asked_fork_server()
    server.ready = Future()
    server._forks = {"a": Fork(Future(), Future()), "b": Fork(Future(), Future())}
    server._forks["b"].forked.set_result(7)
    for line in data.split(b"\n"):
        assert isinstance(server._heard(line), str)


_OF_FORK_SERVER = (
    *({"ready": True}, {"failed": "ImportError: x"}, {"forked": "a", "pid": 12}, {"ended": "b", "status": -9}),
    {"ended": "b", "status": 1},
)


def _read_of_model(data: bytes) -> None:
    """Read a line of a process of a zoo, in which a model has run."""
    told = run_zoo._read(bytearray(data))
    assert isinstance(told, dict)


# --------------------------------------------------------------------------------------- answers of a trial's processes


def _read_trial_answer(data: bytes) -> None:
    """Read what a process answers to the method in the first line, and require that the same is read of it again."""
    name, _, message = data.partition(b"\n")
    method = name.decode("utf-8", "replace")
    answer = read_answer(method if method in FORMS else "load", message)
    if method not in FORMS or isinstance(answer, Raised):
        return
    written = write_answer(method, answer)
    assert write_answer(method, read_answer(method, written)) == written, f"{answer!r} comes back as another one"


def _trial_answers() -> list[bytes]:
    required = Requirements(
        opaque=("function 'f'",),
        functions={"ps0": ("fxlib.ps:lookup", "shop:call"), "": ()},
        contracts={"shop:call#call_1": Contract(reads=frozenset({"a", "b"}), part="key", gradient="shop:push")},
        created={"shop:make": ("fetch",)},
        groups=Groups(collectives={"0": (2, 4)}, reducing={}),
    )
    span = Span(kind="call", name="f", to="ps0", start_s=-0.1, end_s=0.5)
    part = CompiledPart(first="relu", nodes=3, backend="inductor==2.13.0", plain_s=0.1, why="slow")
    answers: dict[str, Any] = {
        "join": None,
        "host_store": StoreAddress("127.0.0.1", 4711),
        "not_served": ["f", "g"],
        "load": required,
        "load_candidate": required,
        "profile": drawn(some.profiles, 3)[-1],
        "digest_step": {"output": "ab", "loss": "cd"},
        "errors": {"output": 0.5},
        "block": 0.25,
        "samples": [64, 32],
        "time_parts": [part],
        "staleness": {0: 3, 1: 5},
        "timelines": [Timeline(spans=(span,), step_s=1.5)],
        "reset": Raised(text="ValueError: no", out_of_memory=False, stranded=True),
    }
    found = [f"{method}\n".encode() + write_answer(method, answer) for method, answer in answers.items()]
    return [*found, b"load\n" + write_failure("KeyError: 'x'")]


def _change_trial_answer(data: bytes, rng: random.Random, words: Sequence[str], other: bytes) -> bytes | None:
    name, _, message = data.partition(b"\n")
    if rng.random() < 0.02:
        name = rng.choice(list(FORMS)).encode()
    changed = change_document(message, rng, words, other.partition(b"\n")[2])
    return None if changed is None else name + b"\n" + changed


def _words_of_answers() -> tuple[str, ...]:
    return (*TEXTS, "answer", "raised", "failed", "text", "spans", "steps", "port", "reads", "0", "CgFh", "====")


# --------------------------------------------------------------------------------------------- visitors of dashboards


def _read_visit(data: bytes) -> None:
    """Read a request of a visitor: a line with the query, lines of headers, an empty one, and the form."""
    head, _, body = data.partition(b"\n\n")
    query, *lines = head.split(b"\n")
    known = Visitors()
    cookie = known.sign_in("token")
    headers = [tuple(line.partition(b":")[::2]) for line in lines]
    if b"signed-in" in head:
        headers.append((b"cookie", f"{COOKIE}={cookie}".encode()))

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/jobs/a/cancel",
        "query_string": query,
        "headers": headers,
        "scheme": "http",
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 5),
    }
    request = Request(scope, receive)
    for read in (dashboard._filter_of, dashboard._page_of, partial(dashboard._following, token="t"), known.of):
        _refusing(read, request)
    form = _finished(dashboard._form(request))
    following = dashboard._own_path(form.get("next", "/"))
    assert following.startswith("/"), following
    assert not following.startswith(("//", "/\\")), following
    check_line(following)
    shown = _refusing(lambda each: known.token_of(each, form), request)
    assert shown != "token", "a form without the session's secret changes something"


def _refusing(read: Callable[[Request], object], request: Request) -> object:
    try:
        return read(request)
    except HTTPException:
        return None


def _finished(coroutine: Any) -> Any:
    """Return what a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def _visits() -> list[bytes]:
    return [
        b"state=queued&state=running&label=team=ads&size=12&page=7&name=a\norigin:http://localhost\nhost:localhost\n\n",
        b"size=0&label=x\nauthorization:Bearer abc\n\nrequest_id=abc&next=/jobs",
        b"id=a\nsigned-in:1\norigin:http://localhost\nhost:localhost\n\nsecret=abc&next=//evil.example&token=a%00",
    ]


def _words_of_visits() -> tuple[str, ...]:
    names = ("state=", "label=", "size=", "page=", "id=", "next=", "secret=", "token=", "&", "%0a", "%2f%2f", "+")
    headers = ("\norigin:", "\nhost:", "\ncookie:fxlib_session=", "\nauthorization:bearer ", "\nsigned-in:", "\n\n")
    return (*TEXTS, *names, *headers, "http://localhost", "queued", "/jobs", "/\\", "javascript:")


_WORDS_OF_REFUSALS = (
    *(*TEXTS, "QUEUE_FULL", "PERMISSION_DENIED", "SERVICE_BUSY", "namespace", "JOB_NOT_FOUND"),
    *("type.googleapis.com/google.rpc.ErrorInfo", "type.googleapis.com/google.rpc.RetryInfo", "google.rpc.RetryInfo"),
)

CONNECTIONS = (
    Target(
        name="headers",
        read=_read_header,
        seeds=lambda: [b"Bearer secret", b"bearer ", b"Basic abc"],
        refusals=(ServiceError,),
    ),
    of_messages(
        "refusals",
        {
            status_pb2.Status: _read_refusal,
            error_details_pb2.ErrorInfo: _read_detail,
            error_details_pb2.RetryInfo: _read_detail,
        },
        _refusals,
        words=lambda: _WORDS_OF_REFUSALS,
    ),
    Target(name="lines", read=_Line().read, seeds=_lines, words=words_of_json, refusals=(ValueError,)),
    Target(
        name="trial-answers",
        read=_read_trial_answer,
        seeds=_trial_answers,
        change=_change_trial_answer,
        words=_words_of_answers,
        refusals=(MalformedAnswerError, ProcessFailureError),
    ),
    Target(
        name="fork-messages",
        read=_read_of_fork_server,
        seeds=lambda: [
            *(json.dumps(each).encode() for each in _OF_FORK_SERVER),
            b"\n".join(json.dumps(each).encode() for each in _OF_FORK_SERVER),
        ],
        change=change_document,
        words=lambda: (*TEXTS, "ready", "failed", "forked", "ended", "pid", "status", "a", "b"),
    ),
    Target(
        name="model-lines",
        read=_read_of_model,
        seeds=lambda: [b'{"phase": "capturing"}', b'{"job": "a", "cached": false, "capture_s": 1.5}'],
        change=change_document,
        words=words_of_json,
    ),
    Target(name="visits", read=_read_visit, seeds=_visits, words=_words_of_visits, refusals=(HTTPException,)),
)
