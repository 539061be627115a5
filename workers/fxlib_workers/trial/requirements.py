"""The requirements of a graph: code, remote functions, and objects behind RRefs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import rpc
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.process_groups import Groups, groups_of, own_code_in
from fxlib.analysis.effects.resources import contract_of_call, function_name
from fxlib.passes.infra.annotate import assumed_of
from fxlib.runtime.ops import calls
from fxlib.runtime.ops.registry import CREATIONS, FETCHES, TRACKERS, batched_by_of, is_batch, is_item, items_of
from fxlib.runtime.ops.timeline import call_name
from fxlib.runtime.submodules import graph_modules
from fxlib.spec.contract import Contract
from fxlib.spec.inputs import Batch
from fxlib.spec.workload import Workload
from fxlib.wire import OpaqueAttribute, OpaqueFunction, OpaqueModule

RRefs = Mapping[str, "rpc.RRef[Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """The requirements of graphs on the processes that run them.

    Attributes:
        opaque: a description of code that only the job has.
        functions: remote functions, by server ("" if the graph does not name it).
        contracts: the contracts of remote functions and methods that the graphs know or the workload assumes, by
            "function#call", or by "function" if all its calls have the same one.
        created: the functions that make objects behind RRefs, each with the names of the calls that fetch the object.
        groups: the process groups of the graphs' collectives.
    """

    opaque: tuple[str, ...]
    functions: Mapping[str, tuple[str, ...]]
    contracts: Mapping[str, Contract]
    created: Mapping[str, tuple[str, ...]]
    groups: Groups


def requirements_of(modules: Iterable[GraphModule], workload: Workload) -> Requirements:
    """Return the requirements of the graphs that neither they nor the workload contain."""
    opaque: set[str] = set()
    functions: dict[str, set[str]] = {}
    stated: dict[str, dict[str, Contract | None]] = {}
    created: dict[str, set[str]] = {}
    pushes = workload.mode != "forward"  # without a backward, there is no gradient to push
    bodies = [found for module in modules for found in graph_modules(module)]
    for path, body in bodies:
        opaque.update(own_code_in(body))
        for node in body.graph.nodes:
            opaque.update(_opaque(body, node, () if path else workload.rrefs))
            for server, function in _functions(node) if pushes or node.target not in TRACKERS else ():
                functions.setdefault(server, set()).add(function)
            if node.target in CREATIONS:
                created.setdefault(str(node.args[1]), set()).update(fetches_of(node))
            contract = contract_of_call(node) or assumed_of(node, workload.assume)
            if node.target in TRACKERS:
                stated.setdefault(str(node.args[2]), {})[""] = contract
            elif _makes_call(node):
                stated.setdefault(function_name(node), {})[call_name(node)] = contract
    return Requirements(
        opaque=tuple(sorted(opaque)),
        functions={server: tuple(sorted(names)) for server, names in sorted(functions.items())},
        contracts=_by_name(stated),
        created={function: tuple(sorted(names)) for function, names in sorted(created.items())},
        groups=groups_of(body for _, body in bodies),
    )


def _makes_call(node: Node) -> bool:
    """Return whether the node makes or issues one call; in a batch, that is the wait for each of its calls."""
    return (
        is_item(node)
        or (not is_batch(node) and (calls.is_call(node) or calls.is_issue(node)))
        or node.target in CREATIONS
    )


def _by_name(stated: Mapping[str, Mapping[str, Contract | None]]) -> dict[str, Contract]:
    found = {
        f"{function}#{call}": contract
        for function, by_call in stated.items()
        for call, contract in by_call.items()
        if contract is not None
    }
    for function, by_call in stated.items():
        first, *others = by_call.values()
        if first is not None and all(each == first for each in others):
            found[function] = first
    return found


def fetches_of(creation: Node) -> tuple[str, ...]:
    """Return the names of the calls that fetch the object that a node creates."""
    return tuple(call_name(user) for user in creation.users if user.target in FETCHES)


class BoundModule:
    """A module with the RRefs that it takes as arguments; it is called with a batch."""

    def __init__(self, module: GraphModule, arguments: RRefs) -> None:
        self.module = module
        self._arguments = arguments
        names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
        self._names = [name for name in names if name not in arguments]

    def __call__(self, batch: Batch) -> object:
        """Run the forward."""
        if not self._arguments:
            return self.module(*batch.inputs, **batch.kwargs)
        return self.module(**self._by_name(batch))

    def arguments(self, batch: Batch) -> Batch | dict[str, object]:
        """Return the arguments of the forward for a batch, as `fxlib.pipeline` takes them."""
        return self._by_name(batch) if self._arguments else batch

    def _by_name(self, batch: Batch) -> dict[str, object]:
        inputs = dict(zip(self._names, batch.inputs, strict=False))
        return {**inputs, **batch.kwargs, **self._arguments}


def bind(module: GraphModule, rrefs: RRefs) -> BoundModule:
    """Set the RRefs that the graph reads as attributes, and bind those that it takes as arguments."""
    attributes = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    inputs = {str(node.target) for node in module.graph.nodes if node.op == "placeholder"}
    for name in attributes & rrefs.keys():
        path, _, attribute = name.rpartition(".")
        # Bypass `__setattr__`, which GraphModule and nn.Module reserve for state.
        vars(module.get_submodule(path))[attribute] = rrefs[name]
    # An input may have the name of an attribute, and then the name refers to the attribute.
    return BoundModule(module, {name: rref for name, rref in rrefs.items() if name in inputs - attributes})


def _opaque(module: GraphModule, node: Node, rrefs: Container[str]) -> Iterator[str]:
    target = node.target
    if isinstance(target, OpaqueFunction):
        yield f"function {target.slot!r}"
    elif node.op == "call_module" and isinstance(called := module.get_submodule(str(target)), OpaqueModule):
        yield f"module {target!r} of class {called.label}"
    elif node.op == "get_attr" and node.users and target not in rrefs and _is_opaque(module, str(target)):
        yield f"attribute {target!r}"


def _is_opaque(module: nn.Module, path: str) -> bool:
    found: object = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return isinstance(found, OpaqueAttribute)


def _functions(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the server and the function of a call, and of the push of its gradient."""
    if node.target in TRACKERS:
        _, to, function, *_ = node.args
    elif is_batch(node):
        to = node.args[0] if isinstance(node.args[0], str) else ""
        yield from ((to, each.function) for each in items_of(node))
        if isinstance(batched_by := batched_by_of(node), str):
            yield to, batched_by
        return
    elif calls.is_call(node) or calls.is_issue(node) or node.target in CREATIONS:
        to, function = (*node.args, "", "")[:2]
    else:
        return
    if isinstance(function, str) and ":" in function:
        yield (to if isinstance(to, str) else "", function)
