"""Finds the pass of a recipe that breaks a bound, and the first of its changes that does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node

from fxlib.capture.coerce import Model, as_graph, samples_of
from fxlib.equivalence.node_trace import Steps, follow, location_of_failure
from fxlib.equivalence.snapshot import CallArguments
from fxlib.equivalence.verify import Verification, batches_of, verify
from fxlib.errors import PassError
from fxlib.passes.infra.diff import by_name
from fxlib.recipes import recipes
from fxlib.recipes.recipes import PlanningRequest, Recipe
from fxlib.runtime import CapturedModule
from fxlib.runtime.guards.folded_weights import relies_on_weights
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Profile
from fxlib.spec.workload import Assume, Workload
from fxlib.utils.compare import Tolerance, difference
from fxlib.utils.text import location_of


@dataclass(frozen=True, kw_only=True)
class PassChange:
    """The first value that differs because of a pass, and the change that the pass made there.

    `where` names its node, module path and line of the model; `before` and `after` are lines of the generated code.
    """

    node: str
    where: str
    how: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        """Return the location, and the code there before and after the pass."""
        lines = [f"first at {self.where}: {self.how}"]
        if self.before == self.after:
            return "\n".join([*lines, *(f"    {line}" for line in self.after), "  the pass left this line as it was"])
        gone = [f"  - {line}" for line in self.before if line not in self.after]
        come = [f"  + {line}" for line in self.after if line not in self.before]
        moved = [f"  ~ {line}" for line in self.after if line in self.before]
        return "\n".join([*lines, *gone, *come, *moved])


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The first pass of a recipe after which the bound does not hold. `place` is its position, counted from 1."""

    name: str
    place: int
    error: str = ""
    """The error that the pass itself raised, if it did."""
    verification: Verification | None = None
    """The comparison of the given graph with the one after this pass; None if the pass raised."""
    change: PassChange | None = None
    """The first change that breaks the bound; None if no node's value or gradient differs beyond it by this pass
    alone."""
    diff: str = ""
    """All changes of the pass, as a unified diff of the generated code."""

    def __str__(self) -> str:
        """Return the pass, the differences, and the first change."""
        if self.verification is None:
            return f"pass {self.place}, {self.name}, raised: {self.error}"
        found = str(self.change or "no value of a node differs beyond the bound by this pass alone: see its diff")
        return f"pass {self.place}, {self.name}: {self.verification}\n{found}"


def bisect(
    model: Model,
    recipe: str | Recipe,
    inputs: Sequence[object],
    *,
    kwargs: Mapping[str, object] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    grad: bool | None = None,
    contracts: Mapping[str, Contract] | None = None,
    assume: Assume = "",
    profile: Profile | None = None,
    workload: Workload | None = None,
) -> Culprit | None:
    """Apply a recipe pass by pass, and find the first pass that breaks a bound, and inside it the first change.

    After each pass that changed something, the effects of its graph are compared with those of the given graph (see
    `fxlib.verify`). The graphs before and after the pass that breaks the bound are then run node by node: the first
    value that differs beyond the bound leads to the change, through the new nodes behind it and the writes to memory
    that it reads. If no value differs, the gradients of values are compared, in the order of backward, and then the
    nesting and layout of results. The search needs no information from the pass, and the memory of two copies of all
    values of a run.

    Args:
        model: a module, captured or not, a graph of torch.fx, or an exported program.
        recipe: a recipe, or the name of one.
        inputs: the arguments of a call.
        kwargs: its keyword arguments.
        rtol: as for `verify`; by default, the bits must be the same.
        atol: as for `verify`.
        grad: whether to compare gradients, too; by default, if the rewritten graph has them.
        contracts: this and the following arguments are for the passes, as for `fxlib.optimize`.
        assume: as for `fxlib.optimize`.
        profile: as for `fxlib.optimize`.
        workload: as for `fxlib.optimize`.

    Returns:
        The pass and its change; None if the bound holds after every pass.

    Raises:
        CaptureError: the model cannot be captured.
        PassError: the recipe is unknown, `inputs` is a single tensor, or the graph itself does not run on the inputs.
    """
    recipe = recipes.get(recipe)
    tolerance, (batch,) = Tolerance(rtol=rtol, atol=atol), batches_of(inputs, kwargs=kwargs)
    known = {**({} if workload is None else workload.contracts), **(contracts or {})}
    graph = as_graph(model, samples_of(inputs, kwargs), contracts=known)
    request = PlanningRequest(contracts=contracts or {}, assume=assume, profile=profile, workload=workload)
    _check_runs(graph, batch, grad=bool(grad))
    before = graph
    for place, step in enumerate(recipe.passes, start=1):
        prefix = replace(recipe, passes=recipe.passes[:place])
        try:
            rewrite = prefix.run(graph, request)
        except PassError as error:
            return Culprit(name=step.name, place=place, error=str(error))
        after = rewrite.module
        if not rewrite.passes[-1].changes:
            continue
        asked = not relies_on_weights(after.graph) if grad is None else grad
        with _alone(graph, after):
            found = verify(graph, after, inputs, kwargs=kwargs, rtol=rtol, atol=atol, grad=asked)
        if not found:
            one, other = (follow(each, batch, grad=asked) for each in (before, after))
            change = _Trail(before.graph, after.graph, one, other, tolerance).change()
            diff = prefix.run(graph, request, diffs=True).passes[-1].diff
            return Culprit(name=step.name, place=place, verification=found, change=change, diff=diff)
        before = after
    return None


def _check_runs(graph: GraphModule, batch: CallArguments, *, grad: bool) -> None:
    steps = follow(graph, batch, grad=grad)
    if steps.error is not None:
        raise PassError(
            f"the graph does not run on these inputs: {type(steps.error).__name__}: {steps.error}",
            where=location_of_failure(graph, (batch,), steps.error, grad=grad),
            hint="Pass the arguments of one call, as the model takes them.",
        ) from steps.error


@contextmanager
def _alone(*modules: GraphModule) -> Iterator[None]:
    """Make captured modules run their graphs, whatever would make them run their originals."""
    held = [each._fxlib for each in modules if isinstance(each, CapturedModule)]
    before = [(each.original, each.mirror) for each in held]
    for each in held:
        each.original = each.mirror = None
    try:
        yield
    finally:
        for each, (original, mirror) in zip(held, before, strict=True):
            each.original, each.mirror = original, mirror


@dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    nodes: dict[str, Node]
    lines: dict[str, str]
    steps: Steps

    @classmethod
    def of(cls, graph: Graph, steps: Steps) -> _Side:
        return cls(nodes={node.name: node for node in graph.nodes}, lines=by_name(graph), steps=steps)

    def listing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the lines of some nodes, in program order."""
        wanted = [self.nodes[name] for name in self.nodes.keys() & set(names)]
        in_order = sorted(wanted)
        return tuple(self.lines.get(node.name) or node.format_node() or node.name for node in in_order)


class _Trail:
    """Two graphs, one run of each, and the way from the first value that differs to the change of the pass."""

    def __init__(self, before: Graph, after: Graph, one: Steps, other: Steps, tolerance: Tolerance) -> None:
        self._before, self._after = _Side.of(before, one), _Side.of(after, other)
        self._tolerance = tolerance

    def change(self) -> PassChange | None:
        return self._by_value() or self._by_error() or self._by_gradient() or self._by_form()

    def _by_value(self) -> PassChange | None:
        ours, theirs = self._before.steps.values, self._after.steps.values
        for name, values in theirs.items():
            if name not in ours:
                continue
            how = f"{len(ours[name])} values and {len(values)}" if len(ours[name]) != len(values) else ""
            found = (difference(one, other, self._tolerance) for one, other in zip(ours[name], values, strict=False))
            if how := how or next(filter(None, found), ""):
                return self._found(name, how, self._sources)
        return None

    def _by_error(self) -> PassChange | None:
        failed, error = self._after.steps.failed, self._after.steps.error
        if failed is None:
            return None
        return self._found(failed.name, f"{type(error).__name__}: {error}", self._sources)

    def _by_gradient(self) -> PassChange | None:
        ours, theirs = self._before.steps.gradients, self._after.steps.gradients
        for name in reversed(self._after.nodes):
            if name not in self._before.nodes or (name not in ours and name not in theirs):
                continue
            if how := difference(ours.get(name), theirs.get(name), self._tolerance):
                return self._found(name, f"its gradient: {how}", _users)
        return None

    def _by_form(self) -> PassChange | None:
        ours, theirs = self._before.steps.forms, self._after.steps.forms
        for name in self._after.nodes:
            one, other = ours.get(name), theirs.get(name)
            if one is not None and other is not None and one != other:
                where = next(each for each in one | other if one.get(each) != other.get(each))
                how = f"{where.strip()}: {one.get(where, 'nothing')} and {other.get(where, 'nothing')}"
                return self._found(name, how, self._sources)
        return None

    def _found(self, name: str, how: str, region: Callable[[_Side, str, _Side], set[str]]) -> PassChange:
        before, after = region(self._before, name, self._after), region(self._after, name, self._before)
        node = self._after.nodes[name]
        return PassChange(
            node=name,
            where=location_of(node),
            how=how,
            before=self._before.listing(before),
            after=self._after.listing(after),
        )

    def _sources(self, side: _Side, name: str, other: _Side) -> set[str]:
        """Return the node and the new nodes that it depends on; or else the nodes that also wrote to what it reads."""
        region, ahead = {name} & side.nodes.keys(), [name] if name in side.nodes else []
        while ahead:
            for given in side.nodes[ahead.pop()].all_input_nodes:
                if given.name not in other.nodes and given.name not in region:
                    region.add(given.name)
                    ahead.append(given.name)
        if side.lines.get(name) == other.lines.get(name):
            ours, theirs = (set(each.steps.writers_before(name)) for each in (side, other))
            rewritten = {each for each in ours & theirs if side.lines.get(each) != other.lines.get(each)}
            region |= ((ours ^ theirs) | rewritten) & side.nodes.keys()
        return region


def _users(side: _Side, name: str, _: _Side) -> set[str]:
    return {name, *(user.name for user in side.nodes[name].users if user.op != "output")}
