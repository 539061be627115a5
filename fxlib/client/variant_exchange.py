"""Exchange the variants of a workload with the service: capture, encode, and bind them to the caller's model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fxlib import protocol, wire
from fxlib.analysis.effects.resources import COLLECTIVES, function_name, speaks_to
from fxlib.capture.capture_variant import capture_variant, mode_of
from fxlib.client.answer_policy import limits_of_answer, screen
from fxlib.errors import FxlibError, FxlibWarning, WireError
from fxlib.passes import GraphPass
from fxlib.runtime import CapturedModule, is_call, is_issue
from fxlib.runtime.data_parallel import described
from fxlib.runtime.guards.folded_weights import Mark, marks_of
from fxlib.runtime.ops.registry import CREATIONS
from fxlib.runtime.ops.timeline import call_name
from fxlib.runtime.submodules import submodule
from fxlib.spec.profile import CallProfile, Profile
from fxlib.spec.report import Report
from fxlib.spec.workload import Variant, Workload
from fxlib.v1 import jobs_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedVariant:
    """A variant ready to be sent: its part of the request, the blobs that this names, and the graph that it is about.

    `marks` are the weights as they were when their values were sent, by name; empty if none were sent.
    """

    variant: Variant
    captured: CapturedModule
    request: jobs_pb2.VariantRequest
    blobs: Mapping[str, bytes]
    marks: Mapping[str, Mark]


def prepare_variants(
    main: GraphModule, workload: Workload, profile: Profile | None, *, weights: bool
) -> tuple[dict[str, PreparedVariant], dict[str, Report]]:
    """Capture and encode the variants of a workload; return them, and why others keep the original, both by name.

    Args:
        main: the captured model.
        workload: the workload that has the variants.
        profile: the profile of the main graph, whose calls stand for equal ones of a variant.
        weights: whether the values of weights are sent.
    """
    prepared: dict[str, PreparedVariant] = {}
    declined: dict[str, Report] = {}
    for variant in workload.variants:
        try:
            if not isinstance(main, CapturedModule):
                raise FxlibError("variants are captured from the model, and this is a graph alone")
            prepared[variant.name] = _prepared(main, variant, workload, profile, weights=weights)
        except Exception as error:  # noqa: BLE001 - promised: whatever cannot be rewritten trains as it is
            text = str(error) if isinstance(error, FxlibError) else f"unexpected {type(error).__name__}: {error}"
            declined[variant.name] = _kept(text)
            warnings.warn(f"the original runs for the variant {variant.name!r}: {text}", FxlibWarning, stacklevel=6)
    return prepared, declined


def bind_variants(
    prepared: Mapping[str, PreparedVariant],
    reports: Mapping[str, Report],
    graphs: Mapping[str, bytes],
    values: Mapping[str, bytes],
    *,
    seconds: float = math.inf,
    passes: Sequence[GraphPass] | None = (),
) -> tuple[dict[str, CapturedModule], dict[str, Report]]:
    """Bind the service's answers to the caller's own model; return graphs to run, and reports, by name.

    A graph that would take longer than `seconds` to check is refused unread; `passes` are as for `screen`.
    If gradients are recorded, a variant that is not adopted runs its graph as captured, which tracks the gradients of
    remote results.

    Raises:
        WireError: the answer contradicts itself, or this model may not become one of the graphs.
    """
    if unknown := sorted(reports.keys() - prepared.keys()):
        raise WireError(f"there is no variant {unknown[0]!r}", where="JobResult.variants")
    modules: dict[str, CapturedModule] = {}
    found: dict[str, Report] = {}
    for name, each in prepared.items():
        report = found[name] = reports.get(name) or _kept("the service knows nothing of variants")
        if report.decision == "adopt":
            if name not in graphs:
                raise WireError("there is no graph to adopt", where=f"variant {name!r}")
            limits = limits_of_answer(each.captured, each.request.graph.size, seconds)
            module = wire.decode(wire.parse(graphs[name]), blobs=values, root=each.captured, limits=limits)
            screen(module, each.captured, passes=passes)
            module.computed_from(each.marks)
            if collectives_of(module) != collectives_of(each.captured):
                found[name] = _kept("it makes its collectives in another order, and other ranks may run another graph")
                continue
            modules[name] = module
        elif each.variant.grad:
            modules[name] = each.captured
    return modules, found


def _prepared(
    main: CapturedModule, variant: Variant, workload: Workload, profile: Profile | None, *, weights: bool
) -> PreparedVariant:
    captured = capture_variant(main, variant, workload)
    if variant.grad and _in_both_directions(captured) != _in_both_directions(main):
        raise FxlibError(
            "it makes other collectives than the model's own step, and the ranks of a job may be in different variants "
            "at one step"
        )
    own = workload.of(variant)
    described = protocol.workload_to_proto(own)
    with mode_of(main, variant):
        marks = marks_of(captured) if weights else {}
        encoded = wire.encode(captured, weights=weights)
    graph = encoded.graph.SerializeToString(deterministic=True)
    address = protocol.blob_ref(graph)
    known = None if profile is None else profile_of(profile, captured, forward=own.mode == "forward")
    request = jobs_pb2.VariantRequest(
        name=variant.name,
        graph=address,
        workload=described.message,
        profile=None if known is None else protocol.profile_to_proto(known),
    )
    blobs = {**encoded.blobs, **described.blobs, address.sha256: graph}
    return PreparedVariant(variant=variant, captured=captured, request=request, blobs=blobs, marks=marks)


def profile_of(profile: Profile, graph: GraphModule, *, forward: bool) -> Profile:
    """Return the part of a profile of another graph of the same model that applies to this graph.

    A call takes the record of the call with its name, if that calls the same function, else any record of its function.
    """
    by_function: dict[str, CallProfile] = {}
    for record in profile.calls:
        by_function.setdefault(record.function, record)
    calls: list[CallProfile] = []
    for node in graph.graph.nodes:
        if not (is_call(node) or is_issue(node) or node.target in CREATIONS):
            continue
        name, function = call_name(node), function_name(node)
        named = profile.call_by_name.get(name)
        found = named if named is not None and named.function == function else by_function.get(function)
        if found is not None:
            calls.append(replace(found, call=name, push=None if forward else found.push))
    here = {node.name for node in graph.graph.nodes}
    nodes = tuple(each for each in profile.nodes if each.node in here)
    known = replace(profile, calls=tuple(calls), nodes=nodes, step_s=0.0)
    return replace(known, loss_s=0.0, backward_s=0.0, rest_s=0.0) if forward else known


def collectives_of(module: GraphModule) -> list[tuple[str, str]]:
    """Return operation and group of each collective and each `DistributedDataParallel`, in the order of their issue.

    Backward issues its collectives in the reverse order, whatever local work lies between: autograd runs nodes in the
    reverse of the order in which the forward made them.
    """
    found: list[tuple[str, str]] = []
    for node in module.graph.nodes:
        if node.target in COLLECTIVES:
            found.append((function_name(node), speaks_to(node)))
        elif node.op == "call_module" and (parallel := described(submodule(module, str(node.target)))) is not None:
            found.append((str(node.target), parallel.group))
    return found


def _in_both_directions(captured: GraphModule) -> tuple[list[tuple[str, str]], list[object]]:
    """Return the collectives of a captured graph, and through which of them gradients flow."""
    taking = [node.meta.get("requires_grad") for node in captured.graph.nodes if node.target in COLLECTIVES]
    return collectives_of(captured), taking


def _kept(explanation: str) -> Report:
    return Report(decision="keep_original", reason=None, explanation=explanation)
