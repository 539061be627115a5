"""The targets of fuzzing: everything that reads what another process, user or file says, with inputs to begin with.

The input of a target is bytes. Where a target reads protobuf messages, the first byte says which of its kinds follows.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from google.protobuf.message import Message
from torch import nn

import fxlib
from fxlib import protocol, wire
from fxlib.cli import jobs as jobs_command
from fxlib.cli import listings as passes_command
from fxlib.cli.printing import say
from fxlib.client.answer_policy import screen
from fxlib.client.watch_job import sentence
from fxlib.errors import FxlibError
from fxlib.recipes import recipes
from fxlib.render import page, timelines_of
from fxlib.serialization import files
from fxlib.spec.report import render
from fxlib.v1 import graph_pb2, jobs_pb2, profile_pb2, workers_pb2, workload_pb2
from fxlib.wire import modules, targets
from fxlib.wire import targets as allowed
from fxlib_service import content_checks, convert, field_checks
from fxlib_service.errors import ServiceError
from tests.client.models import Clicks
from tests.fuzz.connections import CONNECTIONS
from tests.fuzz.files import FILES
from tests.fuzz.messages import TEXTS
from tests.fuzz.target import (
    Target,
    check_line,
    drawn,
    folder,
    framed,
    of_file,
    of_messages,
    same,
    with_frames,
    words_of_json,
)
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
    screen(wire.decode(graph, root=own.module, limits=LIMITS), own.module, passes=recipes.get("training").passes)
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
    place = folder()
    fxlib.save(torch.fx.symbolic_trace(nn.Linear(2, 2)), place / "a.fxg")
    fxlib.save(fxlib.capture(Clicks()), place / "b.fxg", weights=False)
    return [(place / name).read_bytes() for name in ("a.fxg", "b.fxg")]


def _sealed(data: bytes) -> bytes:
    """Return a file whose graph has the digest that stands before it."""
    begin = len(files.MARK) + 8
    length = int.from_bytes(data[begin - 8 : begin], "little")
    graph = data[begin + 32 : begin + 32 + length]
    return data[:begin] + files.digest_of(graph) + data[begin + 32 :]


# ----------------------------------------------------------------------------------------------------------- messages


def _read_workload(message: workload_pb2.Workload) -> None:
    def read(each: workload_pb2.Workload) -> fxlib.Workload:
        return protocol.workload_from_proto(each, {})

    same(message, read, lambda each: protocol.workload_to_proto(each).message)


def _read_job(message: jobs_pb2.Job) -> None:
    job = same(message, protocol.job_from_proto, protocol.job_to_proto)
    check_line("  ".join(jobs_command._row(job)))
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
    check_line(sentence(same(message, protocol.event_from_proto, protocol.event_to_proto)))


def _check_shown(text: str) -> None:
    for line in text.split("\n"):
        check_line(line.replace("\t", " "))


def _read_passes(message: jobs_pb2.ListPassesResponse) -> None:
    shown = io.StringIO()
    say(passes_command._passes_text(message), to=shown)
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
    convert.checked_blob(request.graph)


def _check_complete(request: workers_pb2.CompleteRequest) -> None:
    content_checks.check_result(request.result, protocol.trial_to_proto(fxlib.TrialOptions()))
    field_checks.check_failure(request.failure.code)
    check_line(field_checks.clip(request.failure.message))


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


_MESSAGE_TARGETS = (
    of_messages("graphs", {graph_pb2.Graph: read_graph}, _graphs, words=names_on_lists),
    of_messages("answers", {graph_pb2.Graph: read_answer}, _answers, words=names_on_lists),
    of_messages("messages", _MESSAGES, _messages, words=_words_of_messages),
    of_messages("recipes", {jobs_pb2.Recipe: _read_recipe}, _recipes, words=names_on_lists),
    of_messages("requests", _REQUESTS, _requests, words=_words_of_messages, refusals=(FxlibError, ServiceError)),
    Target(
        name="weights",
        read=lambda data: read_weights(framed(data)),
        seeds=lambda: with_frames(_weights()),
        words=words_of_json,
    ),
    Target(
        name="batches",
        read=lambda data: protocol.batch_from_bytes(framed(data), "a"),
        seeds=lambda: with_frames([protocol.batch_to_bytes(each) for each in drawn(some.batches)]),
        words=words_of_json,
    ),
    of_file("graph-files", lambda path: fxlib.load(path, limits=LIMITS), _saved, sealed=_sealed),
)

TARGETS: Mapping[str, Target] = {each.name: each for each in (*_MESSAGE_TARGETS, *FILES, *CONNECTIONS)}
