"""Checks graphs, workloads, recipes and results with the library, and turns its errors into refusals of the service."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from fxlib import __version__, wire
from fxlib.errors import FxlibError
from fxlib.protocol import (
    check_adoption,
    check_weights,
    profile_from_proto,
    recipe_from_proto,
    report_from_proto,
    trial_from_proto,
    trial_to_proto,
    workload_from_proto,
)
from fxlib.recipes.alternatives import candidates
from fxlib.runtime.backends import BACKENDS
from fxlib.spec.job import TrialOptions
from fxlib.spec.workload import Variant, check_names
from fxlib.v1 import graph_pb2, jobs_pb2, profile_pb2, workload_pb2
from fxlib_service.errors import Code, ServiceError, Violation, invalid


def check_graph(
    data: bytes, field: str, limits: wire.Limits, recipe: jobs_pb2.Recipe | None = None
) -> list[graph_pb2.BlobRef]:
    """Check that bytes are a valid graph with the weights that a recipe needs; return the blobs of its weights.

    The check builds no torch object and takes time proportional to the size of the graph.

    Raises:
        ServiceError: INVALID_GRAPH, naming node and field.
    """
    with _refusing(Code.INVALID_GRAPH, field):
        graph = wire.parse(data, limits)
        wire.validate(graph, limits)
        if recipe is not None:
            check_weights(recipe_from_proto(recipe), graph)
    return wire.values_of(graph)


Sizes = tuple[tuple[str, int], ...]
"""Blobs: the SHA-256 of each, and its size in bytes."""


def weights_needed(data: bytes, field: str, limits: wire.Limits, recipe: bytes | None) -> Sizes:
    """Check a graph in a process of the check pool, as `check_graph` does; the recipe is serialized."""
    asked = None if recipe is None else jobs_pb2.Recipe.FromString(recipe)
    return tuple((ref.sha256, ref.size) for ref in check_graph(data, field, limits, asked))


def weights_of(data: bytes) -> Sizes:
    """Return the weight blobs of a graph that was checked before."""
    return tuple((ref.sha256, ref.size) for ref in wire.values_of(wire.parse(data)))


def examined(data: bytes) -> tuple[bytes, str]:
    """Check a serialized request except for its blobs; return its completed trial, serialized, and its cache key.

    Raises:
        ServiceError: INVALID_REQUEST, naming the field.
    """
    request = jobs_pb2.OptimizeRequest.FromString(data)
    complete_trial(request)
    check_workload(request.workload)
    check_profile(request)
    check_variants(request)
    return request.trial.SerializeToString(), cache_key(request)


def check_answer(data: bytes, trial: bytes) -> None:
    """Check a result in a process of the check pool, as `check_result` does; both arguments are serialized."""
    check_result(jobs_pb2.JobResult.FromString(data), jobs_pb2.TrialOptions.FromString(trial))


def check_workload(workload: workload_pb2.Workload, field: str = "workload") -> None:
    """Check that a workload describes a step that can run. The contents of its blobs are not checked.

    Raises:
        ServiceError: INVALID_REQUEST, naming the field.
    """
    shell = workload_pb2.Workload()
    shell.CopyFrom(workload)
    if shell.WhichOneof("inputs") == "batches" and shell.batches.batches:
        shell.description.CopyFrom(_STAND_IN)
    if shell.loss.WhichOneof("kind") == "graph":
        shell.loss.name = "mean"
    with _refusing(Code.INVALID_REQUEST, field):
        workload_from_proto(shell, {})


_STAND_IN = workload_pb2.BatchSpec(
    inputs=[workload_pb2.TensorSpec(shape=[1], dtype="float32")],
    target=workload_pb2.TensorSpec(shape=[1], dtype="float32"),
    count=1,
)


def check_profile(request: jobs_pb2.OptimizeRequest | jobs_pb2.VariantRequest, field: str = "profile") -> None:
    """Check that the profile of a request, if there is one, can be read, and that its figures are within bounds.

    Raises:
        ServiceError: INVALID_REQUEST, naming the field.
    """
    if request.HasField("profile"):
        with _refusing(Code.INVALID_REQUEST, field):
            profile_from_proto(request.profile)


def check_variants(request: jobs_pb2.OptimizeRequest) -> None:
    """Check the names, workloads and profiles of the variants, which must run on the servers of the main workload.

    Raises:
        ServiceError: INVALID_REQUEST, naming the field.
    """
    main = request.workload
    with _refusing(Code.INVALID_REQUEST, "variants"):
        check_names([Variant(name=each.name) for each in request.variants])
    for index, each in enumerate(request.variants):
        field = f"variants[{index}]"
        check_workload(each.workload, f"{field}.workload")
        check_profile(each, f"{field}.profile")
        own = each.workload
        if (list(own.servers), list(own.rrefs), own.trainers) != (list(main.servers), list(main.rrefs), main.trainers):
            raise invalid(f"{field}.workload", "must have the servers, RRefs and trainers of the request's workload")


def complete_trial(request: jobs_pb2.OptimizeRequest) -> None:
    """Check the options of the trial, or fill in the library's defaults.

    Raises:
        ServiceError: INVALID_REQUEST, naming the field.
    """
    if not request.HasField("trial"):
        request.trial.CopyFrom(trial_to_proto(TrialOptions()))
    with _refusing(Code.INVALID_REQUEST, "trial"):
        trial_from_proto(request.trial)


def check_result(result: jobs_pb2.JobResult, trial: jobs_pb2.TrialOptions) -> None:
    """Check that a worker's answer can be read, and that every adoption in it shows the gain that the trial asks for.

    Raises:
        ServiceError: INVALID_REQUEST, naming the field.
    """
    with _refusing(Code.INVALID_REQUEST, "result"):
        check_adoption(report_from_proto(result), trial_from_proto(trial))


def recipe_key(recipe: jobs_pb2.Recipe) -> str:
    """Return a text that identifies a recipe: its passes and those of its alternatives, with versions and options.

    Raises:
        ServiceError: INVALID_REQUEST, if the recipe, a pass or an option is unknown.
    """
    with _refusing(Code.INVALID_REQUEST, "recipe"):
        tried = candidates(recipe_from_proto(recipe), backends=BACKENDS)
        steps = [
            [
                (step.name, step.version, {option.name: repr(getattr(step, option.name)) for option in fields(step)})
                for step in each.passes
            ]
            for each in tried
        ]
    return json.dumps(steps, sort_keys=True)


def cache_key(request: jobs_pb2.OptimizeRequest) -> str:
    """Return the SHA-256 that equal requests share; they have the same answer.

    It covers the graph, the recipe, the versions, the workload, the trial, what the profile can replay, whether diffs
    are wanted, the graph, workload and replay of each variant, where the job may run, and the launcher's backends.
    """
    parts: list[object] = [
        request.graph.sha256,
        recipe_key(request.recipe),
        request.torch_version,
        __version__,
        _workload_digest(request.workload),
        hashlib.sha256(request.trial.SerializeToString(deterministic=True)).hexdigest(),
        _replayed(request.profile) if request.HasField("profile") else "",
        request.diffs,
    ]
    for each in request.variants:
        replayed = _replayed(each.profile) if each.HasField("profile") else ""
        parts.append([each.name, each.graph.sha256, _workload_digest(each.workload), replayed])
    if request.where:
        parts.append({"where": dict(sorted(request.where.items()))})
    if request.backends:
        parts.append({"backends": sorted(request.backends)})
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_ALL_INTEGERS = 2.0**64
"""Number of values of the widest integers; whatever range a client describes, no wider one is told apart."""


def _workload_digest(workload: workload_pb2.Workload) -> str:
    """Return a digest of a workload, which tells the integers of a description only roughly.

    A launcher finds their bounds, and how they repeat, in its first batches. If it shuffles them anew at each start,
    these figures differ a little, and its next run would never share an answer with the last.
    """
    rough = workload_pb2.Workload()
    rough.CopyFrom(workload)
    spec = rough.description  # empty where there are real batches
    described = [*spec.inputs, *spec.kwargs.values(), *spec.nested.tensors, *([spec.target] * spec.HasField("target"))]
    for tensor in described:
        if tensor.HasField("low") and tensor.HasField("high") and not tensor.dtype.startswith(("float", "bfloat")):
            extent = 2.0 ** math.ceil(math.log2(min(max(tensor.high - tensor.low, 1.0), _ALL_INTEGERS)))
            tensor.low, tensor.high = round(tensor.low / extent) * extent, extent
        if tensor.HasField("repeats"):
            tensor.repeats = round(tensor.repeats, 1)
        tensor.skew = round(tensor.skew * 2) / 2
    return hashlib.sha256(rough.SerializeToString(deterministic=True)).hexdigest()


def _replayed(profile: profile_pb2.Profile) -> str:
    """Return a digest of the parts of a profile that a trial can replay: functions, destinations, and returned values.

    The times are left out. They differ between any two measurements of one program, so that the ranks of a job, or its
    next run, would never share an answer. A user who knows that the servers have changed asks for a fresh answer.
    """
    total = hashlib.sha256()
    for each in sorted(profile.calls, key=lambda call: call.call):
        returns = each.returns.SerializeToString(deterministic=True).hex()
        total.update(json.dumps([each.call, each.function, each.to, returns, each.push.function]).encode())
    return total.hexdigest()


@contextmanager
def _refusing(code: Code, field: str) -> Iterator[None]:
    try:
        yield
    except ServiceError:
        raise
    except FxlibError as error:
        violation = Violation(field=f"{field}: {error.where}" if error.where else field, problem=str(error))
        raise ServiceError(code, str(error), violations=[violation]) from error
