"""Give sections of local work to a compiler, which compiles them where the module runs."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import getitem

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.gradients import respects_no_grad
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import Storage
from fxlib.analysis.layers import Steadiness
from fxlib.analysis.operators.arguments import arguments_of
from fxlib.analysis.operators.operator_tables import QUERIES, in_all_forms
from fxlib.analysis.operators.schemas import attribute
from fxlib.errors import PassError
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import arrange
from fxlib.passes.infra.introduced import NOTHING
from fxlib.reasons import Declined, Reason
from fxlib.runtime import int8
from fxlib.runtime.attributes import read_attribute
from fxlib.runtime.backends import BACKENDS, installed
from fxlib.runtime.lookups import Lookup, lookup_of
from fxlib.runtime.lowering import ASSERTION, BACKEND, inputs_and_results
from fxlib.runtime.ops.registry import OPERATORS
from fxlib.runtime.submodules import submodule

_OURS = frozenset(each.function for each in OPERATORS)
_BY_VALUE = frozenset(
    {"nonzero", "masked_select", "unique", "unique_consecutive", "item", "tolist", "argwhere", "where"}
)
"""Names of operators whose results are numbers, or have sizes, that depend on values; `where` has one such form."""
_BY_SIZES = frozenset({"select", "narrow"})
"""Names of operators that raise by the sizes of their tensor and by numbers, and by nothing else."""
_DIVISIONS = in_all_forms("floordiv truediv mod floor_divide remainder fmod div divide")
_MOVABLE = (Part.LOCAL, Part.STATE)
"""The parts that nodes play which may change places where their dependencies allow it."""
_LARGEST_TABLE = 128 << 20
"""Size in bytes of the largest table that is compiled into a part: it is in memory twice then, to read a few rows."""
_DROPOUT = nn.modules.dropout._DropoutNd


@register_pass("lower", preserves="tolerance", introduces=NOTHING, version="2")
class Lower(GraphPass):
    """Give local work to a compiler: each section between two calls, blocks or opaque callables is one part.

    No node leaves the stretch between two calls in which it stands, so no part ties work before a wait to work behind
    it. Within one, where that joins parts, nodes that no part can have come first, as a gather does, which raises for
    some values; and weights are read just before they are used, which makes them the part's own. A part may look rows
    up by ids that it is given: these are checked before it runs, and for an id that is no row the program itself runs.
    Compiled code does not travel: the worker compiles parts for its trial, the launcher for its own run, on the first
    forward of each kind of inputs. A part that cannot be compiled, or not by the version of the compiler that was
    measured, runs uncompiled, with a warning.
    The pass must come last: a node that a later pass moves between the nodes of a part divides the part.
    """

    backend: str = "inductor"
    """The compiler: "inductor" (training, too), "inductor_freezing", "openvino" or "onnxruntime"; the last three store
    the weights, and so are for modules in eval mode, without gradients, whose weights do not change."""
    least_nodes: int = 3
    """Minimum number of operators in a part; calling a smaller part costs more than it gains."""

    def __post_init__(self) -> None:
        """Check that the backend exists.

        Raises:
            ValueError: no backend has that name.
        """
        if self.backend not in BACKENDS:
            raise ValueError(f"no backend is called {self.backend!r}; there are {', '.join(BACKENDS)}")

    @override
    def requires(self, module: GraphModule) -> None:
        if not installed(self.backend):
            package = BACKENDS[self.backend].package
            raise PassError(f"{self.backend} is not installed where passes run", hint=f"pip install {package}")
        if BACKENDS[self.backend].keeps_weights and module.training:
            problem = f"{self.backend} needs a module in eval mode"
            raise PassError(problem, where=self.name, hint="Call module.eval() before capture.")

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        keeps_weights = BACKENDS[self.backend].keeps_weights
        found = _Search(module, context.get(Effects), keeps_weights=keeps_weights)
        if found.blocked is not None:
            first = next(iter(module.graph.nodes))
            return PassResult(module, changes=0, declined=(Declined(node=first.name, reason=found.blocked),))
        parts = self._parts(found)
        before = list(module.graph.nodes)
        if keeps_weights and (order := found.joined(context.get(Dependencies))) != before:
            arrange(order)
            joined = _Search(module, context.get(Effects), keeps_weights=True)
            if _is_better(after := self._parts(joined), parts):
                found, parts = joined, after
            else:
                arrange(before)
        brought = bool(parts) and found.bring_weights()
        if brought:
            parts = self._parts(_Search(module, context.get(Effects), keeps_weights=keeps_weights))
        for node in itertools.chain(*parts):
            node.meta[BACKEND] = installed(self.backend)
        return PassResult(module, changes=len(parts) or int(brought))

    def _parts(self, search: _Search) -> list[Sequence[Node]]:
        """Return the parts that are large enough."""
        return [each for each in search.parts() if _operators_in(each) >= self.least_nodes]


class _Search:
    """Finds the sections of a program that can be given to a compiler."""

    def __init__(self, module: GraphModule, effects: Effects, *, keeps_weights: bool) -> None:
        self._module, self._effects = module, effects
        self._steadiness = Steadiness(module, effects) if keeps_weights else None
        self._writers = defaultdict[int, set[Node]](set)
        """The nodes that write to memory, by its alias class."""
        for node, does in zip(effects.nodes, effects.per_node, strict=True):
            for each in () if self._writes_nothing(node) else does.writes:
                if isinstance(each, Storage):
                    self._writers[each.alias_class].add(node)
        self.blocked = Reason.MODE_BLOCKS if keeps_weights and not respects_no_grad(module) else None

    def bring_weights(self) -> bool:
        """Have operators that a part may take read their weights just before they run; return whether any did not.

        An exported graph reads all weights at its start. A part would get them as inputs, which no compiler packs.
        """
        graph, brought = self._module.graph, False
        for node in self._effects.nodes:
            if node.op == "get_attr" or not self._takes(node):
                continue
            ids = None if (lookup := self._lookup(node)) is None else lookup.ids
            for weight in node.all_input_nodes:
                if weight is ids or weight.op != "get_attr" or weight in _attributes_before(node):
                    continue
                if self._takes_weight(weight):
                    with graph.inserting_before(node):
                        node.replace_input_with(weight, graph.node_copy(weight))
                    if not weight.users:
                        graph.erase_node(weight)
                    brought = True
        return brought

    def joined(self, dependencies: Dependencies) -> Sequence[Node]:
        """Return the nodes in an order that joins parts, where there are any to join.

        Between two nodes that are neither local nor weights, those that no part takes come as early as all that they
        depend on, and what none of them depends on comes last.
        """
        nodes, behaviours = self._effects.nodes, self._effects.behaviours
        order: list[int] = []
        for may_move, stretch in itertools.groupby(range(len(nodes)), lambda at: behaviours[at].part in _MOVABLE):
            positions = list(stretch)
            order.extend(self._sorted(positions, dependencies) if may_move else positions)
        return [nodes[at] for at in order]

    def _sorted(self, stretch: Sequence[int], dependencies: Dependencies) -> list[int]:
        """Return the positions of a stretch: first what is needed outside of parts, then all others."""
        within = set(stretch)
        sources = {at: {each for each in dependencies.sources(at) if each in within} for at in stretch}
        early = self._needed_outside_of_parts(stretch, sources)
        first = self._in_long_runs([at for at in stretch if at in early], sources)
        return [*first, *(at for at in stretch if at not in early)]

    def _needed_outside_of_parts(self, stretch: Sequence[int], sources: Mapping[int, set[int]]) -> set[int]:
        """Return the positions of nodes that no part takes, of ids by which parts look rows up, and of all before."""
        nodes, index = self._effects.nodes, self._effects.index
        found = {at for at in stretch if not self._is_of_a_part(nodes[at])}
        found |= {index[each.ids] for at in stretch if (each := self._lookup(nodes[at])) is not None} & sources.keys()
        for at in reversed(stretch):
            if at in found:
                found |= sources[at]
        return found

    def _in_long_runs(self, stretch: Sequence[int], sources: Mapping[int, set[int]]) -> list[int]:
        """Return positions in an order in which those of parts are in runs that are as long as their sources allow."""
        left = {at: set(sources[at]) for at in stretch}
        users = defaultdict[int, list[int]](list)
        for at, before in left.items():
            for each in before:
                users[each].append(at)
        ready: tuple[list[int], list[int]] = ([], [])
        order: list[int] = []
        for at in stretch:
            if not left[at]:
                ready[self._is_of_a_part(self._effects.nodes[at])].append(at)
        takes = False
        while ready[0] or ready[1]:
            if not ready[takes]:
                takes = not takes
            at = heapq.heappop(ready[takes])
            order.append(at)
            for each in users[at]:
                left[each].discard(at)
                if not left[each]:
                    heapq.heappush(ready[self._is_of_a_part(self._effects.nodes[each])], each)
        return order

    def _is_of_a_part(self, node: Node) -> bool:
        """Return whether a part may take a node; a weight goes with the nodes that use it."""
        return self._takes(node) and (node.op != "get_attr" or all(map(self._takes, node.users)))

    def parts(self) -> Iterator[Sequence[Node]]:
        """Yield sections of adjacent nodes, without any node that would have to be removed again."""
        part: list[Node] = []
        for node in self._effects.nodes:
            if self._takes(node):
                part.append(node)
            else:
                yield from self._divided(part)
                part = []
        yield from self._divided(part)

    def _divided(self, part: Sequence[Node]) -> Iterator[Sequence[Node]]:
        """Yield a section, or what is left of it if some of its nodes cannot be in the part that it would form."""
        if not part:
            return
        misfits = self._misfits(part)
        if not misfits:
            yield part
            return
        rest: list[Node] = []
        for node in part:
            if node in misfits:
                yield from self._divided(rest)
                rest = []
            else:
                rest.append(node)
        yield from self._divided(rest)

    def _misfits(self, part: Sequence[Node]) -> set[Node]:
        """Return the nodes that must be left out.

        Values used behind a part have memory of their own, since the compiler allocates it, and nothing writes to it
        there: autograd may have saved other memory than it would have. A part writes only to memory that it has made,
        and looks rows up by ids that it is given.
        """
        taken, used = inputs_and_results(part)
        aliases, inside = self._effects.aliases, set(part)
        foreign = {aliases.of(each) for each in taken} | aliases.outside()
        seen = set(foreign)
        found = inside.intersection(each.ids for each in map(self._lookup, part) if each is not None)
        for node in used:
            memory = aliases.of(node)
            if node.op == "get_attr" or memory in seen or _is_plain(node) or not self._writers[memory] <= inside:
                found.add(node)
            seen.add(memory)
        # Without one of its parts, what an operator returns would leave as a whole, and be no tensor.
        wholes = [each.all_input_nodes[0] for each in found if each.target is getitem]
        found |= inside.intersection(wholes)
        return found.union(*(self._writers[memory] & inside for memory in foreign))

    def _takes(self, node: Node) -> bool:
        if node.op == "get_attr":
            return self._takes_weight(node)
        behaviour, does = self._effects.behaviours[self._effects.index[node]], self._effects[node]
        operator = behaviour.operator
        if (
            behaviour.part is not Part.LOCAL
            or operator is None
            or node.target in _OURS
            or int8.is_operator(node.target)
        ):
            return False
        rests = self._rests(node)
        if not all(isinstance(each, Storage) for each in does.writes) and not rests:
            return False
        if operator.reduces or operator.joins or ((operator.random or operator.written_state) and not rests):
            return False
        name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", ""))
        name = name.partition(".")[0]
        safe = _divides_by_literal(node, name) or _raises_by_sizes(node, name) or node.target is ASSERTION
        safe = safe or self._lookup(node) is not None
        if (operator.raises and not safe) or name in _BY_VALUE:
            return False
        weights = operator.state
        return self._steadiness is None or not weights or self._steadiness.refusal(node, weights) is None

    def _lookup(self, node: Node) -> Lookup | None:
        """Return the lookup that a node is, if a part may take it; None if it is none."""
        found = None if self._steadiness is None else lookup_of(self._module, node)
        if found is None or found.table.nbytes > _LARGEST_TABLE:
            return None
        return found if found.weight is None or self._takes_weight(found.weight) else None

    def _takes_weight(self, node: Node) -> bool:
        target = str(node.target)
        held = attribute(self._module, target)
        if not isinstance(held, torch.Tensor) or held.layout is not torch.strided:
            return False
        root, is_deep, _ = target.partition(".")
        if root in vars(self._module) and is_deep:
            return False  # a part has tables of modules, and no other objects of the root
        if self._steadiness is None:
            return root not in vars(self._module)  # nothing would show that a plain tensor was replaced
        return self._steadiness.refusal(node, (held,)) is None

    def _writes_nothing(self, node: Node) -> bool:
        """Return whether a node is in eval mode that would otherwise write only to its statistics."""
        operator = self._effects.behaviours[self._effects.index[node]].operator
        return operator is not None and not operator.writes and self._rests(node)

    def _rests(self, node: Node) -> bool:
        """Return whether a node that could draw or update statistics does not: its flags are capture conditions."""
        if node.op == "call_module":
            called = submodule(self._module, str(node.target))
            return isinstance(called, (_DROPOUT, _NormBase)) and not called.training
        return node.op == "call_function" and arguments_of(node).get("training") is False


def _operators_in(part: Iterable[Node]) -> int:
    return sum(node.op != "get_attr" for node in part)


def _is_better(parts: Sequence[Sequence[Node]], before: Sequence[Sequence[Node]]) -> bool:
    """Return whether parts have more operators than before, or are fewer, and the largest is no smaller."""
    sizes, sizes_before = (list(map(_operators_in, each)) for each in (parts, before))
    if not sizes or sum(sizes) > sum(sizes_before):
        return bool(sizes)
    return len(sizes) < len(sizes_before) and max(sizes) >= max(sizes_before)


def _attributes_before(node: Node) -> Iterator[Node]:
    """Yield the nodes immediately before one that read attributes."""
    before = node.prev
    while before.op == "get_attr":
        yield before
        before = before.prev


def _divides_by_literal(node: Node, name: str) -> bool:
    """Return whether a node divides by a literal number, and so raises for no value, as in `size // 2`."""
    return name in _DIVISIONS and len(node.args) == 2 and isinstance(node.args[1], (int, float)) and node.args[1] != 0


def _raises_by_sizes(node: Node, name: str) -> bool:
    """Return whether a node raises for some sizes alone: a part is compiled for sizes for which its nodes have run."""
    numbers = (*node.args[1:], *node.kwargs.values())
    return name in _BY_SIZES and all(type(each) is int for each in numbers)


def _is_plain(node: Node) -> bool:
    """Return whether a node's value may be something other than a tensor."""
    return node.target in QUERIES or node.target in (getattr, read_attribute)
