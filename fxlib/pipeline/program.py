"""Run the prologue of a graph as a function from a forward's arguments to those of the calls that may run ahead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.graph_module import _forward_from_src
from torch.utils import _pytree as pytree

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.prologue import CallAhead, Way, calls_ahead, ways
from fxlib.analysis.effects.resources import contract_of_call, function_name, may_run_here
from fxlib.analysis.operators.schemas import attribute
from fxlib.pipeline.unchanged import Noted, note
from fxlib.reasons import Reason
from fxlib.runtime import CapturedModule
from fxlib.runtime.ops.contract_lookup import contracts_by_name
from fxlib.runtime.ops.operators import limit_in_flight
from fxlib.spec.contract import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One of the values that a prologue starts from: an input, by its index, or a buffer, by its path."""

    input: int = -1
    path: str = ""


class Program:
    """The prologue of one captured module, valid as long as the module has the same graph.

    Attributes:
        module: the module.
        calls: the calls that may run ahead, in the order of the graph.
        sources: the values that any of them depends on.
        needs: for each call, the indices in `sources` of the values that it depends on.
        positions: for each call, its index among the nodes with the same operator.
        sizes: the size in bytes of each call's result, as far as forwards have observed it, by the index in `calls`.
        limits: the limits on messages and on bytes in flight to a server, if the graph has any.
        rechecks: whether opaque work in the forward may change what a call sends, before the call is made.
        contracts: the contracts that the graph states for functions, by name.
        methods: the contracts that it states for methods of the objects behind the module's RRefs, by these in words
            and by ".method".
        ways: the ways in which all of its calls can be made ahead, each call at most in this way.
        updates: whether the rows of a call that is read by keys may come with the state that their update needs.
    """

    def __init__(self, module: CapturedModule) -> None:
        self.module = module
        self.generated: Callable[..., Any] = module._program.generated
        found = calls_ahead(module)
        self.calls: tuple[CallAhead, ...] = tuple(each for each in found if each.way is not None)
        self.contracts: dict[str, Contract] = contracts_by_name(module.graph)
        self.methods = dict(_methods(module, self.calls))
        self.rechecks = _meets_others_code(module)
        self._inputs = list(module.graph.find_nodes(op="placeholder"))
        if any(str(node.target).startswith("*") for node in self._inputs):
            self.calls = ()
        self.ways = ways({each.way for each in self.calls if each.way is not None})
        by_keys = [each for call in self.calls if call.way is Way.BY_KEYS for each in call.contracts]
        self.updates = any(each is not None and each.with_state is not None for each in by_keys)
        indices: dict[Source, int] = {}
        self.needs = [
            [indices.setdefault(each, len(indices)) for each in self._sources_of(call)] for call in self.calls
        ]
        self.sources = list(indices)
        self.positions = [_position(call.node) for call in self.calls]
        self.sizes: dict[int, int] = {}
        self.limits: tuple[int | None, int | None] | None = None
        for node in module.graph.find_nodes(op="call_function", target=limit_in_flight):
            limits: Any = node.args
            self.limits = limits
        self._arguments_of = self._compiled() if self.calls else None

    def is_current(self) -> bool:
        """Whether the module still has the graph that this program was made from."""
        return self.module._program.generated is self.generated

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the inputs of the graph for arguments of the forward, in the order of its placeholders.

        Raises:
            TypeError: they are not arguments of this forward.
            ValueError: they are nested differently.
        """
        codegen = self.module.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            names, spec = codegen.pytree_info.orig_args, codegen.pytree_info.in_spec
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            positional = spec.child(0).num_children
            try:
                nested = (
                    tuple(given[name] for name in names[:positional]),
                    {name: given[name] for name in names[positional:]},
                )
            except KeyError as error:
                raise TypeError(f"the argument {error} is missing") from error
            return pytree.tree_leaves(nested)
        if not kwargs and len(args) == len(self._inputs):
            return list(args)
        bound = inspect.signature(self.generated).bind(self.module, *args, **kwargs)
        bound.apply_defaults()
        return list(bound.arguments.values())[1:]

    def noted(self, values: Sequence[Any]) -> list[Noted | None]:
        """Note each source as it is now; None stands for one whose later changes could not be detected."""
        return [note(self._value(each, values)) for each in self.sources]

    def unchanged(self, noted: Sequence[Noted | None], values: Sequence[Any]) -> list[bool]:
        """Return for each source whether it is still as it was noted."""
        return [
            was is not None and was.is_still(self._value(each, values))
            for each, was in zip(self.sources, noted, strict=True)
        ]

    def arguments(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """Run the prologue, and return the arguments of the operator of each call.

        Raises:
            Exception: whatever the prologue's local work raises.
        """
        if self._arguments_of is None:
            return ()
        found: tuple[tuple[Any, ...], ...] = self._arguments_of(self.module, *values)
        return found

    def _value(self, source: Source, values: Sequence[Any]) -> Any:
        return attribute(self.module, source.path) if source.path else values[source.input]

    def _sources_of(self, call: CallAhead) -> list[Source]:
        found = []
        for node in call.prologue:
            if node.op == "placeholder":
                found.append(Source(input=self._inputs.index(node)))
            elif node.op == "get_attr":
                found.append(Source(path=str(node.target)))
        return found

    def _compiled(self) -> Callable[..., Any]:
        needed = {node for call in self.calls for node in call.prologue}
        graph, made = Graph(), dict[Node, Node]()
        for index, node in enumerate(self.module.graph.nodes):
            if node.op == "placeholder":
                made[node] = graph.placeholder(f"input_{index}")
            elif node in needed:
                made[node] = graph.node_copy(node, made.__getitem__)
        arguments = [torch.fx.node.map_arg(call.node.args, made.__getitem__) for call in self.calls]
        graph.output(tuple(arguments))
        code = graph.python_code(root_module="self")
        run: Callable[..., Any] = _forward_from_src(code.src, code.globals)
        return run


def _meets_others_code(module: CapturedModule) -> bool:
    """Whether a graph holds code that may do anything to this process: opaque work, or calls that declare nothing."""
    effects = Effects.of(module)
    return any(
        does.fence is Reason.OPAQUE_NEIGHBOUR or (does.part in (Part.CALL, Part.ISSUE) and may_run_here(node))
        for node, does in zip(effects.nodes, effects.per_node, strict=True)
    )


def _methods(module: CapturedModule, calls: Iterable[CallAhead]) -> Iterator[tuple[tuple[str, str], Contract]]:
    for call in calls:
        to, contract = call.node.args[0], contract_of_call(call.node)
        if isinstance(to, Node) and to.op == "get_attr" and contract is not None:
            yield (str(attribute(module, str(to.target))), function_name(call.node)), contract


def _position(call: Node) -> int:
    """Return the index of a call among the nodes of its operator."""
    return call.graph.find_nodes(op="call_function", target=call.target).index(call)
