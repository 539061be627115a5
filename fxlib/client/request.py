"""Convert the question of a launcher to a request message."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch
from torch.fx import GraphModule

from fxlib import protocol, wire
from fxlib.capture.coerce import Model, as_graph
from fxlib.client.variant_exchange import PreparedVariant, prepare_variants
from fxlib.errors import WorkloadError
from fxlib.passes import GraphPass, Quantize
from fxlib.passes.infra.base import Context
from fxlib.recipes.grad_mode import as_forwards_run
from fxlib.recipes.recipes import RECIPES, PlanningRequest, Recipe
from fxlib.runtime.backends import BACKENDS, installed
from fxlib.runtime.guards.folded_weights import Mark, marks_of
from fxlib.spec.inputs import with_ranges_of
from fxlib.spec.job import TrialOptions
from fxlib.spec.labels import problems_of
from fxlib.spec.profile import Profile
from fxlib.spec.report import Report
from fxlib.spec.workload import Workload
from fxlib.v1 import jobs_pb2

_TRIAL = TrialOptions()
_MAX_SENT_NODES = 50_000
"""Maximum number of a profile's nodes that are sent: they take a few megabytes of a message that may have eight."""


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `Client.optimize` and `Client.submit`; see `Question`."""

    recipe: protocol.RecipeLike
    name: str
    namespace: str
    labels: Mapping[str, str]
    where: Mapping[str, str]
    min_gain: float
    confidence: float
    budget_s: float
    max_relative_error: float
    deadline_s: float
    fresh: bool
    profile: Profile | None
    diffs: bool
    weights: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to the service.

    Args:
        recipe: a recipe's name, a `Recipe`, or a list of passes: names, (name, options), or the passes themselves.
        name: the model's name on dashboards and in listings.
        namespace: the namespace that the job belongs to.
        labels: any labels by which the job can be found.
        where: the labels that a worker must have to measure the job; empty: any worker will do.
        min_gain: the least relative gain in QPS worth adopting (0.02 is 2%).
        confidence: level of the interval whose lower end is compared with `min_gain`.
        budget_s: wall-clock budget of the measurement, in seconds.
        max_relative_error: limit on the error of results if a pass does not promise the same bits: the largest
            difference in a tensor, divided by the largest magnitude in the original's. Raise it for half precision.
        deadline_s: how long the launcher waits for the answer, in seconds; after that it trains with its original.
        fresh: whether to measure anew even if the service has an answer for the same graph, recipe, workload and
            hardware.
        profile: the model's profile, as `fxlib.profile` measured it; without one, the trial measures it. A trial uses
            it to serve the remote functions that workers do not have.
        diffs: whether the result shows what each pass did to the generated code (`PassReport.diff`).
        weights: whether the values of weights may be sent, if the recipe has a use for them: `auto` tries less without
            them, and others that need them are refused.

    Raises:
        WorkloadError: a number is out of its range, or no worker can have a label of `where`.
    """

    recipe: protocol.RecipeLike = "schedule"
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    min_gain: float = _TRIAL.min_gain
    confidence: float = _TRIAL.confidence
    budget_s: float = _TRIAL.budget_s
    max_relative_error: float = _TRIAL.max_relative_error
    deadline_s: float = 300.0
    fresh: bool = False
    profile: Profile | None = None
    diffs: bool = False
    weights: bool = True

    def __post_init__(self) -> None:
        """Check the numbers, and the labels of `where`."""
        for key, problem in problems_of(self.where):
            raise WorkloadError(problem, where=f"where[{key}]" if key else "where")
        if not self.deadline_s > 0:
            raise WorkloadError("must be positive", where="deadline_s")
        _ = self.trial

    @property
    def trial(self) -> TrialOptions:
        """The part of the question that the trial needs."""
        return TrialOptions(
            min_gain=self.min_gain,
            confidence=self.confidence,
            budget_s=self.budget_s,
            max_relative_error=self.max_relative_error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A question ready to be sent: the request, the blobs that it names, by SHA-256, and the graph that it is about.

    `marks` are the weights as they were when their values were sent, by name; empty if none were sent. `ran` says
    whether the model ran on a sample in this process. `variants` are the workload's variants that are part of the
    question, and `declined` says why the others are not, both by name. `passes` are the passes of the recipe; None if
    they are not known here.
    """

    captured: GraphModule
    workload: Workload
    request: jobs_pb2.OptimizeRequest
    blobs: Mapping[str, bytes]
    marks: Mapping[str, Mark]
    ran: bool = False
    variants: Mapping[str, PreparedVariant] = field(default_factory=dict)
    declined: Mapping[str, Report] = field(default_factory=dict)
    passes: tuple[GraphPass, ...] | None = ()


def captured_of(model: Model, workload: Workload, question: Question) -> GraphModule:
    """Return the model if it is captured, else capture it; a model that cannot be traced is exported with the batches.

    It is captured in the caller's grad mode; if passes use values of weights, and forwards alone run without a profile,
    as `as_forwards_run` says.

    Raises:
        CaptureError: the model holds something that cannot be recorded.
    """
    captured = as_graph(model, workload.samples, contracts=workload.contracts)
    if workload.mode == "forward" and question.profile is None and _uses_weights(captured, question):
        return as_forwards_run(captured, model, workload, workload.contracts)
    return captured


def prepare(captured: GraphModule, workload: Workload, question: Question, *, ran: bool = False) -> Prepared:
    """Encode everything that the service needs to know; the request gets an idempotency key of its own.

    Raises:
        WireError: the graph, or a part of the workload or the profile, cannot be written; or a pass needs the weights,
            and they are on the meta device.
        WorkloadError: a batch's dtype cannot be sent; or a pass needs the weights, and steps train them, or they may
            not be sent.
    """
    sent = _sends_weights(captured, workload, question)
    workload = calibrated(captured, workload, question) if sent else workload
    marks = marks_of(captured) if sent else {}  # taken before the weights are read, so that a write in between shows
    encoded = wire.encode(captured, weights=sent)
    graph = encoded.graph.SerializeToString(deterministic=True)
    address = protocol.blob_ref(graph)
    described = protocol.workload_to_proto(workload)
    variants, declined = prepare_variants(captured, workload, question.profile, weights=sent)
    request = jobs_pb2.OptimizeRequest(
        request_id=str(uuid.uuid4()),
        name=question.name or type(captured).__name__,
        namespace=question.namespace,
        labels=question.labels,
        where=question.where,
        graph=address,
        workload=described.message,
        recipe=protocol.recipe_to_proto(question.recipe),
        trial=protocol.trial_to_proto(question.trial),
        torch_version=torch.__version__,
        fresh=question.fresh,
        profile=None if question.profile is None else protocol.profile_to_proto(_sent(question.profile)),
        diffs=question.diffs,
        variants=[each.request for each in variants.values()],
        backends=filter(None, map(installed, BACKENDS)) if protocol.is_auto(question.recipe) else (),
    )
    blobs = {**encoded.blobs, **described.blobs, address.sha256: graph}
    for each in variants.values():
        blobs |= each.blobs
    return Prepared(
        captured=captured,
        workload=workload,
        ran=ran,
        request=request,
        blobs=blobs,
        marks=marks,
        variants=variants,
        declined=declined,
        passes=protocol.passes_of(question.recipe),
    )


def _sends_weights(captured: GraphModule, workload: Workload, question: Question) -> bool:
    """Return whether the values of the weights are part of the question.

    Raises:
        WorkloadError: a pass needs the weights, and steps train them, or they may not be sent.
    """
    wanting = protocol.passes_that_need("weights", question.recipe)
    if wanting and not question.weights:
        raise WorkloadError(f"the pass {wanting[0]} needs the weights", where="weights", hint="Let them be sent.")
    if wanting and workload.mode != "forward":
        raise WorkloadError(
            f"the pass {wanting[0]} computes values from weights once, which a step of mode {workload.mode!r} changes",
            where="Workload.mode",
            hint='Such passes are for inference: mode="forward".',
        )
    return workload.mode == "forward" and _uses_weights(captured, question)


def _uses_weights(captured: GraphModule, question: Question) -> bool:
    """Return whether a pass of the recipe, or one that `auto` tries, uses the values of weights, which may be sent."""
    if not question.weights:
        return False
    auto = protocol.is_auto(question.recipe) and not captured.training
    return auto or bool(protocol.passes_that_need("weights", question.recipe))


def calibrated(captured: GraphModule, workload: Workload, question: Question) -> Workload:
    """Return a workload with the ranges of int8 layers' inputs, if its batches are described and were kept here.

    The recipe's passes before the one that quantizes run here, too, since it names layers by the result of those. Then
    made-up batches are in the range of the real ones.

    Raises:
        PassError: a pass does not apply.
    """
    known = RECIPES["int8"].passes if protocol.is_auto(question.recipe) else protocol.passes_of(question.recipe)
    passes = known or ()
    position, step = next(((i, each) for i, each in enumerate(passes) if isinstance(each, Quantize)), (0, None))
    if step is None or workload.spec is None or not workload.calibration:
        return workload
    if protocol.is_auto(question.recipe) and question.max_relative_error <= _TRIAL.max_relative_error:
        return workload  # the bound on the error leaves no room for int8
    before = Recipe(name="before int8", passes=passes[:position]).run(captured, PlanningRequest.of(workload)).module
    context = Context(before, workload=workload, max_relative_error=question.max_relative_error)
    spec = with_ranges_of(workload.spec, workload.calibration)
    return replace(workload, batches=spec, ranges=step.ranges(before, context))


def _sent(profile: Profile) -> Profile:
    """Leave the shortest nodes out if there are too many for one message; planning estimates them."""
    if len(profile.nodes) <= _MAX_SENT_NODES:
        return profile
    longest = sorted(profile.nodes, key=lambda node: node.seconds, reverse=True)[:_MAX_SENT_NODES]
    kept = {node.node for node in longest}
    note = f"the shortest {len(profile.nodes) - len(kept):,} nodes were left out of the request"
    nodes = tuple(node for node in profile.nodes if node.node in kept)
    return replace(profile, nodes=nodes, notes=(*profile.notes, note))
