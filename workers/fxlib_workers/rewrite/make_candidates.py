"""The programs that a recipe and its variants make of one graph, the most promising first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch.fx import GraphModule

from fxlib import wire
from fxlib.analysis.cost.bound import Bound, bound
from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.cost.simulate import predict
from fxlib.errors import FxlibError
from fxlib.passes import DeadCode, MergeReads, SplitCalls
from fxlib.recipes import recipes
from fxlib.recipes.alternatives import candidates
from fxlib.recipes.undeclared import undeclared
from fxlib.runtime.ops.operators import limit_in_flight
from fxlib.spec.profile import Profile
from fxlib.spec.report import Candidate, Report, Undeclared
from fxlib.spec.workload import Workload
from fxlib_workers.exchange.candidate import Draft

_VARIANTS_S: Final = 30.0
"""No further variant is begun after so long: a large graph takes its time, and the first plan is the recipe's own."""

_SCHEDULING: Final = frozenset(each.name for each in recipes.get("schedule").passes)
"""Passes that leave local work as it is."""

_SPLIT: Final = recipes.Recipe(name="split", passes=(DeadCode(), MergeReads(), SplitCalls()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """All that differ from the original and from each other.

    Attributes:
        ranked: the most promising first.
        recipe: what the passes of the recipe itself did.
        headroom: the most that any legal order can gain by the cost model, relative (0.01 is 1%); None if there is no
            profile, or if passes of the recipe change more than the order of calls and work.
    """

    ranked: tuple[Draft, ...]
    recipe: Report
    headroom: float | None = None


def draft(
    original: GraphModule,
    recipe: recipes.Recipe,
    workload: Workload,
    profile: Profile | None,
    *,
    diffs: bool = False,
) -> Drafts:
    """Apply a recipe and its variants, and rank what differs by the step time that the cost model expects.

    Without a profile, the recipe itself comes first: estimates are good enough to plan by, not to choose by. With
    `diffs`, reports show what each pass did to the generated code.

    Raises:
        FxlibError: the recipe itself does not apply, or a pass of it broke its promise.
    """
    request = recipes.PlanningRequest.of(workload, profile)
    done = recipe.run(original, request, diffs=diffs)
    first, *variants = candidates(recipe, profile, has_calls=bool(done.calls))
    # What is measured bounds the step of the program with its contracts, and without what every recipe drops.
    split = None if profile is None else _SPLIT.run(original, request).module
    limit = None if split is None else bound(split, profile)
    missing = undeclared(original, recipe, request)
    report = partial(_report, limit=limit, missing=missing)
    drafts: dict[str, Draft] = {}
    varied = _varied(variants, original, request, diffs=diffs) if done.changed else ()
    for name, rewrite in [(first.name, done), *varied]:
        if rewrite.changed:
            encoded = wire.encode(rewrite.module, beside=original)
            expected_s = predict(rewrite.module, profile).step_s if profile else None
            told = report(rewrite, Candidate(name=name, predicted_step_s=expected_s))
            made = Draft(graph=wire.serialize(encoded.graph), report=told, values=encoded.blobs)
            drafts.setdefault(_program(rewrite.module), made)
    ranked = sorted(drafts.values(), key=lambda each: each.candidate.predicted_step_s or 0.0)
    return Drafts(ranked=tuple(ranked), recipe=report(done), headroom=_headroom(original, recipe, split, profile))


def _headroom(
    original: GraphModule, recipe: recipes.Recipe, split: GraphModule | None, profile: Profile | None
) -> float | None:
    if split is None or not _SCHEDULING.issuperset(each.name for each in recipe.passes):
        return None
    if any(call.guessed for call in Costs.of(original, profile).results.values()):
        return None
    least_s = bound(split, profile, typical=True).step_s
    return predict(original, profile).step_s / least_s - 1.0 if least_s else None


def _program(module: GraphModule) -> str:
    """Return what tells one program from another. A limit that changed nothing of the order makes no other program."""
    nodes = (node for node in module.graph.nodes if node.target is not limit_in_flight)
    return "\n".join(f"{node.name} {node.target} {node.args} {node.kwargs}" for node in nodes)


def _varied(
    variants: Sequence[recipes.Recipe], original: GraphModule, request: recipes.PlanningRequest, *, diffs: bool
) -> Iterator[tuple[str, recipes.Rewrite]]:
    begun = time.monotonic()
    for variant in variants:
        if time.monotonic() - begun > _VARIANTS_S:
            return
        with suppress(FxlibError):  # the recipe itself applies, and that is what was asked for
            yield variant.name, variant.run(original, request, diffs=diffs)


def _report(
    rewrite: recipes.Rewrite, *candidates: Candidate, limit: Bound | None, missing: tuple[Undeclared, ...]
) -> Report:
    return Report(
        decision="keep_original",
        reason=None,
        explanation="",
        calls=rewrite.calls,
        passes=rewrite.passes,
        preserves=rewrite.preserves,
        assumptions=rewrite.assumptions,
        timeline_bound=limit.timeline if limit else None,
        bound_s=limit.step_s if limit else None,
        candidates=candidates,
        undeclared=missing,
    )
