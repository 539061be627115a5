"""The base class of every pass, which enforces what a pass declares, and the context that a pass runs with.

A context is what a pass knows besides its module: profile, workload, and analyses of the current graph. Everything
about a module that is visible from outside is compared before and after a pass, which may change no more of it than it
declares.
"""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, get_args

from torch.fx import GraphModule, Node
from typing_extensions import dataclass_transform

from fxlib.analysis.cost.costs import Costs
from fxlib.analysis.effects.dependencies import Dependencies
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviours, Part
from fxlib.analysis.operators.operator_names import called_in
from fxlib.errors import PassError
from fxlib.passes.infra.edit import SharedParts, called_modules, held_tensors
from fxlib.passes.infra.introduced import ANY_PLAIN_WORK, Introduced
from fxlib.reasons import Declined
from fxlib.runtime.ops.calls import is_issue, is_wait
from fxlib.runtime.ops.registry import is_batch, waits_of
from fxlib.runtime.ops.timeline import call_name
from fxlib.spec.profile import Profile
from fxlib.spec.report import CallReport, PassReport, Sensitivity
from fxlib.spec.workload import Workload

MERGED = "merged"
"""Key of a node's metadata: the names, as captured, of other calls for whose results this call stands, too."""

_STARTS = (Part.CALL, Part.ISSUE)


class GraphAnalysis(Protocol):
    """A class whose instances describe one graph."""

    @classmethod
    def of(cls, module: GraphModule) -> Self:
        """Analyse a module's graph as it is now."""
        ...


A = TypeVar("A", bound=GraphAnalysis)


@dataclass(slots=True, eq=False)
class Context:
    """The context of all passes of a recipe, which run one after another.

    An analysis is made when a pass first asks for it, and kept for later passes until the graph changes. If a pass
    reports changes, only the analyses that it has given to `keep` survive; nodes, targets and arguments are also
    compared, so no pass has to declare what it preserves.

    Args:
        module: the module that the next pass works on.
        profile: the profile of the program; None if it was not measured.
        workload: how its steps run; None if it is unknown.
        max_relative_error: the largest relative error allowed for a lossy pass; None: there is no bound.
    """

    module: GraphModule
    profile: Profile | None = None
    workload: Workload | None = None
    max_relative_error: float | None = None
    _kept: dict[type[Any], Any] = field(default_factory=dict, repr=False)
    _nodes: list[tuple[object, ...]] = field(default_factory=list, repr=False)
    _left: set[type[Any]] = field(default_factory=set, repr=False)

    def get(self, analysis: type[A]) -> A:
        """Return an analysis of the module's graph as it is now."""
        self._forget_if_changed()
        if analysis not in self._kept:
            self._note(analysis.of(self.module))
        found: A = self._kept[analysis]
        return found

    def keep(self, made: GraphAnalysis) -> None:
        """Keep an analysis that a pass has made of the current graph for later passes."""
        self._forget_if_changed()
        self._left |= self._note(made)

    def pass_ended(self, *, changes: int) -> None:
        """Drop the analyses from before the changes that a pass made, which may be in modules alone."""
        if changes:
            self._kept = {kind: made for kind, made in self._kept.items() if kind in self._left}
        self._left.clear()

    def _note(self, made: GraphAnalysis) -> set[type[Any]]:
        found: dict[type[Any], Any] = {type(made): made}
        if isinstance(made, Dependencies):
            found[Effects] = made.effects
        self._kept |= found
        return set(found)

    def costs(self) -> Costs:
        """Return the costs of the graph's nodes and calls, from the profile or estimated."""
        return Costs.of(self.module, self.profile)

    def _forget_if_changed(self) -> None:
        nodes = _nodes(self.module)
        if nodes != self._nodes:
            self._kept.clear()
            self._nodes = nodes


Preserves = Literal["bitwise", "tolerance", "lossy"]
Need = Literal["weights", "sample_inputs", "eval_mode"]
PassClass = TypeVar("PassClass", bound="GraphPass")

__all__ = ["REGISTRY", "Context", "GraphPass", "Need", "PassResult", "PassRun", "Preserves", "register_pass"]

REGISTRY: dict[str, type[GraphPass]] = {}
"""All passes by name, in order of registration."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of a pass: the module (changed in place or new), the number of changes, and what it declined.

    `calls` says what became of each remote call, if the pass moves calls; `sensitivity` has the errors of layers that a
    lossy pass measured.
    """

    module: GraphModule
    _: KW_ONLY
    changes: int
    declined: tuple[Declined, ...] = ()
    calls: tuple[CallReport, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()


@dataclass(frozen=True, kw_only=True)
@dataclass_transform(kw_only_default=True, frozen_default=True)
class GraphPass(ABC):
    """One transform of a GraphModule. Subclasses are frozen keyword-only dataclasses whose fields are their options."""

    name: ClassVar[str]
    preserves: ClassVar[Preserves]
    needs: ClassVar[frozenset[Need]]
    introduces: ClassVar[Introduced]
    version: ClassVar[str]

    @property
    def promise(self) -> Preserves:
        """The guarantee that this pass gives with its present options."""
        return self.preserves

    @property
    def may_introduce(self) -> Introduced:
        """The operators that this pass may put into a program with its present options."""
        return self.introduces

    def require_at_least(self, **least: int) -> None:
        """Check that options are integers of at least some size.

        Raises:
            ValueError: one is not.
        """
        for name, bound in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < bound:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {bound}")

    @abstractmethod
    def run(self, module: GraphModule, context: Context) -> PassResult:
        """Transform the module. The graph may be left unlinted and not recompiled: the recipe does both once.

        Args:
            module: the module, which may be changed in place.
            context: profile and workload, if there are any, and analyses of the graph (`context.get(Effects)`).
        """

    def requires(self, module: GraphModule) -> None:  # noqa: B027 - most passes apply to any module
        """Raise PassError if the pass does not apply to this module."""

    def ensures(self, module: GraphModule) -> None:  # noqa: B027 - most promises are declared, and checked for all
        """Raise PassError if the pass broke its own promise on its output."""

    def __call__(
        self, module: GraphModule, context: Context | None = None, *, before: Invariants | None = None
    ) -> PassRun:
        """Run the pass, time it, and check that it keeps what it declares.

        Args:
            module: the module to transform.
            context: the recipe's context; None: a new one, without profile and workload.
            before: the module's invariants, if the caller knows them already.

        Raises:
            PassError: the pass does not apply, or its output breaks the pass's declaration.
        """
        if "eval_mode" in self.needs and module.training:
            raise PassError("needs a module in eval mode", where=self.name, hint="Call module.eval() before capture.")
        self.requires(module)
        before = Invariants.of(module) if before is None else before
        start = time.perf_counter()
        context = _bound(context, module)
        result = self._result(module, context)
        context.pass_ended(changes=result.changes)
        seconds = time.perf_counter() - start
        after = before.after(result.module, changes=result.changes)
        broken = before.broken_by(
            after,
            changes=result.changes,
            may_change_weights="weights" in self.needs,
            same_effects=self.promise == "bitwise",
            introduces=self.may_introduce,
        )
        if broken:
            raise PassError(broken, where=self.name, hint="This is a bug in the pass.")
        self.ensures(result.module)
        report = PassReport(
            name=self.name,
            changes=result.changes,
            seconds=seconds,
            declined=result.declined,
            sensitivity=result.sensitivity,
        )
        _log(type(self), report)
        return PassRun(result=result, report=report, invariants=after)

    def _result(self, module: GraphModule, context: Context) -> PassResult:
        """Run the pass, and put back what it changed of the caller's model."""
        shared = SharedParts(module)
        try:
            result: object = self.run(module, context)
        except Exception as error:
            error.add_note(f"The pass {self.name!r} was running.")
            raise
        finally:
            replaced = shared.restore()
        if not isinstance(result, PassResult) or not isinstance(result.module, GraphModule):
            problem = f"run returned {result!r}, which is no PassResult with a GraphModule"
            raise PassError(problem, where=self.name, hint="Return PassResult(module, changes=...).")
        if not any(node.op == "output" for node in result.module.graph.nodes):
            raise PassError("the pass left the graph without an output", where=self.name)
        if replaced:
            problem = f"the pass replaced or removed {replaced!r} in a part of the model, which is the caller's, too"
            hint = (
                "Add the new part to the module itself, under a name of its own, and let the nodes call or read that."
            )
            raise PassError(problem, where=self.name, hint=hint)
        return result


def _log(kind: type[GraphPass], report: PassReport) -> None:
    """Log what a pass did, with the logger of the module that defines the pass."""
    log = logging.getLogger(kind.__module__)
    if not log.isEnabledFor(logging.DEBUG):
        return
    left, took_ms = len(report.declined), 1e3 * report.seconds
    log.debug("%s: %d changes, %d declined, %.1f ms", report.name, report.changes, left, took_ms)
    for each in report.declined:
        log.debug("%s left %s alone: %s", report.name, each.node, each.reason.sentence(each.detail))


def _bound(context: Context | None, module: GraphModule) -> Context:
    """Return a context for this module."""
    context = Context(module) if context is None else context
    context.module = module
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRun:
    """One run of a pass that kept its promises; `invariants` are those of the resulting module."""

    result: PassResult
    report: PassReport
    invariants: Invariants


def register_pass(
    name: str,
    *,
    preserves: Preserves,
    needs: frozenset[Need] = frozenset(),
    introduces: Introduced = ANY_PLAIN_WORK,
    version: str = "1",
) -> Callable[[type[PassClass]], type[PassClass]]:
    """Declare a pass and register it under `name`.

    Args:
        name: the pass's name, under which recipes find it.
        preserves: how its results compare with those of what it was given.
        needs: what it cannot do without.
        introduces: what it may call that the program does not; a launcher refuses everything else in an answer.
        version: changes whenever its output may.

    Raises:
        PassError: another pass has the name, or `preserves` or `needs` is none of those that there are.
    """

    def declare(cls: type[PassClass]) -> type[PassClass]:
        if name in REGISTRY:
            raise PassError(f"another pass is called {name!r}", where=f"{cls.__module__}.{cls.__qualname__}")
        _check_declared(cls, preserves, needs)
        cls.name, cls.preserves, cls.needs, cls.version = name, preserves, frozenset(needs), version
        cls.introduces = introduces
        _take_context(cls)
        REGISTRY[name] = made = dataclass(frozen=True, kw_only=True)(cls)
        return made

    return declare


def _check_declared(cls: type[GraphPass], preserves: object, needs: object) -> None:
    where = f"{cls.__module__}.{cls.__qualname__}"
    if preserves not in get_args(Preserves):
        hint = f"It is one of: {', '.join(get_args(Preserves))}."
        raise PassError(f"preserves is {preserves!r}", where=where, hint=hint)
    if not isinstance(needs, (set, frozenset)) or not needs <= set(get_args(Need)):
        hint = f"It is a set of: {', '.join(get_args(Need))}."
        raise PassError(f"needs is {needs!r}", where=where, hint=hint)


def _take_context(cls: type[GraphPass]) -> None:
    """Let a pass that was written as `run(module)` run with a context, for this release."""
    written = cls.__dict__.get("run")
    if written is None or len(inspect.signature(written).parameters) > 2:
        return
    warnings.warn(
        f"{cls.__qualname__}.run takes only a module; write run(self, module, context): the next release needs it",
        DeprecationWarning,
        stacklevel=3,
    )

    def run(self: GraphPass, module: GraphModule, context: Context) -> PassResult:  # noqa: ARG001 - not its own
        result: PassResult = written(self, module)
        return result

    cls.run = run  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariants:
    """A module's signature, state and effects, taken before a pass and compared after it."""

    signature: tuple[Hashable, ...]
    state: dict[str, int]
    """Identity of each parameter and buffer, by name."""
    calls: tuple[str, ...]
    """Names of all calls as captured, each once, sorted. A call that stands for others counts as them, too."""
    unwaited: tuple[str, ...]
    """Names of the calls that are issued and never waited for, sorted."""
    sequences: tuple[tuple[str, ...], tuple[str, ...]]
    """Random operators and fences, each kind in its order."""
    operators: frozenset[str]
    """Names of what the program calls."""
    nodes: list[tuple[object, ...]]
    called: dict[str, int]
    """Identity of each part that the graph calls, by path."""

    @classmethod
    def of(cls, module: GraphModule) -> Invariants:
        """Inspect a module, in linear time."""
        nodes, lookup = list(module.graph.nodes), Behaviours(module)
        calls: list[str] = []
        unwaited, random, fences = [], [], []
        for node in nodes:
            behaviour = lookup.of(node)
            part, operator = behaviour.part, behaviour.operator
            if part is Part.LOCAL:
                if operator is not None and operator.random:
                    random.append(node.name)
            elif part in _STARTS or (part is Part.FENCE and is_issue(node)):
                calls.extend(_calls_in(node))
                if part is not Part.CALL and not node.users:
                    unwaited.append(call_name(node))
            elif part is Part.FENCE and not is_wait(node):
                fences.append(node.name)
        return cls(
            signature=tuple((node.name, node.target) for node in nodes if node.op == "placeholder"),
            state=held_tensors(module),
            calls=tuple(sorted(calls)),
            unwaited=tuple(sorted(unwaited)),
            sequences=(tuple(random), tuple(fences)),
            operators=called_in(module),
            nodes=_nodes(module),
            called=called_modules(module),
        )

    def after(self, module: GraphModule, *, changes: int) -> Invariants:
        """Inspect the module that a pass made of this one, briefly if the pass did nothing."""
        same = self.nodes == _nodes(module) and self.called == called_modules(module)
        if not changes and same and self.state == held_tensors(module):
            return self
        return Invariants.of(module)

    def broken_by(
        self,
        after: Invariants,
        *,
        changes: int,
        may_change_weights: bool,
        same_effects: bool,
        introduces: Introduced = ANY_PLAIN_WORK,
    ) -> str:
        """Return which rule the change from these invariants to `after` breaks; empty if none."""
        if after.signature != self.signature:
            return "the pass changed the module's inputs"
        if not may_change_weights and after.state != self.state:
            return "the pass changed parameters or buffers without declaring that it needs weights"
        if not changes and (after.nodes != self.nodes or after.called != self.called):
            return "the pass reports no changes, but changed the graph or what it calls"
        if after.unwaited != self.unwaited:
            return f"calls are left without a wait: {_listed(self.unwaited, after.unwaited)}"
        if same_effects and after.calls != self.calls:
            return f"a bitwise pass lost or added calls: {_listed(self.calls, after.calls)}"
        if same_effects and after.sequences != self.sequences:
            return "a bitwise pass lost, added or reordered random operators or opaque calls"
        more = [] if introduces.plain else after.operators - self.operators
        if undeclared := [name for name in more if not introduces.allows(name, self.operators)]:
            return f"the pass put in what it does not declare: {', '.join(sorted(undeclared))}"
        return ""


def _calls_in(node: Node) -> Iterator[str]:
    waits = waits_of(node) if is_batch(node) else None
    for call in (node,) if waits is None else waits:
        yield call_name(call)
        yield from call.meta.get(MERGED, ())


def _nodes(module: GraphModule) -> list[tuple[object, ...]]:
    return [(node, node.target, node.args, node.kwargs) for node in module.graph.nodes]


def _listed(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    return ", ".join(sorted(set(one) ^ set(other)))
