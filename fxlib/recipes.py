"""Named lists of passes, and how they are applied to a module."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal

from torch.fx import Graph, GraphModule, Node

from fxlib.analysis.resources import contract_of_call, function_name, names_a_function
from fxlib.contracts import PURE, Contract
from fxlib.errors import FxlibWarning, PassError
from fxlib.passes import REGISTRY, DeadCode, FoldPairs, GraphPass, OverlapCalls, SplitCalls
from fxlib.passes.base import Preserves
from fxlib.passes.conduct import Conduct, call_name
from fxlib.reasons import Reason
from fxlib.result import CallReport, PassReport
from fxlib.runtime import CapturedModule, is_call, is_issue, ops
from fxlib.runtime.failure import program_order
from fxlib.switch import disabled

Assume = Literal["", "reads", "pure"]
_ASSUMED = {"reads": Contract(reads=frozenset({"*"})), "pure": PURE}
_WEAKEST: tuple[Preserves, ...] = ("lossy", "tolerance", "bitwise")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Passes, in the order in which they run."""

    name: str
    summary: str = ""
    passes: tuple[GraphPass, ...]

    @property
    def preserves(self) -> Preserves:
        """The weakest promise of its passes."""
        promises = {each.preserves for each in self.passes}
        return next((each for each in _WEAKEST if each in promises), "bitwise")

    @property
    def key(self) -> str:
        """Everything that decides what the recipe does: passes with their versions and options."""
        return "; ".join(f"{each.name}@{each.version}{_options(each)}" for each in self.passes)


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What a recipe made of a module, and what it has to say about it. `module` is the given one if nothing changed."""

    module: GraphModule
    changed: bool
    preserves: Preserves
    calls: tuple[CallReport, ...]
    passes: tuple[PassReport, ...]
    assumptions: tuple[str, ...]


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="schedule",
            summary="Issue remote calls early and wait for them late, so that they overlap with local work.",
            passes=(DeadCode(), SplitCalls(), OverlapCalls(), FoldPairs()),
        ),
    )
}


def get(name: str) -> Recipe:
    """Return the recipe called `name`.

    Raises:
        PassError: there is none.
    """
    if name not in RECIPES:
        raise PassError(f"no recipe is called {name!r}", hint=f"There are: {', '.join(RECIPES)}.")
    return RECIPES[name]


def from_passes(passes: Sequence[tuple[str, Mapping[str, object]]]) -> Recipe:
    """Make a recipe of passes given by name, with their options.

    Raises:
        PassError: a pass or an option is unknown, or an option has the wrong type.
    """
    made = tuple(_make(name, options) for name, options in passes)
    return Recipe(name="custom", summary=", ".join(each.name for each in made), passes=made)


def apply(
    module: GraphModule,
    recipe: str | Recipe = "schedule",
    *,
    contracts: Mapping[str, Contract] | None = None,
    assume: Assume = "",
) -> Rewrite:
    """Run a recipe on a copy of the module's graph; `module` itself is left as it is, and its state is shared.

    Args:
        module: a captured module, or any GraphModule.
        recipe: a recipe, or the name of one.
        contracts: what remote functions that declare nothing do, by name.
        assume: "reads" or "pure" for every remote function of which nothing is known after that.

    Raises:
        PassError: the recipe is unknown, a pass does not apply, or a pass broke its declaration.
    """
    recipe = get(recipe) if isinstance(recipe, str) else recipe
    with _collector_paused():
        return _apply(module, recipe, contracts or {}, assume)


def _apply(module: GraphModule, recipe: Recipe, contracts: Mapping[str, Contract], assume: Assume) -> Rewrite:
    working = _draft(module)
    assumptions = _annotate(working.graph, contracts, assume)
    reports: list[PassReport] = []
    calls: dict[str, CallReport] = {each.node: each for each in _unscheduled(working.graph)}
    conduct: Conduct | None = None
    for step in recipe.passes:
        run = step(working, conduct)
        working, conduct = run.result.module, run.conduct
        reports.append(run.report)
        calls |= {each.node: each for each in run.result.calls}
    changed = _differs(module.graph, working.graph)
    return Rewrite(
        module=_finished(working) if changed else module,
        changed=changed,
        preserves=recipe.preserves,
        calls=tuple(calls.values()),
        passes=tuple(reports),
        assumptions=assumptions,
    )


def optimize(
    graph: GraphModule,
    recipe: str | Recipe = "schedule",
    *,
    contracts: Mapping[str, Contract] | None = None,
    assume: Assume = "",
) -> GraphModule:
    """Apply a recipe in this process, unmeasured; the `Rewrite` is at `.meta["rewrite"]` of the module returned.

    Arguments and errors are those of `apply`. A graph that the recipe does not change comes back as it is, and so does
    every graph where the environment says FXLIB_DISABLE=1.
    """
    chosen = Recipe(name="disabled", passes=()) if disabled() else recipe
    rewrite = apply(graph, chosen, contracts=contracts, assume=assume)
    rewrite.module.meta["rewrite"] = rewrite
    return rewrite.module


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from walking a large graph again and again while a copy of it is made.

    It takes four tenths of the time otherwise.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _draft(module: GraphModule) -> GraphModule:
    """Return a module for passes to work on: a graph and tables of its own, the same parameters, and no code yet."""
    draft: GraphModule = type(module).__new__(type(module))
    type(draft).__name__ = type(module).__name__
    draft.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers", "_modules", "meta"):
        draft.__dict__[table] = copy.copy(module.__dict__[table])
    graph = Graph(tracer_cls=module.graph._tracer_cls)
    copied: dict[Node, Node] = {}
    for node in module.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph._codegen = copy.copy(module.graph._codegen)  # a deep copy warns of tree specs, which nobody changes
    _number(list(graph.nodes))
    draft.__dict__["_graph"] = graph
    return draft


def _number(nodes: Sequence[Node]) -> None:
    """Give every node its place in the program as captured, which is this very graph if no node knows its place."""
    known = any("order" in node.meta for node in nodes)
    order = program_order(nodes) if known else {node: place for place, node in enumerate(nodes)}
    for node in nodes:
        node.meta["order"] = order[node]


def _annotate(graph: Graph, contracts: Mapping[str, Contract], assume: Assume) -> tuple[str, ...]:
    """Give calls without a contract the one that the request has for them; return what is taken on its word."""
    declared, assumed = set(), set()
    _warn_of_vain(graph, contracts)
    for node in graph.nodes:
        if not names_a_function(node) or contract_of_call(node) is not None:
            continue
        name = function_name(node)
        if name in contracts:
            node.meta["contract"] = contracts[name]
            declared.add(f"{name}: {_words(contracts[name])}, as the request declares")
        elif assume:
            node.meta["contract"] = _ASSUMED[assume]
            assumed.add(f"{name}: {_words(_ASSUMED[assume])}, as the request assumes of every unknown function")
    return (*sorted(declared), *sorted(assumed))


def _warn_of_vain(graph: Graph, contracts: Mapping[str, Contract]) -> None:
    """Say which contracts, or which parts of them, are given in vain: silence would look like consent."""
    calls = [node for node in graph.nodes if names_a_function(node)]
    named = {function_name(node) for node in calls}
    open_ = {function_name(node) for node in calls if contract_of_call(node) is None}
    for name, contract in contracts.items():
        if name not in named:
            problem = "is not used: no remote call of the graph has this name"
        elif name in open_ and contract.gradient is not None:
            problem = f"names the gradient {contract.gradient!r}, which only capture can track: nothing will push it"
        else:
            continue
        warnings.warn(f"contracts[{name!r}] {problem}", FxlibWarning, stacklevel=5)


def _words(contract: Contract) -> str:
    if contract.pure:
        return "touches no state"
    parts = [("reads", contract.reads), ("writes", contract.writes)]
    return " and ".join(f"{verb} {', '.join(sorted(names))}" for verb, names in parts if names) or "declares no state"


def _unscheduled(graph: Graph) -> Iterable[CallReport]:
    """What there is to say about each call before any pass has looked at it."""
    for node in graph.nodes:
        if is_call(node) or is_issue(node) or node.target is ops.create:
            yield CallReport(
                node=call_name(node),
                function=function_name(node),
                to=str(node.args[0]) if node.args else "",
                action="left_alone",
                reason=Reason.NOT_SCHEDULED,
                source=str(node.meta.get("source", "")),
            )


def _differs(before: Graph, after: Graph) -> bool:
    if len(before.nodes) != len(after.nodes):
        return True
    pairs = zip(before.nodes, after.nodes, strict=True)
    return any(
        (one.name, one.target, str(one.args)) != (other.name, other.target, str(other.args)) for one, other in pairs
    )


def _make(name: str, options: Mapping[str, object]) -> GraphPass:
    if name not in REGISTRY:
        raise PassError(f"no pass is called {name!r}", hint=f"There are: {', '.join(sorted(REGISTRY))}.")
    kind = REGISTRY[name]
    known = {each.name for each in fields(kind)}
    if unknown := sorted(options.keys() - known):
        hint = f"It has: {', '.join(sorted(known)) or 'none'}."
        raise PassError(f"has no option {unknown[0]!r}", where=name, hint=hint)
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise PassError(str(error), where=name) from error


def _options(step: GraphPass) -> str:
    return "".join(f" {each.name}={getattr(step, each.name)!r}" for each in fields(step))


def _finished(draft: GraphModule) -> CapturedModule:
    """Generate the code, once, and check the graph."""
    module = CapturedModule(draft, draft.graph)
    module.graph.lint()
    return module
