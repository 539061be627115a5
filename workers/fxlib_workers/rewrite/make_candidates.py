"""Makes candidates from one graph by a recipe and its alternatives, the most promising first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from torch.fx import GraphModule

from fxlib import wire
from fxlib.analysis.cost.bound import Bound, bound, bound_pipelined
from fxlib.analysis.cost.costs import Costs, Loop
from fxlib.analysis.cost.pipelined import predict_pipelined
from fxlib.analysis.cost.simulate import predict
from fxlib.analysis.effects.prologue import CallAhead, Way, calls_ahead
from fxlib.errors import FxlibError
from fxlib.passes import DeadCode, MergeReads, SplitCalls
from fxlib.pipeline.by_keys import conflicts
from fxlib.recipes import alternatives, recipes
from fxlib.recipes.undeclared import undeclared
from fxlib.runtime import CapturedModule
from fxlib.runtime.backends import installed
from fxlib.runtime.lowering import BACKEND
from fxlib.runtime.ops.registry import LIMITS
from fxlib.spec.job import TrialOptions
from fxlib.spec.profile import Profile
from fxlib.spec.report import CallReport, CandidateReport, Report, Undeclared
from fxlib.spec.workload import Workload
from fxlib.utils.hardware import FOR_BFLOAT16, instructions
from fxlib_workers import logs
from fxlib_workers.exchange import Candidate
from fxlib_workers.rewrite.predicted_time import predicted_s

_LOG: Final = logs.Log(__name__)

_ALTERNATIVES_S: Final = 30.0
"""Seconds after which no further alternative is begun, since a large graph takes long to plan."""

_MOST_BATCHES: Final = 8
"""Number of batches, in addition to those of a pipeline's depth, whose keys are examined."""

_ROUNDING: Final = TrialOptions().max_relative_error
"""The error bound up to which lossy passes are useless, since it allows only for rounding."""

_SCHEDULING: Final = frozenset(each.name for each in recipes.get("schedule").passes)
"""The passes that leave local work unchanged."""

_SPLIT: Final = recipes.Recipe(name="split", passes=(DeadCode(), MergeReads(), SplitCalls()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates that differ from the original and from each other.

    Attributes:
        ranked: the candidates, the most promising first.
        recipe: the reports of the passes of the recipe itself.
        headroom: the gain (0.01 is 1%) that no legal order can exceed according to the cost model; None if there is no
            profile, or if passes of the recipe change more than the order of calls and work.
    """

    ranked: tuple[Candidate, ...]
    recipe: Report
    headroom: float | None = None


def make_candidates(
    original: GraphModule,
    recipe: recipes.Recipe,
    workload: Workload,
    profile: Profile | None,
    *,
    max_relative_error: float | None = None,
    backends: Sequence[str] = (),
    check: Callable[[recipes.Recipe], None] = lambda _: None,
    diffs: bool = False,
) -> Candidates:
    """Apply a recipe and its alternatives, and rank the distinct results by the step time that the cost model expects.

    Without a profile, the recipe itself comes first, since estimates are good enough for planning but not for choosing.
    The candidates of `auto` for a program without calls are ranked by a roofline of their operators (`predicted_time`).
    Lossy passes keep to `max_relative_error`. `backends` are the launcher's, with versions; `auto` chooses among them.
    `check` raises if a recipe cannot be run on the data that was sent. With `diffs`, reports show what each pass did to
    the generated code.

    Raises:
        FxlibError: the recipe itself does not apply, or one of its passes broke its promise.
    """
    request = replace(recipes.PlanningRequest.of(workload, profile), max_relative_error=max_relative_error)
    done = recipe.run(original, request, diffs=diffs)
    here, untried = _installed(backends)
    first, *others = alternatives.candidates(recipe, profile, has_calls=bool(done.calls), backends=here)
    # The bound is for the measured program with its contracts, and without the nodes that every recipe drops.
    split = None if profile is None else _SPLIT.run(original, request).module
    limit = None if split is None else bound(split, profile)
    missing = undeclared(original, recipe, request)
    ahead = {each.name: each for each in calls_ahead(original)} if workload.pipeline else {}
    shares = _shares(original, workload) if ahead and profile is not None else {}
    loops = _loops(workload, shares, ahead, untried, max_relative_error)
    bounds = {
        each: bound_pipelined(split, profile, each.loop) if split is not None and each.loop is not None else None
        for each in loops
    }
    exact = next((bounds[each] for each in loops if each.loop is not None and not each.stale), None)
    report = partial(_report, limit=limit, missing=missing, ahead=ahead)
    found: dict[tuple[str, _LoopTried], Candidate] = {}
    tried = _Tried(original, request, check, untried, diffs)
    auto = recipe == alternatives.AUTO
    rewrites = tried.of(others, auto=auto) if done.changed or auto else ()
    for name, rewrite in [(first.name, done), *rewrites]:
        if rewrite.changed:
            encoded = wire.encode(rewrite.module, beside=original)
            within_s = predict(rewrite.module, profile).step_s if profile else None
            if auto and profile is None and not done.calls:
                within_s = predicted_s(rewrite.module, workload)
            graph = wire.serialize(encoded.graph)
            for each in loops:
                expected_s = within_s
                if each.loop is not None and profile is not None:
                    expected_s = predict_pipelined(rewrite.module, profile, each.loop).step_s
                row = CandidateReport(name=f"{name}{each.name}", predicted_step_s=expected_s)
                described = report(rewrite, row, across=bounds[each] or exact, tried=each)
                candidate = Candidate(graph=graph, report=described, values=encoded.blobs)
                found.setdefault((_program(rewrite.module), each), candidate)
            _LOG.debug("candidate", name=name, expected_s=within_s)
    ranked = [
        replace(each, report=replace(each.report, candidates=(each.row, *untried)))
        for each in sorted(found.values(), key=lambda each: each.row.predicted_step_s or math.inf)
    ]
    return Candidates(
        ranked=tuple(ranked),
        recipe=report(done, *untried, across=exact, tried=_LoopTried()),
        headroom=_headroom(original, recipe, split, profile, [each for each in bounds.values() if each is not None]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoopTried:
    """A loop in which each program is tried.

    Attributes:
        name: what it adds to a candidate's name.
        pipeline: depth of its pipeline; 0 if it has none.
        stale: number of steps whose pushes a read may miss in it.
        loop: the loop as the cost model knows it; None if it has no pipeline.
    """

    name: str = ""
    pipeline: int = 0
    stale: int = 0
    loop: Loop | None = field(default=None, compare=False)


def _shares(original: GraphModule, workload: Workload) -> dict[str, float]:
    """Return how often keys recur, by call; if that is unknown, all keys count as recurring."""
    with suppress(Exception):  # if the work that makes the keys raises, the trial will show it
        if isinstance(original, CapturedModule):
            batches = workload.drawn_batches[: workload.pipeline + _MOST_BATCHES]
            return conflicts(original, batches, depth=workload.pipeline)
    return {}


def _loops(
    workload: Workload,
    shares: Mapping[str, float],
    ahead: Mapping[str, CallAhead],
    untried: list[CandidateReport],
    max_relative_error: float | None,
) -> tuple[_LoopTried, ...]:
    """Return the loops to try: with stale reads if the request allows that, under an exact pipeline, and without one.

    A loop with stale reads that is not tried gets a row in `untried`.
    """
    depth, stale = workload.pipeline, workload.stale if workload.mode != "forward" else 0
    if not any(each.way for each in ahead.values()):
        return (_LoopTried(),)
    exact = Loop(depth=depth, conflicts=shares, several_trainers=workload.trainers > 1)
    found = [_LoopTried(name=", pipeline", pipeline=depth, loop=exact), _LoopTried(name=", pipeline off")]
    if stale and (why := _not_wanted_lossy(max_relative_error)):
        untried.append(CandidateReport(name=f"pipeline, stale by {stale}", verdict=f"not tried: {why}"))
    elif stale and any(each.way not in (None, Way.NOTHING_WRITTEN) for each in ahead.values()):
        loop = replace(exact, depth=min(depth, stale), stale=True)
        found.insert(0, _LoopTried(name=f", pipeline, stale by {stale}", pipeline=depth, stale=stale, loop=loop))
    return tuple(found)


def _not_wanted_lossy(max_relative_error: float | None) -> str:
    """Return why a request has no use for lossy programs; empty if it may have."""
    if max_relative_error is not None and max_relative_error <= _ROUNDING:
        return f"it is lossy, and max_relative_error is {max_relative_error:g}, which is for rounding alone"
    return ""


def _headroom(
    original: GraphModule,
    recipe: recipes.Recipe,
    split: GraphModule | None,
    profile: Profile | None,
    across: Sequence[Bound],
) -> float | None:
    if split is None or not _SCHEDULING.issuperset(each.name for each in recipe.passes):
        return None
    if any(call.guessed for call in Costs.of(original, profile).results.values()):
        return None
    least_s = min(each.step_s for each in (bound(split, profile, typical=True), *across))
    return predict(original, profile).step_s / least_s - 1.0 if least_s else None


def _program(module: GraphModule) -> str:
    """Return a text that equal programs share. A different limit on calls in flight alone makes no new program."""
    nodes = (node for node in module.graph.nodes if node.target not in LIMITS)
    return "\n".join(f"{node.name} {node.target} {node.args} {node.kwargs} {node.meta.get(BACKEND)}" for node in nodes)


def _installed(backends: Sequence[str]) -> tuple[list[str], list[CandidateReport]]:
    """Return the names of the launcher's backends that are installed here, and a report row for each of the others."""
    here, rows = list[str](), list[CandidateReport]()
    for given in backends:
        name = given.partition("==")[0]
        if (own := installed(name)) == given:
            here.append(name)
        else:
            verdict = f"not tried: the launcher has {given}, and this worker {own or 'none'}"
            rows.append(CandidateReport(name=f"lower to {name}", verdict=verdict))
    return here, rows


@dataclass(frozen=True, slots=True)
class _Tried:
    """Runs alternatives of a recipe, and records in `untried` which were not possible, and why."""

    original: GraphModule
    request: recipes.PlanningRequest
    check: Callable[[recipes.Recipe], None]
    untried: list[CandidateReport]
    diffs: bool

    def of(self, others: Sequence[recipes.Recipe], *, auto: bool) -> Iterator[tuple[str, recipes.Rewrite]]:
        """Yield the programs that they make from the original, with their names, until the time is up."""
        start = time.monotonic()
        for other in others:
            if time.monotonic() - start > _ALTERNATIVES_S:
                self._leave_out(other, f"to plan the others took {_ALTERNATIVES_S:g} s")
                continue
            if auto and (why := self._not_wanted(other)):
                self._leave_out(other, why)
                continue
            try:
                self.check(other)
                rewrite = other.run(self.original, self.request, diffs=self.diffs)
            except FxlibError as error:  # the recipe itself, which was asked for, does apply
                self._leave_out(other, str(error))
                continue
            if auto and not rewrite.changed:
                self._leave_out(other, "it changes nothing")
            yield other.name, rewrite

    def _not_wanted(self, other: recipes.Recipe) -> str:
        """Return why a recipe is of no use to the request; empty if it may be of use."""
        if other.preserves == "lossy" and (why := _not_wanted_lossy(self.request.max_relative_error)):
            return why
        if any(step.name == "bfloat16" for step in other.passes) and not FOR_BFLOAT16 & set(instructions()):
            return "this processor has no instructions for bfloat16 (avx512_bf16, amx_bf16 or bf16)"
        workload = self.request.workload
        if (
            workload is not None
            and workload.mode != "forward"
            and any("weights" in step.needs for step in other.passes)
        ):
            return "it computes values from weights once, which a training step changes"
        return ""

    def _leave_out(self, other: recipes.Recipe, why: str) -> None:
        self.untried.append(CandidateReport(name=other.name, verdict=f"not tried: {why}"))


def _report(
    rewrite: recipes.Rewrite,
    *candidates: CandidateReport,
    limit: Bound | None,
    across: Bound | None,
    missing: tuple[Undeclared, ...],
    ahead: Mapping[str, CallAhead],
    tried: _LoopTried,
) -> Report:
    return Report(
        decision="keep_original",
        reason=None,
        explanation="",
        calls=tuple(_with_ahead(each, ahead.get(each.node)) for each in rewrite.calls),
        passes=rewrite.passes,
        preserves="lossy" if tried.stale else rewrite.preserves,
        assumptions=rewrite.assumptions,
        timeline_bound=limit.timeline if limit else None,
        bound_s=limit.step_s if limit else None,
        pipeline_bound_s=across.step_s if across else None,
        pipeline_limit=across.limiting if across else "",
        candidates=candidates,
        undeclared=missing,
        pipeline=tried.pipeline,
        stale=tried.stale,
    )


def _with_ahead(call: CallReport, ahead: CallAhead | None) -> CallReport:
    if ahead is None:
        return call
    return replace(call, ahead=ahead.reason, ahead_detail=ahead.detail, ahead_remedy=ahead.remedy)
