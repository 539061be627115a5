"""The captured module: a GraphModule that stands in for the user's own model."""

from __future__ import annotations

import ast
import copy
import functools
import operator
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode
from typing_extensions import override

from fxlib.errors import CaptureError, WireError
from fxlib.runtime import failure, own_code
from fxlib.runtime.ahead import Ahead
from fxlib.runtime.dynamo import break_at, is_compiled, skip
from fxlib.runtime.gradients.plain_forward import track_themselves, tracked_calls, train_beside
from fxlib.runtime.gradients.tape import Tape
from fxlib.runtime.graph_set import GraphSet, GuardFailure
from fxlib.runtime.guards.conditions import Conditions, Entry, FixedAnswers, parameters_of
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.guards.fact_table import Facts
from fxlib.runtime.guards.folded_weights import Mark
from fxlib.runtime.lowering import backend_of
from fxlib.runtime.mirrored_module import MirroredModule
from fxlib.runtime.module_state import (
    Expected,
    Mirror,
    ModuleState,
    constants_of,
    holds_the_same,
    lend_state,
    lent,
    share_state,
)
from fxlib.runtime.ops.calls import is_issue, is_wait
from fxlib.runtime.ops.contract_lookup import contracts_in
from fxlib.runtime.ops.registry import TRACKERS
from fxlib.runtime.ops.timeline import current_recording
from fxlib.runtime.results import returned
from fxlib.runtime.submodules import TABLES, SubmoduleCache, local_modules, remote_modules
from fxlib.runtime.tracking.forward_context import THREAD, ForwardContext
from fxlib.runtime.tracking.track import keep_gradients


class CapturedModule(MirroredModule):
    """A model as a graph in which every remote call is one node, and a drop-in for the model itself.

    It has the submodules, parameters and buffers of `root` (the same objects, under the same `state_dict` keys), its
    hooks and its training flag; `original` answers for all other attributes. If the `Conditions` of the capture do not
    hold, `original`'s own forward runs. Without an `original`, as in a trial, the graph always runs.

    Args:
        root: the model that was traced, another CapturedModule, or a mapping from the graph's targets to objects.
        graph: the graph to run. A graph belongs to one module: copy one that has an owner.
        original: the user's model; by default that of `root`, if this is a CapturedModule.
        facts: the Python state that the original's forward has read; by default nothing is known about that.
        asked: what the forward has asked of torch; by default nothing.
        entries: entries of the containers from which the graph took objects, for a graph that was just captured.
        class_name: the name in listings; by default that of the user's model.
    """

    def __init__(
        self,
        root: nn.Module | Mapping[str, Any],
        graph: Graph,
        *,
        original: nn.Module | None = None,
        facts: Facts | None = None,
        asked: FixedAnswers | None = None,
        entries: Sequence[Entry] = (),
        class_name: str | None = None,
    ) -> None:
        """Take over `root`'s state and generate the forward."""
        named = original if original is not None else root
        default = type(named).__name__ if isinstance(named, nn.Module) else "CapturedModule"
        super().__init__(root if isinstance(root, nn.Module) else dict(root), graph, class_name or default)
        if isinstance(root, nn.Module):
            share_state(root, self, constants_of(graph))
        if isinstance(original, CapturedModule):
            original = original._fxlib.original
        if isinstance(root, CapturedModule):
            self.meta.update(root.meta)
            conditions = root._fxlib.conditions.rebased(self)
            original = original if original is not None else root._fxlib.original
        else:
            enabled = torch.is_grad_enabled()
            conditions = Conditions(
                self,
                original,
                grad_enabled=enabled,
                facts=Facts() if facts is None else facts,
                asked=asked or FixedAnswers(),
            )
            conditions.fix_entries(entries)
        state = ModuleState(conditions, original)
        if isinstance(root, CapturedModule):
            state.weight_assumptions = root._fxlib.weight_assumptions.copied()
            state.captured_with = root._fxlib.captured_with
        state.read(self, graph)
        if original is not None:
            state.mirror = Mirror(original, self)
        # This avoids `__setattr__`, which looks for modules among the values.
        self.__dict__["_fxlib"] = state
        if original is not None:
            del self.__dict__["_is_full_backward_hook"]  # the original's flag holds for the hooks of both
            self._be_like_original()

    _fxlib: ModuleState
    _program: _Program

    def with_graph(self, graph: Graph) -> CapturedModule:
        """Return a sibling that runs another graph over the same state, under the same conditions."""
        return CapturedModule(self, graph, class_name=type(self).__name__)

    def computed_from(self, marks: Mapping[str, Mark]) -> None:
        """Declare that the graph's values were computed from the weights as they were when `marks` were noted."""
        self._fxlib.weight_assumptions.since(marks)

    def keep_original(self) -> None:
        """Have the original itself run from now on, which spares each step the checks of a graph that gains nothing.

        It runs until the graph is edited. This changes nothing for a graph that was rewritten, or that tracks gradients
        of remote results for `fxlib.push_gradients`.
        """
        state, code = self._fxlib, self._program.generated.__code__
        if state.original is not None and state.captured_code is code and not self._program.tracks:
            state.kept_code = code

    @override
    def recompile(self) -> PythonCode:
        """Generate the forward anew, after the graph was edited.

        Raises:
            CaptureError: a name gives the code another meaning, or none.
        """
        try:
            code = super().recompile()
        except SyntaxError as error:
            problem = f"a name in it cannot stand in code: {(error.text or '').strip()!r}"
            raise CaptureError(problem, where=type(self).__name__, hint="Rename the module.") from error
        if any(node.name == "self" for node in self.graph.nodes):
            problem = "the value 'self' hides the module itself from the generated code"
            raise CaptureError(problem, where=type(self).__name__, hint="Rename the module or function 'self'.")
        if hidden := _shadowed(self.graph, self._code):
            problem = f"the argument {hidden!r} hides what the generated code calls by its name"
            raise CaptureError(problem, where=type(self).__name__, hint="Rename the argument.")
        cls: Any = type(self)
        cls._program = _program_of(self, cls.forward)
        cls.forward = _guard(cls._program)
        # GraphModule's own `__call__` prints failures of generated code and cuts off their tracebacks.
        del cls.__call__
        if (state := self.__dict__.get("_fxlib")) is not None:
            state.read(self, self.graph)
            state.submodule_cache.forget()
            state.lowered.forget()
            state.quantized.forget()
            state.checked.forget()
        return code

    @override
    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        for table in TABLES:  # faster than torch's own lookup, as generated code asks for each attribute
            if table in own and name in own[table]:
                if torch.compiler.is_dynamo_compiling() or self._is_followed(table, name):
                    return own[table][name]
                self._catch_up()
                break
        try:
            return super().__getattr__(name)
        except AttributeError:
            state = self.__dict__.get("_fxlib")
            if state is None or state.original is None or name.startswith("__"):
                raise
            original: nn.Module = state.original
            found, program = getattr(original, name), getattr(type(self), "_program", None)  # none while it is copied
            if isinstance(found, MethodType) and found.__self__ is original and program is not None and program.tracks:
                train_beside(original, state.tape, lambda: contracts_in(self.graph))
            return found

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedModule:
        copied: CapturedModule = type(self).__new__(type(self))
        type(copied).__name__ = type(self).__name__
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        copied.graph = copied.__dict__["_graph"]
        copied._be_like_original()
        return copied

    @override
    def __copy__(self) -> CapturedModule:
        return self.with_graph(copy.deepcopy(self.graph))

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        raise WireError(
            "a captured module cannot be pickled: unpickling executes code, and loses what fxlib knows of the graph",
            where=type(self).__name__,
            hint="Save it with fxlib.save(module, path), or its weights alone by module.state_dict().",
        )

    @override
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._follow()
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        state = self._fxlib
        if state.original is not None and state.mirror is not None:
            lend_state(self, state.original)
            state.mirror.note(self)
        return self

    @override
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._fxlib.ahead is not None:
            self._fxlib.ahead.settle_pushes()
        original = self._fxlib.original
        if original is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        else:
            self._follow()
            with lent(self, original):
                original._save_to_state_dict(destination, prefix, keep_vars)

    @override
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        original = self._fxlib.original
        if original is None:
            super()._load_from_state_dict(*args, **kwargs)
        else:
            self._follow()
            with lent(self, original):
                original._load_from_state_dict(*args, **kwargs)

    @override
    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules as any module does, but leave out each `RemoteModule`, which has none here and would raise."""
        self._catch_up()
        if next(remote_modules(self), None) is None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        seen = set[nn.Module]() if memo is None else memo
        for path, module in local_modules(self, repeated=not remove_duplicate):
            if module not in seen or not remove_duplicate:
                seen.add(module)
                yield ".".join(filter(None, (prefix, path))), module

    def _guard_failure(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool
    ) -> GuardFailure | None:
        """Return why the graph may not run for this call; None if it may."""
        state, program = self._fxlib, self._program
        if broken := state.broken(grad_enabled=grad_enabled):
            return GuardFailure(broken)
        given = (*args, *kwargs.values())
        if changed := state.conditions.changed_metadata(given):
            return GuardFailure(changed, warns=True)
        if stale := state.stale(self, grad_enabled=grad_enabled):
            return GuardFailure(stale, warns=not grad_enabled)
        if misfit := state.misfit(program.expected, args, kwargs):
            return GuardFailure(misfit, warns=True)
        if program.compiles_backward and grad_enabled and state.conditions.backward_order.makes_graphs:
            return GuardFailure("a backward made a graph (create_graph=True), and compiled parts have no other one")
        if program.reordered and grad_enabled:
            if reordered := state.conditions.reordered(given):
                return GuardFailure(reordered)
            if program.reorders_backward and not torch.compiler.is_compiling():
                shows = state.conditions.backward_shows(given, returns_several=program.returns_several)
                return GuardFailure(shows, warns=True) if shows else None
        return None

    def _guard_failure_as_variant(
        self, main: CapturedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool
    ) -> GuardFailure | None:
        """Return why this graph, a variant of `main`'s, may not run for a call of `main`; None if it may."""
        if self._fxlib.conditions.grad_enabled is not grad_enabled and not self._fxlib.weight_assumptions.on_weights:
            return GuardFailure("grad mode is another one than at capture")  # the most common, and cheapest to check
        # Each has tables and a flag of its own for the root; all modules below are the same objects.
        self.__dict__["training"] = main.training
        self._follow()
        lend_state(main, self)
        return self._guard_failure(args, kwargs, grad_enabled=grad_enabled)

    def _run_after(self, ahead: Ahead, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool) -> Any:
        """Run the graph with the results of calls that were made ahead of it, if there are any."""
        if torch.compiler.is_dynamo_compiling() or is_compiled():
            return self._run(args, kwargs, grad_enabled=grad_enabled)
        generated = self._generated(self._what_runs()[1])
        try:
            generated = ahead.over(self, generated, args, kwargs)
            return self._run(args, kwargs, grad_enabled=grad_enabled, generated=generated)
        finally:
            ahead.ended()

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        grad_enabled: bool,
        generated: Callable[..., Any] | None = None,
    ) -> Any:
        """Run the graph; an error is the one that the blocking program would have raised.

        Args:
            args: positional arguments of the forward.
            kwargs: keyword arguments of the forward.
            grad_enabled: the grad mode of the caller.
            generated: the generated forward over other globals; None is the forward itself.
        """
        state = self._fxlib
        followed = torch.compiler.is_dynamo_compiling() or is_compiled()  # dynamo follows modules alone, and compiles
        plain, program = (self, self) if followed else self._what_runs()
        if generated is None:
            generated = self._generated(program)
        state.conditions.python.ask_caches()
        recording = current_recording()
        run: Callable[..., Any] = generated
        stands: Any = self
        if recording is not None:
            run = recording.instrument(self if plain is self else program, generated)  # checks have no times
        elif not followed:
            watched = () if state.original is None else state.conditions.unhooked  # these were just checked
            stands = state.submodule_cache.of(self, self._graph, watched)
        outer = THREAD.forward
        forward = ForwardContext(grad_enabled=grad_enabled, shares_nodes=self._program.shares_nodes)
        THREAD.forward = forward
        forward.expects_objects = followed or state.original is None or state.checked.objects
        try:
            call = functools.partial(run, stands, *args, **kwargs)
            result = own_code.run(self, (plain, program), generated.__code__, call, forward)
            if forward.refused:  # a call could not be issued, and nobody waited for it
                raise forward.refused[0]
        except BaseException as error:
            earlier = failure.first_error(program, generated.__code__, error)
            torch.set_grad_enabled(grad_enabled)
            if earlier is not None:
                raise earlier from None
            raise
        finally:
            THREAD.forward = outer
        captured, modes = state.conditions.grad_enabled, self._program.grad_modes
        if state.original is None and modes:  # its conditions are of the moment at which it was read
            captured = not modes[0]
        if grad_enabled is not captured:  # the graph's blocks end in the mode of its capture
            torch.set_grad_enabled(grad_enabled)
        if forward.tracked:
            if self._program.returns_tracked and not forward.in_distributed_autograd:
                keep_gradients(result)
            state.tape.add(forward.tracked, forward.backward, returned=self._program.returns_tracked)
        state.tape.untracked = forward.untracked or state.tape.untracked
        watches = self._program.reorders_backward or self._program.compiles_backward
        if watches and grad_enabled and not torch.compiler.is_compiling():
            state.conditions.backward_order.watch(result)
        return result

    def _what_runs(self) -> tuple[GraphModule, GraphModule]:
        """Return the program that runs in place of the graph, and the same with checks of own code.

        The two are the same if there is nothing to check.
        """
        state = self._fxlib
        lowered = state.lowered.of(self)
        plain = self if lowered is None else lowered
        if state.original is not None:
            checked = state.checked.of(plain, keeps_values=state.conditions.grad_enabled)
            if checked is not None:  # the program's own code may write to weights in mid-step
                return plain, checked
        quantized = state.quantized.of(plain)
        return (plain, plain) if quantized is None else (quantized, quantized)

    def _generated(self, program: GraphModule) -> Callable[..., Any]:
        return self._program.generated if program is self else type(program).forward


for _each in (
    CapturedModule._follow,
    CapturedModule._what_runs,
    CapturedModule._generated,
    SubmoduleCache.of,
    GraphSet.fitting,
    GraphSet.original_runs,
    ModuleState.tell_of_original,
    holds_the_same,
    lend_state,
    current_recording,
    Tape.add,
    keep_gradients,
    ForwardContext.__init__,
):
    skip(_each.__code__)
for _code in (CapturedModule._run.__code__, CapturedModule._run_after.__code__, own_code.run.__code__):
    skip(_code, inner=False)
track_themselves(CapturedModule._run.__code__)
break_at(CapturedModule._follow)  # dynamo compiles the original's forward together with what runs it


def outdated(module: nn.Module) -> str:
    """Return what has become of the weights from which a graph's values were computed; empty if nothing has."""
    if not isinstance(module, CapturedModule):
        return ""
    module._follow()
    return module._fxlib.stale(module, grad_enabled=False)


@dataclass(frozen=True, slots=True)
class _Program:
    """The result of `recompile`: the generated forward of a graph, and the properties that are needed to run it."""

    generated: Callable[..., Any]
    expected: Expected
    guarded: GuardedCodeGen | None
    reordered: bool
    """Whether nodes stand in another order than that of the program as captured."""
    reorders_backward: bool
    """Whether nodes through which backward runs stand in another order, and not just calls."""
    compiles_backward: bool
    """Whether a compiler has parts of the graph together with their backward, through which no other one runs."""
    returns_several: bool
    """Whether the caller gets several values."""
    tracks: bool
    """Whether gradients of remote results are tracked."""
    returns_tracked: bool
    """Whether the caller gets remote results whose gradients are tracked, and may ask them for their gradients."""
    shares_nodes: bool
    """Whether remote results may share a node of autograd: only torch and this library see the tracked tensors."""
    grad_modes: tuple[bool, ...]
    """The grad modes that the graph sets, in order. The first one differs from the mode of the capture."""


def _program_of(module: CapturedModule, generated: Callable[..., Any]) -> _Program:
    """Return the forward that was generated from a module's graph, with the properties of the graph."""
    graph = module.graph
    positions = failure.program_order(list(graph.nodes))
    order = list(positions.values())
    in_backward = [position for node, position in positions.items() if _is_in_backward(node)]
    guarded = codegen if isinstance(codegen := graph._codegen, GuardedCodeGen) else None
    results = returned(graph)
    returns_tracked = any(map(_is_tracked, results))
    tracks = any(node.target in TRACKERS for node in graph.nodes)
    backends = filter(None, map(backend_of, graph.nodes))
    set_modes = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    return _Program(
        generated,
        guarded or parameters_of(generated),
        guarded,
        reordered=order != sorted(order),
        reorders_backward=in_backward != sorted(in_backward),
        compiles_backward=not all(each.keeps_weights for each in backends),
        returns_several=len(results) > 1,
        tracks=tracks,
        returns_tracked=returns_tracked,
        shares_nodes=tracks and not returns_tracked and next(own_code.running_own_code(module), None) is None,
        grad_modes=tuple(bool(node.args[0]) for node in set_modes if node.args),
    )


def _is_in_backward(node: Node) -> bool:
    """Return whether backward may run through a node, in an order that the node's place in the graph decides."""
    is_local = node.op in {"call_function", "call_method", "call_module"}
    return is_local and not (is_issue(node) or is_wait(node) or node.target in TRACKERS)


def _is_tracked(node: Node) -> bool:
    """Return whether a node's value is a tracked remote result, or one of its tensors."""
    if node.target is operator.getitem or node.target == "requires_grad_":
        given = node.args[0]
        return isinstance(given, Node) and _is_tracked(given)
    return node.target in TRACKERS


def _guard(program: _Program) -> Callable[..., Any]:
    @functools.wraps(program.generated)
    def forward(self: CapturedModule, *args: Any, **kwargs: Any) -> Any:
        grad_enabled, state = torch.is_grad_enabled(), self._fxlib
        if state.original is None:
            _check_alone(self, program, args, kwargs, grad_enabled=grad_enabled)
            if state.ahead is None:
                return self._run(args, kwargs, grad_enabled=grad_enabled)
            return self._run_after(state.ahead, args, kwargs, grad_enabled=grad_enabled)
        self._follow()
        if state.kept_code is program.generated.__code__ and _needs_no_graph(state):
            state.graphs.original_runs(self, "nothing was adopted", args, kwargs)
            return _run_original(self, state.original, "", args, kwargs)
        runs = state.graphs.fitting(self, args, kwargs, grad_enabled=grad_enabled)
        if isinstance(runs, CapturedModule):
            if state.ahead is None:
                return runs._run(args, kwargs, grad_enabled=grad_enabled)
            return runs._run_after(state.ahead, args, kwargs, grad_enabled=grad_enabled)
        if runs.warns:
            state.tell_of_original(type(self).__name__, runs.reason)
        state.graphs.original_runs(self, runs.reason, args, kwargs)
        if state.ahead is not None:
            state.ahead.passed_over(grad_enabled=grad_enabled)
        return _run_original(self, state.original, runs.reason, args, kwargs)

    made: Any = forward
    break_at(made)  # dynamo starts to compile in the generated code
    skip(made.__code__, inner=False)
    return made


def _needs_no_graph(state: ModuleState) -> bool:
    """Return whether nothing needs a graph: no variant, pipeline, recording or compiler."""
    alone = state.ahead is None and state.graphs.alone and current_recording() is None
    return alone and not is_compiled()


def _check_alone(
    self: CapturedModule, program: _Program, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool
) -> None:
    """Check a graph without an original: unfit inputs and lost gradients are refused, changed weights warned of."""
    state, name = self._fxlib, type(self).__name__
    if program.guarded is not None and (misfit := program.guarded.misfit(args, kwargs)):
        raise CaptureError(misfit, where=name, hint="The graph was exported for other inputs.")
    if grad_enabled and program.grad_modes and program.grad_modes[0] and not program.grad_modes[-1]:
        raise CaptureError(
            "it was captured without gradients, and would lose them behind its first block with gradients",
            where=name,
            hint="Run it under torch.no_grad(), or capture the model with gradients enabled.",
        )
    if stale := state.stale(self, grad_enabled=False):
        state.warn_once(f"{name} has no original to run, and goes on as it was: {stale}")


def _run_original(
    module: CapturedModule, original: nn.Module, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if original.training is not module.training:
        original.training = module.training
    if not module._program.tracks and holds_the_same(module, original):  # this is the usual case
        try:
            return original.forward(*args, **kwargs)
        finally:
            module._follow()  # the forward may have replaced something
    with lent(module, original):
        if not (module._program.tracks and torch.is_grad_enabled()):
            return original.forward(*args, **kwargs)
        with tracked_calls(module._fxlib.tape, contracts_in(module.graph), reason):
            return original.forward(*args, **kwargs)


def _shadowed(graph: Graph, code: str) -> str:
    """Return the name of an argument that hides a global which a graph's generated `code` uses; empty if none does.

    torch.fx gives the nodes of arguments such as `inf` or `slice` other names, and keeps the arguments' own in the
    signature, where they hide what the code means by them: `x.clamp(max=float("inf"))` is `x.clamp(max = inf)` there.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    renamed = {name for node in placeholders if (name := str(node.target).lstrip("*")) != node.name}
    renamed = {name for name in renamed if _may_be_used(name, code)}
    if not renamed:
        return ""
    (function,) = (each for each in ast.parse(textwrap.dedent(code)).body if isinstance(each, ast.FunctionDef))
    parts = (each for statement in function.body if not _is_entry(statement) for each in ast.walk(statement))
    used = {each.id for each in parts if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    return min(renamed & used, default="")


def _may_be_used(name: str, code: str) -> bool:
    """Return whether code uses a name besides taking it in, as far as the text tells without a complete parse."""
    alone, taken_in = re.compile(rf"(?<![\w.]){name}(?!\w)"), re.compile(rf"\s*(def .*|\w+ = {name})")
    return any(alone.search(line) and not taken_in.fullmatch(line) for line in code.splitlines() if name in line)


def _is_entry(statement: ast.stmt) -> bool:
    """Return whether a statement only takes arguments in, as `inf_1 = inf`, or by unpacking nested ones."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    flattens = isinstance(value, ast.Call) and ast.unparse(value.func) == "fx_pytree.tree_flatten_spec"
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    return flattens or all(isinstance(each, ast.Name) for each in values)
