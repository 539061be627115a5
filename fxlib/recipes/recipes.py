"""Named lists of passes, and how they are applied to a module."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from torch.fx import Graph, GraphModule

from fxlib.analysis.effects.resources import function_name, speaks_to
from fxlib.capture.api import collector_paused
from fxlib.capture.capture_variant import capture_variant, mode_of
from fxlib.capture.coerce import Model, as_graph
from fxlib.config import disabled
from fxlib.errors import CaptureError, PassError
from fxlib.passes import (
    REGISTRY,
    Bfloat16,
    ChannelsLast,
    CoalesceCalls,
    CoalesceWrites,
    CommonSubexpressions,
    DeadCode,
    FoldConstants,
    FoldNorms,
    FoldPairs,
    GraphPass,
    MergeReads,
    OverlapCalls,
    Quantize,
    SendGradients,
    SplitCalls,
)
from fxlib.passes.infra.annotate import annotate
from fxlib.passes.infra.base import Context, Invariants, Preserves
from fxlib.passes.infra.diff import code_of, diff_of
from fxlib.passes.infra.edit import differs, working_copy
from fxlib.reasons import Reason
from fxlib.recipes.grad_mode import as_forwards_run
from fxlib.runtime import CapturedModule, is_call, is_issue
from fxlib.runtime.guards.folded_weights import relies_on_weights
from fxlib.runtime.ops.registry import CREATIONS
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.contract import Contract
from fxlib.spec.profile import Profile
from fxlib.spec.report import CallReport, PassReport
from fxlib.spec.workload import Assume, Workload

_LOG = logging.getLogger(__name__)

_WEAKEST: tuple[Preserves, ...] = ("lossy", "tolerance", "bitwise")


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """The facts known about a program besides its graph, and the assumptions that a rewrite may make."""

    contracts: Mapping[str, Contract] = field(default_factory=dict)
    """Contracts of remote functions that declare nothing, by name."""
    assume: Assume = ""
    """The effect of every remote function that is still unknown after that: "reads" or "pure"."""
    profile: Profile | None = None
    """A measurement of the program; without one, passes that plan use estimates."""
    workload: Workload | None = None
    """A description of its steps, if there is one: passes leave alone what such a step rules out."""
    max_relative_error: float | None = None
    """The largest relative error allowed for a lossy pass; None: there is no bound."""

    @classmethod
    def of(cls, workload: Workload, profile: Profile | None = None) -> PlanningRequest:
        """Return the request of a job, whose workload states contracts and assumptions."""
        return cls(contracts=workload.contracts, assume=workload.assume, profile=profile, workload=workload)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Passes, in the order in which they run. A recipe is a value: only its `run` runs it."""

    name: str
    summary: str = ""
    passes: tuple[GraphPass, ...]

    @property
    def preserves(self) -> Preserves:
        """The weakest promise of its passes."""
        promises = {each.promise for each in self.passes}
        return next((each for each in _WEAKEST if each in promises), "bitwise")

    @property
    def key(self) -> str:
        """Everything that decides what the recipe does: passes with their versions and options."""
        return "; ".join(f"{each.name}@{each.version}{_options(each)}" for each in self.passes)

    def run(self, module: GraphModule, request: PlanningRequest | None = None, *, diffs: bool = False) -> Rewrite:
        """Run the passes on a copy of the module's graph; `module` itself stays unchanged, and its state is shared.

        Args:
            module: a captured module, or any GraphModule.
            request: what is known about the program; None: nothing but its graph.
            diffs: whether each pass's report shows its changes to the generated code.

        Raises:
            PassError: a pass does not apply, or broke its declaration.
        """
        request = PlanningRequest() if request is None else request
        with collector_paused():  # it would walk a large graph again and again, for four tenths of the time
            return _rewrite(module, self, request, diffs=diffs)


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """The module that a recipe made, with its reports. `module` is the given one if nothing changed."""

    module: GraphModule
    changed: bool
    preserves: Preserves
    calls: tuple[CallReport, ...]
    passes: tuple[PassReport, ...]
    assumptions: tuple[str, ...]


_FOLD: tuple[GraphPass, ...] = (FoldNorms(), FoldConstants(bitwise=False))
_SCHEDULE: tuple[GraphPass, ...] = (
    DeadCode(),
    SplitCalls(),
    SendGradients(),
    MergeReads(),
    CoalesceCalls(),
    CoalesceWrites(),
    OverlapCalls(),
    FoldPairs(),
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="schedule",
            summary="Issue remote calls early and wait for them late, so that they overlap with local work.",
            passes=_SCHEDULE,
        ),
        Recipe(
            name="training",
            summary="Compute equal values once, and schedule remote calls; bit for bit, gradients included.",
            passes=(CommonSubexpressions(), *_SCHEDULE),
        ),
        Recipe(
            name="inference",
            summary="Fold norms and constants into weights, compute equal values once, lay convolutions out channels "
            "last, and schedule remote calls; for a module in eval mode, and without gradients.",
            passes=(*_FOLD, CommonSubexpressions(), ChannelsLast(), *_SCHEDULE),
        ),
        Recipe(
            name="auto",
            summary="Try the other recipes and the launcher's compilers, as far as the request allows; by itself, the "
            "same as training.",
            passes=(CommonSubexpressions(), *_SCHEDULE),
        ),
        Recipe(
            name="int8",
            summary="Fold norms and constants into weights, run linear layers and convolutions on int8 weights within "
            "the error that the request allows, and schedule remote calls; for a module in eval mode, and without "
            "gradients.",
            passes=(*_FOLD, ChannelsLast(), Quantize(), CommonSubexpressions(), *_SCHEDULE),
        ),
        Recipe(
            name="bfloat16",
            summary="Fold norms and constants into weights, run linear layers and convolutions in bfloat16, and "
            "schedule remote calls; for a module in eval mode, without gradients, and for processors with AMX or "
            "AVX512 for bfloat16.",
            passes=(*_FOLD, ChannelsLast(), Bfloat16(), CommonSubexpressions(), *_SCHEDULE),
        ),
    )
}


def get(name: str | Recipe) -> Recipe:
    """Return the recipe called `name`; a recipe itself is returned unchanged.

    Raises:
        PassError: there is no such recipe.
    """
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        raise PassError(f"no recipe is called {name!r}", hint=f"There are: {', '.join(RECIPES)}.")
    return RECIPES[name]


def from_passes(passes: Sequence[tuple[str, Mapping[str, object]]]) -> Recipe:
    """Make a recipe from passes given by name, with their options.

    Raises:
        PassError: a pass or an option is unknown, an option has the wrong type, or something is no name with options.
    """
    if not isinstance(passes, (tuple, list)) or not all(map(_is_named_pass, passes)):
        hint = 'Give pairs of a name and a mapping: [("dead_code", {})].'
        raise PassError(f"{passes!r} is no list of passes with their options", hint=hint)
    made = tuple(_make(name, options) for name, options in passes)
    return Recipe(name="custom", summary=", ".join(each.name for each in made), passes=made)


def apply(
    module: GraphModule,
    recipe: str | Recipe = "schedule",
    *,
    contracts: Mapping[str, Contract] | None = None,
    assume: Assume = "",
    profile: Profile | None = None,
    workload: Workload | None = None,
    diffs: bool = False,
) -> Rewrite:
    """Run a recipe, given itself or by name, as `Recipe.run` does.

    Args:
        module: a captured module, or any GraphModule.
        recipe: a recipe, or the name of one.
        contracts: this and the next three arguments form the `PlanningRequest`.
        assume: see there.
        profile: see there.
        workload: see there.
        diffs: whether each pass's report shows its changes to the generated code.

    Raises:
        PassError: the recipe is unknown, a pass does not apply, or a pass broke its declaration.
    """
    request = PlanningRequest(contracts=contracts or {}, assume=assume, profile=profile, workload=workload)
    return get(recipe).run(module, request, diffs=diffs)


def _rewrite(module: GraphModule, recipe: Recipe, request: PlanningRequest, *, diffs: bool) -> Rewrite:
    bound = request.max_relative_error
    context = Context(module, profile=request.profile, workload=request.workload, max_relative_error=bound)
    working = working_copy(module)
    assumptions = annotate(working.graph, request.contracts, request.assume)
    reports: list[PassReport] = []
    calls: dict[str, CallReport] = {each.node: each for each in _unscheduled(working.graph)}
    invariants: Invariants | None = None
    code = code_of(working.graph) if diffs else []
    for step in recipe.passes:
        run = step(working, context, before=invariants)
        working, invariants = run.result.module, run.invariants
        before, code = code, code_of(working.graph) if diffs else []
        reports.append(replace(run.report, diff=diff_of(before, code, name=step.name)))
        calls |= {each.node: each for each in run.result.calls}
    changed = differs(module, working)
    _LOG.debug("recipe %s %s a graph of %d calls", recipe.name, "changed" if changed else "left", len(calls))
    return Rewrite(
        module=_finished(working, module) if changed else module,
        changed=changed,
        preserves=recipe.preserves,
        calls=tuple(calls.values()),
        passes=tuple(reports),
        assumptions=assumptions,
    )


def optimize(
    model: Model,
    recipe: str | Recipe = "schedule",
    *,
    contracts: Mapping[str, Contract] | None = None,
    assume: Assume = "",
    profile: Profile | None = None,
    workload: Workload | None = None,
) -> GraphModule:
    """Apply a recipe in this process, unmeasured; the `Rewrite` is at `.meta["rewrite"]` of the returned module.

    A graph that the recipe does not change is returned unchanged, and so is every graph if the environment sets
    FXLIB_DISABLE=1. If the workload has variants, each is captured, and the returned module runs a variant's rewritten
    graph for the calls that it fits (`fxlib.usage` counts them).

    Args:
        model: a module, captured or not, a graph of torch.fx, or an exported program. A model that is not a graph is
            captured; one that cannot be traced is exported with the workload's batches. If the workload says that only
            forwards run, there is no profile, and passes use the values of weights, it is captured as forwards run.
        recipe: a recipe, or the name of one.
        contracts: see `PlanningRequest`.
        assume: see `PlanningRequest`.
        profile: see `PlanningRequest`.
        workload: see `PlanningRequest`.

    Raises:
        CaptureError: the model, or a variant of the workload, cannot be captured.
        PassError: as for `apply`.
    """
    known = {**({} if workload is None else workload.contracts), **(contracts or {})}
    graph = as_graph(model, () if workload is None else workload.samples, contracts=known)
    request = PlanningRequest(contracts=contracts or {}, assume=assume, profile=profile, workload=workload)
    chosen = Recipe(name="disabled", passes=()) if disabled() else get(recipe)
    uses_weights = any("weights" in each.needs for each in chosen.passes)
    if workload is not None and workload.mode == "forward" and profile is None and uses_weights:
        graph = as_forwards_run(graph, model, workload, known)
    rewrite = chosen.run(graph, request)
    rewrite.module.meta["rewrite"] = rewrite
    if workload is None or not workload.variants or disabled():
        return rewrite.module
    if not isinstance(graph, CapturedModule):
        raise CaptureError("variants are captured from the model", hint="Pass what fxlib.capture returned.")
    rewrites: dict[str, CapturedModule] = {}
    for variant in workload.variants:
        captured = capture_variant(graph, variant, workload)
        with mode_of(graph, variant):
            found = chosen.run(captured, replace(request, profile=None, workload=workload.of(variant)))
        # If gradients are recorded, an unchanged graph is useful, too: it tracks the gradients of remote results.
        if (found.changed or variant.grad) and isinstance(found.module, CapturedModule):
            found.module.meta["rewrite"] = found
            rewrites[variant.name] = found.module
    return with_variants(graph, rewrite.module, rewrites)


def with_variants(graph: CapturedModule, main: GraphModule, variants: Mapping[str, CapturedModule]) -> GraphModule:
    """Return a module that runs `main`, or a variant if that fits; `graph`, the captured one, stays unchanged."""
    if not variants:
        return main
    module = copy.copy(graph) if main is graph else main
    if isinstance(module, CapturedModule):
        for name, variant in variants.items():
            module._fxlib.graphs.add(module, name, variant)
    return module


def _unscheduled(graph: Graph) -> Iterable[CallReport]:
    """Return a report of each call before any pass has seen it."""
    for node in graph.nodes:
        if is_call(node) or is_issue(node) or node.target in CREATIONS:
            yield CallReport(
                node=call_name(node),
                function=function_name(node),
                to=speaks_to(node),
                action="left_alone",
                reason=Reason.NOT_SCHEDULED,
                source=str(node.meta.get("source", "")),
            )


def _is_named_pass(item: object) -> bool:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return isinstance(item[0], str) and isinstance(item[1], Mapping)


def _make(name: str, options: Mapping[str, object]) -> GraphPass:
    if name not in REGISTRY:
        raise PassError(f"no pass is called {name!r}", hint=f"There are: {', '.join(sorted(REGISTRY))}.")
    kind = REGISTRY[name]
    known = {each.name for each in fields(kind)}
    if unknown := sorted(options.keys() - known):
        hint = f"It has: {', '.join(sorted(known)) or 'none'}."
        raise PassError(f"has no option {unknown[0]!r}", where=name, hint=hint)
    for each in fields(kind):
        kind_of_option = each.type.__name__ if isinstance(each.type, type) else str(each.type)
        if each.name in options and not _is_of(kind_of_option, options[each.name]):
            problem = f"the option {each.name!r} is of type {kind_of_option}, and {options[each.name]!r} is not"
            raise PassError(problem, where=name)
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise PassError(str(error), where=name) from error


def _is_of(annotation: str, value: object) -> bool:
    """Return whether a value has a type given as text; for options of a richer type, the pass itself decides."""
    wanted, given = set(annotation.split(" | ")), type(value).__name__.removesuffix("Type")
    return not wanted <= _PLAIN_TYPES or given in wanted or (given == "int" and "float" in wanted)


_PLAIN_TYPES = frozenset({"bool", "int", "float", "str", "None"})


def _options(step: GraphPass) -> str:
    return "".join(f" {each.name}={getattr(step, each.name)!r}" for each in fields(step))


def _finished(working: GraphModule, given: GraphModule) -> CapturedModule:
    """Generate the code, once, and check the graph.

    A graph that holds values computed from weights falls back to the given module, if that has no original.
    """
    captured = isinstance(given, CapturedModule) or not relies_on_weights(working.graph)
    module = CapturedModule(working, working.graph, original=None if captured else given)
    module.graph.lint()
    return module
