"""Find errors in a request before anything is uploaded.

A sample batch runs once in the launcher, so that the model itself reports a wrong batch. The reports of a service's
workers show which requests they would refuse.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxlib import protocol, wire
from fxlib.analysis.effects.node_kinds import Behaviours
from fxlib.analysis.effects.process_groups import groups_of, own_code_in
from fxlib.analysis.effects.resources import COLLECTIVES
from fxlib.capture.trace.traced_through import WHOLE
from fxlib.client.connection import Connection, Deadline
from fxlib.client.request import Prepared
from fxlib.errors import PassError, RemoteError
from fxlib.profiling.live_profile import calls_that_may_write, copy_of, step_context, step_state_kept
from fxlib.reasons import Reason
from fxlib.runtime import CapturedModule, is_call, is_issue, is_wait
from fxlib.runtime.ops.calls import client_of
from fxlib.runtime.ops.registry import CALLS_BY_NAME, CREATIONS, TRACKERS
from fxlib.runtime.submodules import graph_modules, local_tensors
from fxlib.spec.inputs import Batch
from fxlib.spec.training import scalar_loss
from fxlib.spec.workload import Workload
from fxlib.utils.pytree import mapped
from fxlib.v1 import graph_pb2, jobs_pb2

_SERVED = ("fxlib.", "torch", "_operator:", "builtins:")
"""Prefixes of the names of functions that every server of a trial has."""
DEVICES = frozenset({"cpu", "meta"})
"""Kinds of devices that a trial has; tensors without values are drawn on the first."""
_PROFILE = "measure the job with fxlib.profile(...) and pass that as profile=, so that it can be replayed"
_OPAQUE = ("opaque_function", "opaque_method")


class UnservedError(RemoteError):
    """No present worker could measure the job; `reason` is the one with which a trial would end."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason.sentence(detail))
        self.reason = reason


def check_measurable(captured: GraphModule, workload: Workload) -> None:
    """Check that a trial could hold a job's tensors and process groups, and code that `DistributedDataParallel` runs.

    Raises:
        UnservedError: NO_DEVICE, COLLECTIVES or OPAQUE_CODE.
    """
    if devices := sorted(set(_devices(captured, workload))):
        raise UnservedError(Reason.NO_DEVICE, ", ".join(devices))
    graphs = [body for _, body in graph_modules(captured)]
    if problem := groups_of(graphs).misfit(workload.trainers):
        raise UnservedError(Reason.COLLECTIVES, problem)
    if secrets := sorted({each for body in graphs for each in own_code_in(body)}):
        raise UnservedError(Reason.OPAQUE_CODE, ", ".join(secrets))


def _devices(captured: GraphModule, workload: Workload) -> Iterator[str]:
    """Yield the devices of weights and batches that are not available in any trial."""
    state = dict.fromkeys(each for _, body in graph_modules(captured) for each in local_tensors(body).values())
    batches = (pytree.tree_leaves((each.inputs, dict(each.kwargs), each.target)) for each in workload.real_batches)
    for each in (*state, *chain.from_iterable(batches)):
        if isinstance(each, torch.Tensor) and each.device.type not in DEVICES:
            yield str(each.device)


def check_served(
    prepared: Prepared, capabilities: jobs_pb2.GetCapabilitiesResponse, connection: Connection, deadline: Deadline
) -> None:
    """Check that the service knows the recipe, and that, as far as known, a trial on its workers could begin.

    Raises:
        PassError: neither the service nor this library knows the recipe, a pass or an option.
        UnservedError: OPAQUE_CODE or NO_SERVER.
        RemoteError: the service cannot be asked.
    """
    _check_recipe(prepared.request.recipe, capabilities, connection, deadline)
    if opaque := sorted(set(_opaque(prepared))):
        raise UnservedError(Reason.OPAQUE_CODE, ", ".join(opaque))
    if prepared.request.HasField("profile"):
        return
    if refused := list(dict.fromkeys(_unserved(prepared, capabilities.workers))):
        raise UnservedError(Reason.NO_SERVER, f"{', '.join(refused)} ({_PROFILE})")


def _check_recipe(
    recipe: jobs_pb2.Recipe, capabilities: jobs_pb2.GetCapabilitiesResponse, connection: Connection, deadline: Deadline
) -> None:
    try:
        protocol.recipe_from_proto(recipe)
    except PassError:
        if recipe.name in capabilities.recipes and not recipe.passes:
            return  # the service is newer
        request = jobs_pb2.ListPassesRequest()
        listed = connection.call(
            "listing passes", lambda left_s: connection.jobs.ListPasses(request, timeout=left_s), deadline
        )
        known = {each.name: {option.name for option in each.options} for each in listed.passes}
        fits = [step.name in known and set(step.options) <= known[step.name] for step in recipe.passes]
        if not fits or not all(fits):
            raise


def _opaque(prepared: Prepared) -> Iterator[str]:
    """Yield, in words, the code in the graphs that only this process has.

    Functions of registered clients, and the handles that are given to these, are replayed.
    """
    graph = wire.parse(prepared.blobs[prepared.request.graph.sha256])
    clients = {label for each in graph.clients for label in (each.blocking, each.issue, each.wait)}
    nodes = prepared.captured.graph.find_nodes(op="call_module")
    whole = {str(node.target): f" (not traced: {node.meta[WHOLE]})" for node in nodes if WHOLE in node.meta}
    for place, module in enumerate(graph.modules):
        if module.WhichOneof("kind") != "graph":
            continue
        rrefs = prepared.workload.rrefs if place == len(graph.modules) - 1 else {}
        given = _given_to(clients, graph, module)
        for index, node in enumerate(module.graph.nodes):
            target = graph.targets[node.target]
            kind = target.WhichOneof("kind")
            if kind in _OPAQUE and getattr(target, kind) not in clients:
                yield f"function {getattr(target, kind)!r}"
            elif node.op == graph_pb2.OPCODE_CALL_MODULE and (called := _module_at(graph, module, target.path)):
                yield f"module {target.path!r} of class {called}{whole.get(target.path, '')}"
            elif node.op == graph_pb2.OPCODE_GET_ATTR and target.path not in rrefs and index not in given:
                *_, name = target.path.split(".")
                owner = _owner_of(graph, module, target.path)
                if any(each.name == name and each.value.WhichOneof("kind") == "opaque" for each in owner.attributes):
                    yield f"attribute {target.path!r}"


def _given_to(labels: Container[str], graph: graph_pb2.Graph, module: graph_pb2.Module) -> set[int]:
    """Return the nodes that are given to functions of these labels, and to nothing else."""
    given: dict[bool, set[int]] = {True: set(), False: set()}
    for node in module.graph.nodes:
        target = graph.targets[node.target]
        is_one = target.WhichOneof("kind") == "opaque_function" and target.opaque_function in labels
        values = (*node.args, *(each.value for each in node.kwargs))
        given[is_one] |= {each.node for each in values if each.WhichOneof("kind") == "node"}
    return given[True] - given[False]


def _owner_of(graph: graph_pb2.Graph, module: graph_pb2.Module, path: str) -> graph_pb2.Module:
    *steps, _ = path.split(".")
    for step in steps:
        module = next(graph.modules[slot.module] for slot in module.children if slot.name == step)
    return module


def _module_at(graph: graph_pb2.Graph, module: graph_pb2.Module, path: str) -> str:
    """Return the class of a module that cannot be sent; empty if the module can be sent."""
    return _owner_of(graph, module, f"{path}.").opaque


def _unserved(prepared: Prepared, workers: Iterable[jobs_pb2.WorkerInfo]) -> Iterator[str]:
    """Yield the calls that no server of a trial would answer.

    Modules that an operator allowed may import others, whose functions servers then also have. So an unknown function
    counts as missing only if no worker has such modules.
    """
    there = list(workers)
    unknown = bool(there) and not any(worker.allowed_modules for worker in there)
    servers = {server.name for server in prepared.workload.servers} | set(_owners(prepared.captured))
    named = f" ({', '.join(sorted(servers))})" if servers else ""
    for _, body in graph_modules(prepared.captured):
        for node in body.graph.nodes:
            to, function = _called(node)
            if (client := client_of(node)) is not None and unknown and not is_wait(node):
                yield f"{client.function!r} of the client {client.name!r}"
            elif to and to not in servers:
                yield f"calls to {to!r}, which is none of the workload's servers{named}"
            elif unknown and ":" in function and not function.startswith(_SERVED):
                yield f"{function!r} on {to or 'any server'!r}"


def _called(node: Node) -> tuple[str, str]:
    """Return the server (empty if not constant) and the function of a remote call, or of the push of its gradient."""
    if node.target in TRACKERS:
        _, to, function, *_ = node.args
    elif node.target in CALLS_BY_NAME:
        to, function = node.args[:2]
    else:
        return "", ""
    return to if isinstance(to, str) else "", function if isinstance(function, str) else ""


def _owners(module: GraphModule) -> Iterator[str]:
    """Yield the servers that own the objects behind a model's RRefs."""
    for each in module.modules():
        for value in vars(each).values():
            if isinstance(value, rpc.PyRRef):
                yield value.owner_name()


def run_sample(captured: GraphModule, workload: Workload) -> bool:
    """Run the model's own forward, and the loss, on one batch of the workload; restore what they changed.

    This runs the model as it was written, so that an error is the one that training would meet. The model does not run
    if others would notice it: a server, unless all calls are declared to change nothing and RPC is initialized; or
    other ranks. Code that is kept whole, which may do anything, does not run while RPC or torch.distributed is
    initialized. Nothing runs if the weights are on the meta device.

    Returns:
        Whether the model ran.

    Raises:
        Exception: whatever the model or the loss raises, with a note that names the batch.
    """
    model = captured._fxlib.original if isinstance(captured, CapturedModule) else None
    model = captured if model is None else model
    if not (_stays_here(captured, workload) and _has_weights(model)):
        return False
    batch = workload.samples[0]
    device = next((each.device for each in local_tensors(model).values()), torch.device("cpu"))
    try:
        records = torch.is_grad_enabled() and workload.mode != "forward"
        recorded: Any = step_context(workload) if rpc.api._is_current_rpc_agent_set() else nullcontext()
        with recorded, step_state_kept(model, workload), torch.set_grad_enabled(records):
            given = _on(device, batch)
            output = model(*given.inputs, **given.kwargs)
            if workload.mode != "forward":
                scalar_loss(workload.loss, output, given.target)
    except Exception as error:
        drawn = "drawn from the description of the batches" if workload.spec is not None else "the first of the batches"
        error.add_note(f"fxlib: raised in the launcher by a sample, {drawn}, which runs once before anything is sent")
        raise
    return True


def _stays_here(captured: GraphModule, workload: Workload) -> bool:
    """Whether only this process notices a run."""
    nodes = [node for _, body in graph_modules(captured) for node in body.graph.nodes]
    if workload.rrefs or any(node.target in COLLECTIVES for node in nodes):
        return False
    is_group, is_rpc = dist.is_available() and dist.is_initialized(), bool(rpc.api._is_current_rpc_agent_set())
    if is_group and dist.get_world_size() > 1:
        return False  # the user's own modules may hold collectives, as DistributedDataParallel does
    if (is_group or is_rpc) and _has_opaque_code(captured):
        return False
    if not any(is_call(node) or is_issue(node) or node.target in CREATIONS for node in nodes):
        return True
    return is_rpc and not any(calls_that_may_write(body, workload) for _, body in graph_modules(captured))


def _has_opaque_code(captured: GraphModule) -> bool:
    """Whether a graph calls code that may do anything: the user's own functions and modules, kept whole."""
    for _, body in graph_modules(captured):
        behaviours = Behaviours(body)
        if any(behaviours.of(node).fence is Reason.OPAQUE_NEIGHBOUR for node in body.graph.nodes):
            return True
    return False


def _has_weights(model: nn.Module) -> bool:
    return not any(each.is_meta for each in local_tensors(model).values())


def _on(device: torch.device, batch: Batch) -> Batch:
    """Return a copy of a batch, which the model may write to, with tensors on the device of the model's weights."""
    copy = copy_of(batch)
    moved = mapped(
        lambda each: each.to(device) if isinstance(each, torch.Tensor) else each,
        (copy.inputs, dict(copy.kwargs), copy.target),
    )
    return Batch(inputs=moved[0], kwargs=moved[1], target=moved[2])
