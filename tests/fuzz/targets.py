"""The targets of fuzzing: everything that reads what another process, user or file says, with inputs to begin with.

The input of a target is bytes. Where a target reads protobuf messages, the first byte says which of its kinds follows.
"""

from __future__ import annotations

import argparse
import io
import json
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from torch import nn

import fxlib
from fxlib import protocol, wire
from fxlib.cli import inspection as graph_arguments
from fxlib.cli import jobs as jobs_command
from fxlib.cli import listings as passes_command
from fxlib.cli import options as arguments
from fxlib.cli.printing import say
from fxlib.client.answer_policy import screen
from fxlib.client.connection import understand
from fxlib.client.watch_job import sentence
from fxlib.errors import FxlibError
from fxlib.inspection.device import FOLDER, load_device
from fxlib.profiling.file import MARK as PROFILE_MARK
from fxlib.profiling.file import load_profile
from fxlib.render import page, timelines_of
from fxlib.spec.report import render
from fxlib.utils.local_service import read_token
from fxlib.v1 import graph_pb2, jobs_pb2, profile_pb2, workers_pb2, workload_pb2
from fxlib.wire import modules, targets
from fxlib.wire import targets as allowed
from fxlib_service import config as service_config
from fxlib_service import content_checks, convert, field_checks
from fxlib_service.authentication import Authenticator, Proof
from fxlib_service.errors import ServiceError
from fxlib_service.policy import Policy
from fxlib_workers import config as worker_config
from fxlib_workers.process.child import Channel
from tests.client.models import Clicks
from tests.fuzz.messages import TEXTS
from tests.fuzz.target import Scratch, Target, drawn, of_messages, same
from tests.protocol import strategies as some
from tests.service import support
from tests.wire.test_fuzz import seeds as graphs

LIMITS = wire.Limits(weights_bytes=1 << 20, tensor_elements=1 << 20, nodes=5_000, steps=50_000, modules=1_000)


# ------------------------------------------------------------------------------------------------------------- graphs


@cache
def names_on_lists() -> tuple[str, ...]:
    """Names that graphs may hold: of operators, functions, methods, modules and dtypes, and some they may not."""
    packets = sorted(targets.registered_operators())
    found = [f"{packet}.{each}" for packet in packets for each in sorted(targets.registered_operators()[packet])]
    functions, classes = sorted(allowed.functions()), sorted(modules.classes())
    return (*TEXTS, *packets, *found, *functions, *sorted(allowed.methods()), *classes, "cpu", "strided", "int64")


def read_graph(graph: graph_pb2.Graph) -> None:
    wire.validate(graph, LIMITS)
    try:
        module = wire.decode(graph, blobs=_BLOBS, limits=LIMITS)
    except FxlibError:
        return
    text = wire.serialize(wire.encode(module).graph)
    again = wire.decode(wire.parse(text), limits=LIMITS)
    assert wire.serialize(wire.encode(again).graph) == text, "a graph that was read and written is another one"


def _graphs() -> list[graph_pb2.Graph]:
    found = [each.graph for each in graphs()]
    captured = fxlib.capture(Clicks())
    batch = [torch.ones(2, 3), {"ids": torch.ones(2, dtype=torch.int64)}]
    guarded = fxlib.capture(
        lambda x, more: (x.relu(), {"n": x + more["ids"][:, None]}), sample_inputs=batch, how="export"
    )
    found.append(wire.encode(guarded).graph)
    return [*found, *(wire.encode(each).graph for each in (captured, fxlib.optimize(captured)))]


_BLOBS: dict[str, bytes] = {}


class _Original:
    """A captured model, and graphs that it may become."""

    def __init__(self) -> None:
        self.module = fxlib.capture(Clicks())
        self.text = wire.serialize(wire.encode(self.module).graph)
        self.rewritten = [fxlib.optimize(self.module), fxlib.optimize(self.module, recipe="training")]


@cache
def _original() -> _Original:
    return _Original()


def read_answer(graph: graph_pb2.Graph) -> None:
    own = _original()
    parameters = [parameter.data_ptr() for parameter in own.module.parameters()]
    screen(wire.decode(graph, root=own.module, limits=LIMITS), own.module)
    assert [parameter.data_ptr() for parameter in own.module.parameters()] == parameters


def _answers() -> list[graph_pb2.Graph]:
    own = _original()
    return [wire.parse(own.text), *(wire.encode(each).graph for each in own.rewritten)]


def read_weights(data: bytes) -> None:
    blob = support.ref(data)
    graph = graph_pb2.Graph()
    graph.CopyFrom(_one_weight())
    graph.storages[0].data.CopyFrom(blob)
    wire.decode(graph, blobs={blob.sha256: data}, limits=LIMITS)


@cache
def _one_weight() -> graph_pb2.Graph:
    return wire.encode(torch.fx.symbolic_trace(nn.Linear(2, 2, bias=False)), weights=True).graph


def _weights() -> list[bytes]:
    return list(wire.encode(torch.fx.symbolic_trace(nn.Linear(2, 2, bias=False)), weights=True).blobs.values())


def _saved() -> list[bytes]:
    folder = Path(tempfile.mkdtemp())
    fxlib.save(torch.fx.symbolic_trace(nn.Linear(2, 2)), folder / "a.fxg")
    fxlib.save(fxlib.capture(Clicks()), folder / "b.fxg", weights=False)
    return [(folder / name).read_bytes() for name in ("a.fxg", "b.fxg")]


# ----------------------------------------------------------------------------------------------------------- messages


def _read_workload(message: workload_pb2.Workload) -> None:
    def read(each: workload_pb2.Workload) -> fxlib.Workload:
        return protocol.workload_from_proto(each, {})

    same(message, read, lambda each: protocol.workload_to_proto(each).message)


def _read_job(message: jobs_pb2.Job) -> None:
    job = same(message, protocol.job_from_proto, protocol.job_to_proto)
    _check_line("  ".join(jobs_command._row(job)))
    json.loads(json.dumps(jobs_command._facts(job)))
    if job.report is not None:
        _check_shown(render(job.report))


def _read_result(message: jobs_pb2.JobResult) -> None:
    report = same(message, protocol.report_from_proto, protocol.report_to_proto)
    _check_shown(render(report))
    drawing = page(timelines_of(report), title="t", text=render(report))
    assert "<script" not in drawing.lower() or drawing.lower().count("<script") == _scripts(), drawing


@cache
def _scripts() -> int:
    return page(timelines_of(protocol.report_from_proto(support.answer())), title="t", text="").lower().count("<script")


def _read_event(message: jobs_pb2.JobEvent) -> None:
    _check_line(sentence(same(message, protocol.event_from_proto, protocol.event_to_proto)))


def _check_line(text: str) -> None:
    assert text.isprintable(), f"what a terminal shows steers it: {text!r}"


def _check_shown(text: str) -> None:
    for line in text.split("\n"):
        _check_line(line.replace("\t", " "))


def _read_passes(message: jobs_pb2.ListPassesResponse) -> None:
    shown = io.StringIO()
    say(passes_command._text(message), to=shown)
    _check_shown(shown.getvalue())


_MESSAGES: Mapping[type[Message], Callable[[Any], object]] = {
    workload_pb2.Workload: _read_workload,
    workload_pb2.BatchSpec: lambda each: same(each, protocol.spec_from_proto, protocol.spec_to_proto),
    jobs_pb2.Job: _read_job,
    jobs_pb2.JobResult: _read_result,
    jobs_pb2.JobEvent: _read_event,
    jobs_pb2.TrialOptions: lambda each: same(each, protocol.trial_from_proto, protocol.trial_to_proto),
    jobs_pb2.ListPassesResponse: _read_passes,
    profile_pb2.Profile: lambda each: same(each, protocol.profile_from_proto, protocol.profile_to_proto),
    graph_pb2.Contract: lambda each: same(each, protocol.contract_from_proto, protocol.contract_to_proto),
    graph_pb2.Value: lambda each: same(
        each, lambda value: protocol.value_from_proto(value, "a"), lambda value: protocol.value_to_proto(value, "a")
    ),
}


def _messages() -> list[Message]:
    return [
        *(protocol.workload_to_proto(each).message for each in drawn(some.workloads)),
        _nested(),
        _nested().description,
        *map(protocol.spec_to_proto, drawn(some.specs)),
        *map(protocol.job_to_proto, drawn(some.jobs)),
        *map(protocol.report_to_proto, drawn(some.reports)),
        support.answer(),
        *map(protocol.event_to_proto, drawn(some.events)),
        *map(protocol.trial_to_proto, drawn(some.trials)),
        protocol.catalogue_to_proto(),
        *map(protocol.profile_to_proto, drawn(some.profiles)),
        *map(protocol.contract_to_proto, drawn(some.contracts)),
        *(protocol.value_to_proto(each, "a") for each in drawn(some.immediate)),
    ]


def _nested() -> workload_pb2.Workload:
    """A workload whose inputs are of classes that only the client has."""
    message = workload_pb2.Workload()
    message.CopyFrom(support.workload())
    nested = message.description.nested
    nested.tensors.extend(message.description.inputs)
    message.description.ClearField("inputs")
    inputs, named = (nested.structure.tuple.items.add() for _ in range(2))
    named.dict.SetInParent()
    record, container, pair = (inputs.tuple.items.add() for _ in range(3))
    record.record.name, container.container.name, pair.named_tuple.name = "m.Batch", "m.Ragged", "m.Pair"
    record.record.fields.append("x")
    record.record.items.add().tensor = 0
    container.container.context.text = "x"
    container.container.items.add().tensor = 0
    pair.named_tuple.fields.extend(["a", "b"])
    pair.named_tuple.items.add().integer = 3
    pair.named_tuple.items.add().none = True
    return message


def _words_of_messages() -> tuple[str, ...]:
    reasons = [each.name for each in fxlib.Reason]
    return (*TEXTS, *reasons, "sgd", "adam", "bitwise", "moved", "mean", "float32", "int64", "reads", "pure", "table")


def _read_recipe(message: jobs_pb2.Recipe) -> None:
    recipe = protocol.recipe_from_proto(message)
    assert protocol.recipe_from_proto(protocol.recipe_to_proto(recipe)).key == recipe.key


def _recipes() -> list[Message]:
    def pattern(x: torch.Tensor, n: float) -> torch.Tensor:
        return nn.functional.gelu(x) * n

    def replacement(x: torch.Tensor, n: float) -> torch.Tensor:
        return n * nn.functional.gelu(x)

    rule = fxlib.Rule(pattern, replacement, guard="floating_point")
    made: list[str | list[Any]] = [
        [("rewrite_rules", {"rules": (rule,), "rounds": 1}), "dead_code"],
        [("split_calls", {})],
        "schedule",
    ]
    return [protocol.recipe_to_proto(each) for each in made]


# ------------------------------------------------------------------------------------------------- what services read


def _check_request(request: jobs_pb2.OptimizeRequest) -> None:
    field_checks.check_submission(request)
    content_checks.check_workload(request.workload)
    content_checks.check_profile(request)
    content_checks.check_variants(request)
    content_checks.complete_trial(request)
    content_checks.cache_key(request)
    convert.blob_from_proto(request.graph)


def _check_complete(request: workers_pb2.CompleteRequest) -> None:
    content_checks.check_result(request.result, protocol.trial_to_proto(fxlib.TrialOptions()))
    field_checks.check_failure(request.failure.code)
    _check_line(field_checks.clip(request.failure.message))


def _check_listing(request: jobs_pb2.ListJobsRequest) -> None:
    field_checks.check_listing(request)
    convert.filter_from_proto(request)


def _check_worker(worker: jobs_pb2.WorkerInfo) -> None:
    field_checks.check_worker(worker)
    assert convert.worker_to_proto(convert.worker_from_proto(worker)).worker_id == worker.worker_id


_REQUESTS: Mapping[type[Message], Callable[[Any], object]] = {
    jobs_pb2.OptimizeRequest: _check_request,
    workers_pb2.CompleteRequest: _check_complete,
    jobs_pb2.ListJobsRequest: _check_listing,
    jobs_pb2.WorkerInfo: _check_worker,
    workers_pb2.ReportRequest: lambda each: field_checks.check_report(each.phase, each.progress),
}


def _requests() -> list[Message]:
    asked = support.request(labels={"team": "ads"})
    asked.variants.add(name="eval", graph=asked.graph, workload=asked.workload)
    asked.profile.CopyFrom(protocol.profile_to_proto(drawn(some.profiles)[-1]))
    return [
        support.request(),
        asked,
        workers_pb2.CompleteRequest(job_id="a", token="b", result=support.answer()),
        workers_pb2.CompleteRequest(job_id="a", token="b", failure=jobs_pb2.JobFailure(code="LOST", message="m")),
        jobs_pb2.ListJobsRequest(namespace="ads", states=[jobs_pb2.JOB_STATE_QUEUED], page_token="12", id_prefix="a"),
        support.worker(),
        workers_pb2.ReportRequest(job_id="a", token="b", phase="qps", message="m", progress=0.5),
    ]


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


class _Refused(grpc.RpcError, grpc.Call):
    """A failed call whose service says this."""

    def __init__(self, data: bytes) -> None:
        self._code = list(grpc.StatusCode)[data[0] % 17] if data else grpc.StatusCode.UNKNOWN
        self._details = data[1:].decode("utf-8", "replace")
        self._trailers = (("grpc-status-details-bin", data[1:]),)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers

    def initial_metadata(self) -> Any: ...
    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> Any: ...
    def cancel(self) -> Any: ...
    def add_callback(self, callback: Any) -> bool:
        return False


def _read_refusal(data: bytes) -> None:
    failure = understand(_Refused(data))
    _check_line(str(failure.error("a")).replace("\n", "?") if not failure.message.isprintable() else failure.message)
    assert failure.message.isprintable()
    assert failure.may_pass in (True, False)


def _refusals() -> list[bytes]:
    found = []
    for code in (8, 14):
        status = status_pb2.Status(code=code, message="\x00")
        for detail in (
            error_details_pb2.ErrorInfo(reason="QUEUE_FULL", metadata={"namespace": "ads"}),
            error_details_pb2.RetryInfo(),
        ):
            status.details.add().Pack(detail)
        status.details[1].value = b"\x0a\x02\x08\x05"
        found.append(bytes([list(grpc.StatusCode).index(_status(code))]) + status.SerializeToString())
    return found


def _status(code: int) -> grpc.StatusCode:
    return next(each for each in grpc.StatusCode if each.value[0] == code)


# --------------------------------------------------------------------------------------------- files and command lines


def of_file(name: str, read: Callable[[Path], object], seeds: Callable[[], Sequence[bytes]], **more: Any) -> Target:
    """Make a target that reads a file."""
    scratch = Scratch(name)
    return Target(name=name, read=lambda data: read(scratch.holding(data)), seeds=seeds, **more)


def _framed(data: bytes) -> bytes:
    """Return a file of safetensors: the input as it is, or, behind a zero, one whose header has the length it says."""
    if data[:1] != b"\0":
        return data
    header, _, values = data[1:].partition(b"\0")
    return len(header).to_bytes(8, "little") + header + values


def _unframed(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    return b"\0" + data[8 : 8 + length] + b"\0" + data[8 + length :]


def _with_frames(files: Sequence[bytes]) -> list[bytes]:
    return [*files, *map(_unframed, files)]


def _devices() -> list[bytes]:
    return [path.read_bytes() for path in FOLDER.glob("*.toml")]


def _policies() -> list[bytes]:
    digest = "ab" * 32
    return [
        f'share_results = true\n[principals.ads]\nrole = "client"\nnamespace = "ads"\ntokens_sha256 = ["{digest}"]\n'
        "[quota]\nqueued_jobs = 3\n[namespaces.ads]\ntrial_seconds = 1.5\n".encode(),
        b'[principals.op]\nrole = "operator"\ncertificates = ["dns:a.example.org", "uri:spiffe://a/b"]\n',
    ]


def _read_serve_settings(path: Path) -> None:
    service_config.APPLICATION.read(["--config", str(path)], {})


def _read_worker_settings(path: Path) -> None:
    worker_config.APPLICATION.read(["--config", str(path)], {})


def _tables(command: str, application: Any) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        names = [declared.name for declared, _, _ in application.options()]
        half = len(names) // 2
        return [
            f"[{command}]\n{''.join(f'{name} = {value}{chr(10)}' for name in chosen)}".encode()
            for value in ("1", "0.5", "true", '"127.0.0.1:1"', '["a", "b"]')
            for chosen in (names[:half], names[half:], names[:1])
        ] + [f"[{command}]\n{name} = {value}\n".encode() for name in names for value in ("2", '"/a"', "true")]

    return seeds


def _read_arguments(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")  # as Python reads a command line
    for read in _ARGUMENTS:
        try:
            read(text)
        except (FxlibError, ValueError, argparse.ArgumentTypeError):
            continue


def _options_of(application: Any) -> list[Callable[[str], object]]:
    return [declared.kind.read for declared, _, _ in application.options() if declared.kind is not None]


_ARGUMENTS: list[Callable[[str], object]] = [
    arguments.step,
    arguments.label,
    graph_arguments._input,
    service_config.Address.parse,
    *_options_of(service_config.APPLICATION),
    *_options_of(worker_config.APPLICATION),
]


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


def _silently(read: Callable[[Path], object]) -> Callable[[Path], object]:
    def reading(path: Path) -> object:
        with redirect_stderr(io.StringIO()):
            return read(path)

    return reading


def _words_of_toml() -> tuple[str, ...]:
    more = ("[", "]", "=", "[[a]]", "{a=1}", "inf", "nan", "0x1f", "1979-05-27T07:32:00Z", "a.b.c = 1\n")
    return (*TEXTS, *more)


def _words_of_json() -> tuple[str, ...]:
    safetensors = ('"__metadata__"', '"dtype":"F32"', '"shape":[2,2]', '"data_offsets":[0,16]')
    return (*TEXTS, "{", "}", "[" * 50, "1e999", "NaN", "null", *safetensors)


_REQUEST_ERRORS = (FxlibError, ServiceError)

TARGETS: Mapping[str, Target] = {
    each.name: each
    for each in (
        of_messages("graphs", {graph_pb2.Graph: read_graph}, _graphs, words=names_on_lists),
        of_messages("answers", {graph_pb2.Graph: read_answer}, _answers, words=names_on_lists),
        of_messages("messages", _MESSAGES, _messages, words=_words_of_messages),
        of_messages("recipes", {jobs_pb2.Recipe: _read_recipe}, _recipes, words=names_on_lists),
        of_messages("requests", _REQUESTS, _requests, words=_words_of_messages, refusals=_REQUEST_ERRORS),
        Target(
            name="weights",
            read=lambda data: read_weights(_framed(data)),
            seeds=lambda: _with_frames(_weights()),
            words=_words_of_json,
        ),
        Target(
            name="batches",
            read=lambda data: protocol.batch_from_bytes(_framed(data), "a"),
            seeds=lambda: _with_frames([protocol.batch_to_bytes(each) for each in drawn(some.batches)]),
            words=_words_of_json,
        ),
        of_file("graph-files", lambda path: fxlib.load(path, limits=LIMITS), _saved),
        of_file(
            "profile-files",
            load_profile,
            lambda: [
                PROFILE_MARK + protocol.profile_to_proto(each).SerializeToString() for each in drawn(some.profiles)
            ],
        ),
        of_file("device-files", load_device, _devices, words=_words_of_toml),
        of_file("policy-files", Policy.read, _policies, words=_words_of_toml, refusals=_REQUEST_ERRORS),
        of_file(
            "serve-settings",
            _silently(_read_serve_settings),
            _tables("serve", service_config.APPLICATION),
            words=_words_of_toml,
        ),
        of_file(
            "worker-settings",
            _silently(_read_worker_settings),
            _tables("worker", worker_config.APPLICATION),
            words=_words_of_toml,
        ),
        of_file("token-files", read_token, lambda: [b"secret-token\n", b"a" * 4097]),
        Target(
            name="headers",
            read=_read_header,
            seeds=lambda: [b"Bearer secret", b"bearer ", b"Basic abc"],
            refusals=(ServiceError,),
        ),
        Target(name="refusals", read=_read_refusal, seeds=_refusals),
        Target(
            name="arguments",
            read=_read_arguments,
            seeds=lambda: [
                *(b"split_calls:nested=[1,2],a=b", b"2x3x224x224:int64", b"127.0.0.1:8470", b"[::1]:80", b"a=b"),
                *(b"1.5", b"12", b"host:port:1"),
            ],
            words=lambda: (*TEXTS, "[" * 60, "x", ":", "=", ",", "int64", "0x", "99999999999", "e308", "inf", "nan"),
        ),
        Target(name="lines", read=_Line().read, seeds=_lines, words=_words_of_json, refusals=(ValueError,)),
    )
}
