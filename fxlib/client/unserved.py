"""Find what the workers of a service would refuse, by what they report, before anything is uploaded."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import chain

import torch
from torch.distributed import rpc
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxlib import protocol, wire
from fxlib.analysis.effects.process_groups import groups_of, own_code_in
from fxlib.capture.trace.traced_through import WHOLE
from fxlib.client.connection import Connection
from fxlib.client.deadline import Deadline
from fxlib.client.request import Prepared
from fxlib.client.value_numbering import bodies
from fxlib.errors import PassError, RemoteError
from fxlib.reasons import Reason
from fxlib.runtime import is_wait
from fxlib.runtime.ops.calls import client_of
from fxlib.runtime.ops.registry import CALLS_BY_NAME, TRACKERS
from fxlib.spec.workload import Workload
from fxlib.v1 import graph_pb2, jobs_pb2

_SERVED = ("fxlib.", "torch", "_operator:", "builtins:")
"""Prefixes of the names of functions that every server of a trial has."""
DEVICES = frozenset({"cpu", "meta"})
"""Kinds of devices that a trial has; what has no values anywhere is drawn on the first."""
_PROFILE = "measure the job with fxlib.profile(...) and pass that as profile=, so that it can be replayed"
_OPAQUE = ("opaque_function", "opaque_method")


class UnservedError(RemoteError):
    """No worker that is there could measure the job; `reason` is the one with which a trial would end."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason.sentence(detail))
        self.reason = reason


def check_measurable(captured: GraphModule, workload: Workload) -> None:
    """See that a trial could hold a job's tensors and process groups, and what `DistributedDataParallel` runs in it.

    Raises:
        UnservedError: NO_DEVICE, COLLECTIVES or OPAQUE_CODE.
    """
    if devices := sorted(set(_devices(captured, workload))):
        raise UnservedError(Reason.NO_DEVICE, ", ".join(devices))
    graphs = [body for _, body in bodies(captured)]
    if problem := groups_of(graphs).misfit(workload.trainers):
        raise UnservedError(Reason.COLLECTIVES, problem)
    if secrets := sorted({each for body in graphs for each in own_code_in(body)}):
        raise UnservedError(Reason.OPAQUE_CODE, ", ".join(secrets))


def _devices(captured: GraphModule, workload: Workload) -> Iterator[str]:
    """Yield the devices of weights and batches that no trial has."""
    state = dict.fromkeys(each for _, body in bodies(captured) for each in (*body.parameters(), *body.buffers()))
    batches = (pytree.tree_leaves((each.inputs, dict(each.kwargs), each.target)) for each in workload.real_batches)
    for each in (*state, *chain.from_iterable(batches)):
        if isinstance(each, torch.Tensor) and each.device.type not in DEVICES:
            yield str(each.device)


def check_served(
    prepared: Prepared, capabilities: jobs_pb2.GetCapabilitiesResponse, connection: Connection, deadline: Deadline
) -> None:
    """See that the service knows the recipe, and that a trial on its workers could begin, for all that can be told.

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
            return  # of a newer service
        request = jobs_pb2.ListPassesRequest()
        listed = connection.call(
            "listing passes", lambda left_s: connection.jobs.ListPasses(request, timeout=left_s), deadline
        )
        known = {each.name: {option.name for option in each.options} for each in listed.passes}
        fits = [step.name in known and set(step.options) <= known[step.name] for step in recipe.passes]
        if not fits or not all(fits):
            raise


def _opaque(prepared: Prepared) -> Iterator[str]:
    """Yield the code in the graphs that only this process has, in words.

    Functions of registered clients, and the handles that these are given, are replayed.
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
    """Return the class of a module that cannot travel; empty of one that can."""
    return _owner_of(graph, module, f"{path}.").opaque


def _unserved(prepared: Prepared, workers: Iterable[jobs_pb2.WorkerInfo]) -> Iterator[str]:
    """Yield the calls that no server of a trial would answer.

    Modules that an operator allowed may import others, whose functions servers then have, too: no worker may have any.
    """
    there = list(workers)
    unknown = bool(there) and not any(worker.allowed_modules for worker in there)
    servers = {server.name for server in prepared.workload.servers} | set(_owners(prepared.captured))
    for _, body in bodies(prepared.captured):
        for node in body.graph.nodes:
            to, function = _called(node)
            if (client := client_of(node)) is not None and unknown and not is_wait(node):
                yield f"{client.function!r} of the client {client.name!r}"
            elif to and to not in servers:
                yield f"calls to {to!r}, which is none of the workload's servers"
            elif unknown and ":" in function and not function.startswith(_SERVED):
                yield f"{function!r} on {to or 'any server'!r}"


def _called(node: Node) -> tuple[str, str]:
    """Return server and function of a remote call, or of the push of its gradient; the server empty if not constant."""
    if node.target in TRACKERS:
        _, to, function, *_ = node.args
    elif node.target in CALLS_BY_NAME:
        to, function = node.args[:2]
    else:
        return "", ""
    return to if isinstance(to, str) else "", function if isinstance(function, str) else ""


def _owners(module: GraphModule) -> Iterator[str]:
    """Yield the servers that own the objects behind RRefs which a model holds."""
    for each in module.modules():
        for value in vars(each).values():
            if isinstance(value, rpc.PyRRef):
                yield value.owner_name()
