"""The captured module: a GraphModule that stands in for the user's own model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode
from typing_extensions import override

from fxlib.errors import WireError
from fxlib.runtime import failure, ops
from fxlib.runtime.flight import THREAD, Flight, Tape
from fxlib.runtime.record import current_recording
from fxlib.runtime.walk import local_modules

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class Conditions:
    """What a capture is true of: the training flags of all modules, and grad mode."""

    def __init__(self, module: nn.Module, *, grad_enabled: bool) -> None:
        """Note the present state of `module` and all that it holds."""
        self.flags = [(each, each.training) for _, each in local_modules(module)]
        self.grad_enabled = grad_enabled

    def rebased(self, module: nn.Module) -> Conditions:
        """Return the same conditions for another root over the same children."""
        twin = copy.copy(self)
        twin.flags = [(module, self.flags[0][1]), *self.flags[1:]]
        return twin

    def broken(self, *, grad_enabled: bool) -> str:
        """Return which of them does not hold now, in words; empty if all do."""
        for module, flag in self.flags:
            if module.training is not flag:
                return f"the training flag of {type(module).__name__} is {module.training}, and was {flag} at capture"
        if grad_enabled is not self.grad_enabled:
            return f"grad mode is {'on' if grad_enabled else 'off'}, and was not at capture"
        return ""


@dataclass(slots=True)
class Companions:
    """What a captured module keeps beside its graph and its state, under the one name that a model will not use."""

    conditions: Conditions
    original: nn.Module | None
    """The user's own model; None in a trial."""
    tape: Tape = field(default_factory=Tape)
    """What `fxlib.push_gradients` will push."""


class CapturedModule(GraphModule):
    """A model as a graph in which every remote call is one node, and a drop-in for the model itself.

    It has the submodules, parameters and buffers of `root` (the same objects, under the same `state_dict` keys), its
    hooks and its training flag; what else is asked of it, `original` answers. Where training flags or grad mode differ
    from those at capture, `original`'s own forward runs. Without an `original`, as in a trial, the graph always runs.

    Args:
        root: the model that was traced, another CapturedModule, or a mapping from the graph's targets to objects.
        graph: the graph to run. A graph belongs to one module: copy one that has an owner.
        original: the user's model; by default that of `root`, where this is a CapturedModule.
        class_name: the name in listings; by default that of the user's model.
    """

    def __init__(
        self,
        root: nn.Module | Mapping[str, Any],
        graph: Graph,
        *,
        original: nn.Module | None = None,
        class_name: str | None = None,
    ) -> None:
        """Take over `root`'s state and generate the forward."""
        named = original if original is not None else root
        default = type(named).__name__ if isinstance(named, nn.Module) else "CapturedModule"
        super().__init__(root if isinstance(root, nn.Module) else dict(root), graph, class_name or default)
        if isinstance(root, nn.Module):
            _share_state(root, self)
        conditions = Conditions(self, grad_enabled=torch.is_grad_enabled())
        if isinstance(original, CapturedModule):
            original = original._fxlib.original
        if isinstance(root, CapturedModule):
            self.meta.update(root.meta)
            conditions = root._fxlib.conditions.rebased(self)
            original = original if original is not None else root._fxlib.original
        # Not through `__setattr__`, which looks for modules among the values.
        self.__dict__["_fxlib"] = Companions(conditions, original)

    _fxlib: Companions

    def with_graph(self, graph: Graph) -> CapturedModule:
        """Return a sibling that runs another graph over the same state, under the same conditions."""
        return CapturedModule(self, graph, class_name=type(self).__name__)

    @override
    def recompile(self) -> PythonCode:
        """Generate the forward anew, after the graph was edited."""
        code = super().recompile()
        cls: Any = type(self)
        cls.forward = _guard(cls.forward)
        # GraphModule's own `__call__` prints failures of generated code and cuts their tracebacks off.
        del cls.__call__
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
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        original = self._fxlib.original
        if original is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        else:
            _lend_state(self, original)
            original._save_to_state_dict(destination, prefix, keep_vars)

    @override
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        original = self._fxlib.original
        if original is None:
            super()._load_from_state_dict(*args, **kwargs)
        else:
            _lend_state(self, original)
            original._load_from_state_dict(*args, **kwargs)
            _lend_state(original, self)


def _guard(generated: Callable[..., Any]) -> Callable[..., Any]:
    code: Any = generated.__code__

    @functools.wraps(generated)
    def forward(self: CapturedModule, *args: Any, **kwargs: Any) -> Any:
        grad_enabled, companions = torch.is_grad_enabled(), self._fxlib
        if companions.original is not None and (broken := companions.conditions.broken(grad_enabled=grad_enabled)):
            return _run_original(self, companions.original, broken, args, kwargs)
        recording = current_recording()
        run = generated if recording is None else recording.instrument(self, generated)
        outer, flight = THREAD.flight, Flight()
        THREAD.flight = flight
        try:
            result = run(self, *args, **kwargs)
            if flight.refused:  # a call that could not be issued, and that nobody waited for
                raise flight.refused[0]
        except Exception as error:
            stop = failure.locate(self, code, error)
            earlier = failure.earlier_error(self, stop) if stop is not None else None
            if stop is not None:
                failure.leave_modes(stop)
            torch.set_grad_enabled(grad_enabled)
            if earlier is not None:
                raise earlier from None
            raise
        finally:
            THREAD.flight = outer
        if flight.tracked:
            companions.tape.add(flight.tracked)
        return result

    return forward


def _run_original(
    module: CapturedModule, original: nn.Module, reason: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if torch.is_grad_enabled() and any(node.target is ops.track_gradient for node in module.graph.nodes):
        module._fxlib.tape.untracked = reason
    original.training = module.training
    _lend_state(module, original)
    try:
        return original.forward(*args, **kwargs)
    finally:
        _lend_state(original, module)


def _share_state(root: nn.Module, module: nn.Module) -> None:
    """Give `module` the state of `root` as `root` has it: same objects, order, persistence, plain tensors and hooks."""
    for table in ("_parameters", "_buffers", "_modules"):
        own, theirs = module.__dict__[table], root.__dict__[table]
        plain = {name: value for name, value in own.items() if name not in theirs and name in root.__dict__}
        extra = {name: value for name, value in own.items() if name not in theirs and name not in plain}
        own.clear()
        own.update({**theirs, **extra})
        module.__dict__.update(plain)
    module._non_persistent_buffers_set = set(root._non_persistent_buffers_set)
    module.__dict__.update({name: copy.copy(root.__dict__[name]) for name in _HOOKS})


def _lend_state(source: nn.Module, target: nn.Module) -> None:
    """Let `target` see the parameters and buffers that `source` holds now: `to()` and others replace the objects."""
    for table in ("_parameters", "_buffers"):
        own, theirs = target.__dict__[table], source.__dict__[table]
        own.update({name: theirs[name] for name in own if name in theirs})
