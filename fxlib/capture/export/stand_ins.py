"""The exporter's stand-ins, which are tensors without values: they answer as in a run would, and none may be kept."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.capture import source
from fxlib.capture.handled_errors import OF_TYPES, capture_error, refuse_guarded
from fxlib.capture.intercept import Call, Interception, is_capturing
from fxlib.capture.recording.argument_assumptions import id_asked
from fxlib.capture.recording.recorder import Recorder
from fxlib.runtime.submodules import local_modules, local_tensors

_DROPOUTS = (torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout)
"""Operators that return the very tensor that they were given if nothing is to be dropped."""


class StandIns(TorchFunctionMode):
    """Answers questions about the stand-ins of one export as the tensors of a run would.

    As a mode, it ensures that the forward uses no other tensor that takes a gradient, since export makes constants of
    these, and does no work whose errors it handles.

    Args:
        module: the model.
        recorder: the recorder of what the model's forward reads.
        end: the frame at which the user's frames end.
    """

    def __init__(self, module: nn.Module, recorder: Recorder, end: FrameType) -> None:
        super().__init__()
        self._module, self._recorder, self._end = module, recorder, end
        self._state = tuple(local_tensors(module).values())
        self._own = {id(each) for each in self._state}
        self._stand_for: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, str] = {}
        """The names of the arguments, by the ids of their stand-ins; empty for a tensor inside a nested structure."""
        self._places: dict[int, tuple[str, tuple[tuple[str, Any], ...]]] = {}
        """The argument's name and the steps from there, for the stand-in of each argument or part of one, by id."""
        self.asked_classes: dict[tuple[str, tuple[tuple[str, Any], ...]], type] = {}
        """The classes of the arguments, and of the parts of arguments, that were asked for their class."""
        recorder.use_stand_ins(self)

    def install(self, interception: Interception) -> None:
        """Record each stand-in that the forward makes."""

        def replace(original: Call) -> Call:
            def make(tensor: FakeTensor, *args: Any, **kwargs: Any) -> None:
                original(tensor, *args, **kwargs)
                if self._recorder.active:
                    self._recorder.note_made(tensor, source.here())

            return make

        interception.function(FakeTensor.__init__, replace)
        for each in _DROPOUTS:  # for calls by torch.nn.functional; the mode sees the program's own calls
            interception.method(torch._VF, each.__name__, self._dropout)

    def _dropout(self, original: Call) -> Call:
        def drop(tensor: torch.Tensor, p: float, train: bool) -> Any:
            keeps_all = p == 0 or (not train and 0 < p <= 1)
            return tensor if keeps_all and self._recorder.active else original(tensor, p, train)

        return drop

    def begin(self, args: Any, kwargs: Any) -> None:
        """Record the stand-ins that the forward is given."""
        state = tuple(local_tensors(self._module).values())
        self._stand_for = {id(each): real for each, real in zip(state, self._state, strict=True)}
        given = _by_name(self._module, args) | dict(kwargs)
        self._inputs = {id(each): "" for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)}
        self._inputs |= {id(each): name for name, each in given.items() if id(each) in self._inputs}
        self._places = {
            id(each): (name, steps)
            for name, value in given.items()
            for path, each in pytree.tree_leaves_with_path(value)
            if isinstance(each, FakeTensor) and (steps := _steps(path)) is not None
        }
        for each in (*pytree.tree_leaves((args, kwargs)), *state):
            if isinstance(each, FakeTensor):
                self._recorder.note_made(each, "")

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled() and self._recorder.active and is_capturing():
            for each in pytree.tree_leaves((args, kwargs)):
                if type(each) in (torch.Tensor, nn.Parameter) and each.requires_grad and id(each) not in self._own:
                    raise capture_error(
                        "the forward uses a tensor that takes a gradient, and is neither an argument nor a parameter "
                        "of the model: export would lose the gradient",
                        hint="Register it, or the module that holds it, with the model (nn.ModuleList, nn.Parameter).",
                    )
        kwargs = kwargs or {}
        if self._recorder.active and is_capturing():
            torchs = not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))  # a custom one may be
            refuse_guarded(sys._getframe(1), self._end, never_raised=OF_TYPES, torchs=torchs)
            if func in _DROPOUTS:
                func = self._dropout(func)
                kwargs = {"tensor" if name == "input" else name: value for name, value in kwargs.items()}
        return func(*args, **kwargs)

    @staticmethod
    def class_of(tensor: torch.Tensor) -> type:
        """Return the class that a tensor has in a run."""
        if not isinstance(tensor, FakeTensor):
            return type(tensor)
        return nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor

    def class_asked(self, tensor: torch.Tensor) -> None:
        """Record that an argument was asked for its class, which may differ in a later run."""
        if (place := self._places.get(id(tensor))) is not None:
            self.asked_classes[place] = self.class_of(tensor)

    def asked_for_id(self, tensor: torch.Tensor) -> None:
        """Refuse to give a tensor's id, except for the model's own tensors: each run checks which are tied."""
        if isinstance(tensor, FakeTensor) and id(tensor) not in self._stand_for:
            raise id_asked()

    def argument(self, tensor: torch.Tensor) -> str:
        """Return the name of the argument that a tensor is, or "" if it is not an argument or only inside one."""
        return self._inputs.get(id(tensor), "")

    def real(self, tensor: torch.Tensor, attribute: str) -> torch.Tensor | None:
        """Return the model's tensor that is asked for an attribute that its class lacks, or None for a computed tensor.

        The question is refused if the answer would differ from a run's.
        """
        real = self._stand_for.get(id(tensor), None if isinstance(tensor, FakeTensor) else tensor)
        is_nested = self._inputs.get(id(tensor)) == ""
        if is_nested or (real is not None and hasattr(real, attribute) != hasattr(tensor, attribute)):
            raise capture_error(
                f"the forward asks a tensor for {attribute!r}, which somebody may give it, unseen by export",
                hint="Pass it as an argument, or keep it as an attribute of the model.",
            )
        return real

    def compared(self, one: Any, other: Any) -> None:
        """Refuse to compare two tensors by identity that may be one in a run, as where an operation changes nothing."""
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return
        known = [self._stand_for.get(id(each), each) for each in (one, other)]
        if known[0] is known[1] or (
            isinstance(one, FakeTensor) and isinstance(other, FakeTensor) and _alike(one, other)
        ):
            raise capture_error(
                "two traced values are compared by identity, and only a run knows whether they are one",
                hint="Move the decision out of the forward.",
            )
        for each in known:  # the forward asked whether two attributes of the model hold one tensor
            for _, owner in local_modules(self._module):
                for table in (owner._parameters, owner._buffers):
                    for name, value in table.items():
                        if value is not None and self._stand_for.get(id(value), value) is each:
                            self._recorder.hold_to(table, name)

    @staticmethod
    def asked_for_class(tensor: torch.Tensor) -> None:
        """Refuse to answer an attribute that tells the class, since it tells the stand-in's."""
        if isinstance(tensor, FakeTensor):
            raise capture_error("the forward asks for __class__ of a tensor", hint="Ask by type() or isinstance().")


def _by_name(module: nn.Module, args: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments by their names in an exported graph: those of `*x` are x_0, x_1 and so on."""
    found: dict[str, Any] = {}
    for index, each in enumerate(inspect.signature(module.forward).parameters.values()):
        if each.kind is each.VAR_POSITIONAL:
            return found | {f"{each.name}_{further}": value for further, value in enumerate(args[index:])}
        if index < len(args):
            found[each.name] = args[index]
    return found


def _steps(path: Sequence[Any]) -> tuple[tuple[str, Any], ...] | None:
    """Return the steps of a pytree path, or None if one of them leads to neither an element nor an attribute."""
    steps: list[tuple[str, Any]] = []
    for key in path:
        if isinstance(key, pytree.SequenceKey):
            steps.append(("getitem", key.idx))
        elif isinstance(key, pytree.MappingKey):
            steps.append(("getitem", key.key))
        elif isinstance(key, pytree.GetAttrKey):
            steps.append(("getattr", key.name))
        else:
            return None
    return tuple(steps)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two stand-ins share their memory and have equal metadata."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    return one.shape == other.shape and one.stride() == other.stride()


def let_go(made: Iterable[ExportedProgram | GraphModule]) -> None:
    """Drop the exporter's own references to stand-ins, so that any that are left are held by the program."""
    proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT.clear()
    for each in made:
        for node in each.graph.nodes:
            if isinstance(value := node.meta.get("val"), FakeTensor) and value.fake_mode.shape_env is not None:
                value.fake_mode.shape_env.tracked_fakes = None
            node.meta.clear()


def state_of(module: nn.Module, tensor: torch.Tensor) -> tuple[nn.Module, str, str] | None:
    """Return the module, table and name of the parameter or buffer that a tensor is, or None if it is neither."""
    for _, each in local_modules(module):
        for table in ("_parameters", "_buffers"):
            for name, value in getattr(each, table).items():
                if value is tensor or (value is not None and _same_memory(value, tensor)):
                    return each, table, name
    return None


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same except for their history."""
    alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return alike and one.numel() > 0 and one.data_ptr() == other.data_ptr()
