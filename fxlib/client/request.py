"""What a launcher asks for, and its form on the wire."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import nn
from torch.fx import GraphModule

from fxlib import protocol, wire
from fxlib.capture import capture
from fxlib.errors import WorkloadError
from fxlib.trial import TrialOptions
from fxlib.v1 import jobs_pb2
from fxlib.workload import Workload

_TRIAL = TrialOptions()


class Asked(TypedDict, total=False):
    """The keyword arguments of `Client.optimize` and `Client.submit`; see `Question`."""

    recipe: protocol.RecipeLike
    name: str
    namespace: str
    labels: Mapping[str, str]
    min_gain: float
    confidence: float
    budget_s: float
    deadline_s: float
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the service.

    Args:
        recipe: a recipe's name, a `Recipe`, or a list of passes: names, (name, options), or the passes themselves.
        name: the model's name on dashboards and in listings.
        namespace: whose job it is.
        labels: anything to find the job by.
        min_gain: the least relative gain in QPS worth adopting (0.02 is 2%).
        confidence: level of the interval whose lower end is compared with `min_gain`.
        budget_s: wall-clock budget of the measurement, in seconds.
        deadline_s: how long the launcher waits for the answer, in seconds; then it trains with its original.
        fresh: measure anew, even if the service has an answer for the same graph, recipe, workload and hardware.

    Raises:
        WorkloadError: a figure is out of its range.
    """

    recipe: protocol.RecipeLike = "schedule"
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    min_gain: float = _TRIAL.min_gain
    confidence: float = _TRIAL.confidence
    budget_s: float = _TRIAL.budget_s
    deadline_s: float = 300.0
    fresh: bool = False

    def __post_init__(self) -> None:
        """Check the figures."""
        if not self.deadline_s > 0:
            raise WorkloadError("must be positive", where="deadline_s")
        _ = self.trial

    @property
    def trial(self) -> TrialOptions:
        """The part that the trial needs."""
        return TrialOptions(min_gain=self.min_gain, confidence=self.confidence, budget_s=self.budget_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A question ready to be sent: the request, the blobs that it names, by SHA-256, and the graph that it is about."""

    captured: GraphModule
    request: jobs_pb2.OptimizeRequest
    blobs: Mapping[str, bytes]


def captured_of(model: nn.Module, workload: Workload) -> GraphModule:
    """Return the model if it is captured, else capture it.

    Raises:
        CaptureError: the model holds something that cannot be recorded.
    """
    return model if isinstance(model, GraphModule) else capture(model, contracts=workload.contracts)


def prepare(captured: GraphModule, workload: Workload, question: Question) -> Prepared:
    """Encode everything that the service needs to know; the request gets an idempotency key of its own.

    Raises:
        WireError: the graph, or a part of the workload, cannot be written.
        WorkloadError: a batch's dtype cannot be sent.
    """
    encoded = wire.encode(captured, weights="weights" in protocol.needs_of(question.recipe))
    graph = encoded.graph.SerializeToString(deterministic=True)
    address = protocol.blob_ref(graph)
    told = protocol.workload_to_proto(workload)
    request = jobs_pb2.OptimizeRequest(
        request_id=str(uuid.uuid4()),
        name=question.name or type(captured).__name__,
        namespace=question.namespace,
        labels=question.labels,
        graph=address,
        workload=told.message,
        recipe=protocol.recipe_to_proto(question.recipe),
        trial=protocol.trial_to_proto(question.trial),
        torch_version=torch.__version__,
        fresh=question.fresh,
    )
    return Prepared(captured=captured, request=request, blobs={**encoded.blobs, **told.blobs, address.sha256: graph})
