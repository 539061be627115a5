"""Run a sample batch once in the launcher, so that the model itself reports a wrong batch before anything is sent."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule

from fxlib.analysis.effects.node_kinds import Behaviours
from fxlib.analysis.effects.resources import COLLECTIVES
from fxlib.client.value_numbering import bodies
from fxlib.profiling.api import calls_that_may_write, copy_of
from fxlib.reasons import Reason
from fxlib.runtime import CapturedModule, is_call, is_issue, ops
from fxlib.runtime.preserve_state import state_kept
from fxlib.runtime.submodules import local_tensors
from fxlib.spec.inputs import Batch
from fxlib.spec.losses import scalar
from fxlib.spec.workload import Workload
from fxlib.utils.pytree import mapped


def run_sample(captured: GraphModule, workload: Workload) -> bool:
    """Run the model's own forward, and the loss, on one batch of the workload; put back what they changed.

    That is the model as it was written, so that an error is the one that training would meet. It does not run where a
    run would be noticed elsewhere: by a server, unless all calls are declared to change nothing and RPC is up; or by
    other ranks. Code that is kept whole, which may do anything, does not run while RPC or torch.distributed is up.
    Nor does anything where the weights are on the meta device.

    Returns:
        Whether it ran.

    Raises:
        Exception: whatever the model raises, or the loss; with a note that says which batch it was.
    """
    model = captured._fxlib.original if isinstance(captured, CapturedModule) else None
    model = captured if model is None else model
    if not (_stays_here(captured, workload) and _has_weights(model)):
        return False
    batch = workload.samples[0]
    device = next((each.device for each in local_tensors(model).values()), torch.device("cpu"))
    try:
        with state_kept(model), torch.set_grad_enabled(torch.is_grad_enabled() and workload.mode != "forward"):
            given = _on(device, batch)
            output = model(*given.inputs, **given.kwargs)
            if workload.mode != "forward":
                scalar(workload.loss, output, given.target)
    except Exception as error:
        drawn = "drawn from the description of the batches" if workload.spec is not None else "the first of the batches"
        error.add_note(f"fxlib: raised in the launcher by a sample, {drawn}, which runs once before anything is sent")
        raise
    return True


def _stays_here(captured: GraphModule, workload: Workload) -> bool:
    """Whether nobody but this process notices a run."""
    nodes = [node for _, body in bodies(captured) for node in body.graph.nodes]
    if workload.rrefs or any(node.target in COLLECTIVES for node in nodes):
        return False
    is_group, is_rpc = dist.is_available() and dist.is_initialized(), bool(rpc.api._is_current_rpc_agent_set())
    if is_group and dist.get_world_size() > 1:
        return False  # modules of one's own may hold collectives, as DistributedDataParallel does
    if (is_group or is_rpc) and _has_opaque_code(captured):
        return False
    if not any(is_call(node) or is_issue(node) or node.target is ops.create for node in nodes):
        return True
    return is_rpc and not any(calls_that_may_write(body, workload) for _, body in bodies(captured))


def _has_opaque_code(captured: GraphModule) -> bool:
    """Whether a graph calls code that may do anything: functions and modules of the user's own, kept whole."""
    for _, body in bodies(captured):
        behaviours = Behaviours(body)
        if any(behaviours.of(node).fence is Reason.OPAQUE_NEIGHBOUR for node in body.graph.nodes):
            return True
    return False


def _has_weights(model: nn.Module) -> bool:
    return not any(each.is_meta for each in local_tensors(model).values())


def _on(device: torch.device, batch: Batch) -> Batch:
    """Return a copy, which the model may write, with its tensors where the model's weights are."""
    copy = copy_of(batch)
    moved = mapped(
        lambda each: each.to(device) if isinstance(each, torch.Tensor) else each,
        (copy.inputs, dict(copy.kwargs), copy.target),
    )
    return Batch(inputs=moved[0], kwargs=moved[1], target=moved[2])
