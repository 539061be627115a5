"""The captured module: a GraphModule that stands in for the user's own model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode
from typing_extensions import override

from fxlib.errors import CaptureError, WireError
from fxlib.runtime import failure, ops
from fxlib.runtime.companions import Companions, Expected
from fxlib.runtime.conditions import Conditions, parameters_of
from fxlib.runtime.flight import THREAD, Flight
from fxlib.runtime.guards import GuardedCodeGen
from fxlib.runtime.record import current_recording
from fxlib.runtime.reliance import Mark
from fxlib.runtime.shadows import shadowed
from fxlib.runtime.state import Mirror, constants_of, lend_state, lent, share_state


class CapturedModule(GraphModule):
    """A model as a graph in which every remote call is one node, and a drop-in for the model itself.

    It has the submodules, parameters and buffers of `root` (the same objects, under the same `state_dict` keys), its
    hooks and its training flag; what else is asked of it, `original` answers. Where the `Conditions` of the
    capture do not hold, `original`'s own forward runs. Without an `original`, as in a trial, the graph always runs.

    Args:
        root: the model that was traced, another CapturedModule, or a mapping from the graph's targets to objects.
        graph: the graph to run. A graph belongs to one module: copy one that has an owner.
        original: the user's model; by default that of `root`, where this is a CapturedModule.
        fixed_looks: whether the graph has fixed what the original's parameters and buffers look like: dtypes, shapes.
            A graph that was exported has, in any case.
        class_name: the name in listings; by default that of the user's model.
    """

    def __init__(
        self,
        root: nn.Module | Mapping[str, Any],
        graph: Graph,
        *,
        original: nn.Module | None = None,
        fixed_looks: bool = False,
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
            conditions = Conditions(self, original, grad_enabled=torch.is_grad_enabled())
            exported = isinstance(graph._codegen, GuardedCodeGen)
            if original is not None and (fixed_looks or exported):
                conditions.fix_looks(original, strides=exported)
        companions = Companions(conditions, original, constants=constants_of(graph))
        if isinstance(root, CapturedModule):
            companions.reliance = root._fxlib.reliance.twin()
        companions.reliance.read(self, graph)
        if original is not None:
            companions.mirror = Mirror(original)
        # Not through `__setattr__`, which looks for modules among the values.
        self.__dict__["_fxlib"] = companions
        if original is not None:
            del self.__dict__["_is_full_backward_hook"]  # what the original says holds for the hooks of both

    _fxlib: Companions

    def with_graph(self, graph: Graph) -> CapturedModule:
        """Return a sibling that runs another graph over the same state, under the same conditions."""
        return CapturedModule(self, graph, class_name=type(self).__name__)

    def computed_from(self, marks: Mapping[str, Mark]) -> None:
        """Take what the graph holds for computed from the weights as they were when `marks` were noted of them."""
        self._fxlib.reliance.since(marks)

    @override
    def recompile(self) -> PythonCode:
        """Generate the forward anew, after the graph was edited.

        Raises:
            CaptureError: a name makes the code mean something else, or nothing.
        """
        try:
            code = super().recompile()
        except SyntaxError as error:
            problem = f"a name in it cannot stand in code: {(error.text or '').strip()!r}"
            raise CaptureError(problem, where=type(self).__name__, hint="Rename the module.") from error
        if hidden := shadowed(self.graph, self._code):
            problem = f"the argument {hidden!r} hides what the generated code calls by its name"
            raise CaptureError(problem, where=type(self).__name__, hint="Rename the argument.")
        cls: Any = type(self)
        inputs = frozenset(str(node.target) for node in self.graph.nodes if node.op == "placeholder")
        order = list(failure.program_order(list(self.graph.nodes)).values())
        guarded = codegen if isinstance(codegen := self.graph._codegen, GuardedCodeGen) else None
        cls.forward = _guard(cls.forward, inputs, guarded, reordered=order != sorted(order))
        # GraphModule's own `__call__` prints failures of generated code and cuts their tracebacks off.
        del cls.__call__
        if (companions := self.__dict__.get("_fxlib")) is not None:
            companions.constants = constants_of(self.graph)
            companions.reliance.read(self, self.graph)
        return code

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            companions = self.__dict__.get("_fxlib")
            if companions is None or companions.original is None or name.startswith("__"):
                raise
            return getattr(companions.original, name)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedModule:
        twin: CapturedModule = type(self).__new__(type(self))
        type(twin).__name__ = type(self).__name__
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        twin.graph = twin.__dict__["_graph"]
        return twin

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
    def __setattr__(self, name: str, value: Any) -> None:
        companions = self.__dict__.get("_fxlib")
        # A draft of a pass has the companions of the module that it was made from.
        if companions is None or companions.mirror is None or companions.conditions.module is not self:
            super().__setattr__(name, value)
            return
        held = companions.original.__dict__
        known = name in self.__dict__ or isinstance(getattr(type(self), name, None), property)
        if name in held and not known:
            companions.mirror.replace(name, value)
            return
        super().__setattr__(name, value)
        if name in companions.constants or any(
            name in held[table] for table in ("_parameters", "_buffers", "_modules")
        ):
            companions.mirror.replace(name, value)

    @override
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._follow()
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        companions = self._fxlib
        if companions.original is not None and companions.mirror is not None:
            lend_state(self, companions.original)
            companions.mirror.note()
        return self

    @override
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
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

    def _follow(self) -> None:
        companions = self._fxlib
        if companions.mirror is not None:
            companions.mirror.follow(self, companions.constants)


def outdated(module: nn.Module) -> str:
    """Return what has become of the weights that values in a module's graph were computed from; empty if nothing."""
    if not isinstance(module, CapturedModule):
        return ""
    module._follow()
    return module._fxlib.stale(module, grad_enabled=False)


def _hindrance(
    self: CapturedModule, expected: Expected, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad_enabled: bool
) -> str:
    """Return why the graph may not run for this call, in words; empty if it may."""
    companions = self._fxlib
    if broken := companions.broken(grad_enabled=grad_enabled):
        return broken
    if changed := companions.conditions.other_looks():
        companions.tell_of_original(type(self).__name__, changed)
        return changed
    if stale := companions.stale(self, grad_enabled=grad_enabled):
        if not grad_enabled:
            companions.tell_of_original(type(self).__name__, stale)
        return stale
    if misfit := companions.misfit(expected, args, kwargs):
        companions.tell_of_original(type(self).__name__, misfit)
    return misfit


def _guard(
    generated: Callable[..., Any], inputs: frozenset[str], guarded: GuardedCodeGen | None, *, reordered: bool
) -> Callable[..., Any]:
    code: Any = generated.__code__
    expected: Expected = guarded or parameters_of(generated, inputs)

    @functools.wraps(generated)
    def forward(self: CapturedModule, *args: Any, **kwargs: Any) -> Any:
        grad_enabled, companions = torch.is_grad_enabled(), self._fxlib
        companions.tape.begin()
        if companions.original is not None:
            self._follow()
            broken = _hindrance(self, expected, args, kwargs, grad_enabled=grad_enabled)
            if not broken and reordered and grad_enabled:
                broken = companions.conditions.reordered((*args, *kwargs.values()))
            if broken:
                return _run_original(self, companions.original, broken, args, kwargs)
        else:
            _check_alone(self, guarded, args, kwargs)
        recording = current_recording()
        run = generated if recording is None else recording.instrument(self, generated)
        outer, flight = THREAD.flight, Flight(fans=companions.tape.fans())
        THREAD.flight = flight
        try:
            result = run(self, *args, **kwargs)
            if flight.refused:  # a call that could not be issued, and that nobody waited for
                raise flight.refused[0]
        except BaseException as error:
            stop = failure.locate(self, code, error)
            # An interrupt is the program's at once: nothing is waited for.
            earlier = failure.earlier_error(self, stop) if stop is not None and isinstance(error, Exception) else None
            if stop is not None:
                failure.leave_modes(stop)
            torch.set_grad_enabled(grad_enabled)
            if earlier is not None:
                raise earlier from None
            raise
        finally:
            THREAD.flight = outer
        if grad_enabled is not companions.conditions.grad_enabled:  # the graph's blocks end in the mode of its capture
            torch.set_grad_enabled(grad_enabled)
        if flight.tracked:
            companions.tape.add(flight.tracked)
        return result

    return forward


def _check_alone(
    self: CapturedModule, guarded: GuardedCodeGen | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Say what a graph without an original is not for: inputs are refused, and of weights it is warned."""
    companions, name = self._fxlib, type(self).__name__
    if guarded is not None and (misfit := guarded.misfit(args, kwargs)):
        raise CaptureError(misfit, where=name, hint="The graph was exported for other inputs.")
    if stale := companions.stale(self, grad_enabled=False):
        companions.warn_once(f"{name} has no original to run, and goes on as it was: {stale}")


def _run_original(
    module: CapturedModule, original: nn.Module, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if torch.is_grad_enabled() and any(node.target in ops.TRACKERS for node in module.graph.nodes):
        module._fxlib.tape.untracked = reason
    original.training = module.training
    with lent(module, original):
        return original.forward(*args, **kwargs)
