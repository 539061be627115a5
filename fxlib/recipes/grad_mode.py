"""Capture a model without gradients where passes that use the values of weights could change nothing otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule

from fxlib.analysis.effects.gradients import respects_no_grad
from fxlib.capture.coerce import Model, as_graph
from fxlib.errors import CaptureError
from fxlib.spec.contract import Contract
from fxlib.spec.workload import Workload


def as_forwards_run(
    captured: GraphModule, model: Model, workload: Workload, contracts: Mapping[str, Contract]
) -> GraphModule:
    """Return the graph of a model whose forwards alone run, for passes that use the values of weights.

    That is the given one, captured in the caller's grad mode. But if it turns the recording of gradients on, no such
    pass could change it: then the model is captured anew under `torch.no_grad()`, as it runs, if that is possible.

    Args:
        captured: the graph of the model.
        model: the model in the form in which it was given; if that is the graph itself, it stays.
        workload: batches with which a model that cannot be traced is exported.
        contracts: contracts of remote functions that declare none, by name.
    """
    if captured is model or respects_no_grad(captured) or not torch.is_grad_enabled():
        return captured
    try:
        with torch.no_grad():
            return as_graph(model, workload.samples, contracts=contracts)
    except CaptureError:
        return captured
