"""Refuse or answer what an export would get wrong: queries and settings of autograd, and writes to constants.

Programs take other branches when they are compiled: other kernels, materialized masks and copies, whose results differ
from eager's in their last bits. The graph is to be the program that eager runs, so a program that asks whether it is
being exported is told that it is not. The exporter's own machinery calls the same functions, and gets the true answer.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.capture import source
from fxlib.capture.export.value_checks import ValueChecks
from fxlib.capture.handled_errors import capture_error
from fxlib.capture.intercept import Call, Interception, is_capturing
from fxlib.capture.recording.recorder import Recorder
from fxlib.capture.trace.values import ARITHMETIC
from fxlib.errors import CaptureError

_DETACH = "Use detach(), which shares the memory, too."
_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in ARITHMETIC)})
_ELEMENTS = frozenset(
    {"__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "__repr__", "__format__"}
    | {"item", "tolist", "equal", "allclose", "is_nonzero"}
)
"""Names of the methods that ask for the elements of tensors."""
_COMPUTED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Classes of the values that every run computes anew."""
_SQUEEZES = frozenset({"squeeze", "squeeze_", "squeeze_copy"})
_HISTORY = frozenset({"grad", "grad_fn", "is_leaf", "_base", "_version", "output_nr"})


class ExportChecks(TorchFunctionMode):
    """Answers the questions that the user's code asks tensors: whether they take a gradient, and whether they are true.

    It refuses what no graph can hold.
    """

    def __init__(self, values: ValueChecks, recorder: Recorder | None) -> None:
        super().__init__()
        self.values, self._recorder = values, recorder
        self.asked = False
        """Whether the program may decide by whether its inputs take gradients."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__ and is_capturing() and asked_by_program(_caller()):
            answer = self.values.answer(args[0])
            if answer is not None:
                return answer
        method, name = _called(func)
        if name and is_capturing():
            if source.asked_by_users(_caller()):
                self._check(method, name, args, kwargs)
            elif method == "__get__" and name == "requires_grad" and asked_by_program(_caller()):
                self.asked = True  # attention decides by it, and another kernel rounds otherwise
        if getattr(func, "__name__", "") in _SQUEEZES and is_capturing():
            _check_squeezed(*args, **kwargs)
        for each in _written(func, args, kwargs) if is_capturing() else ():
            if type(each) in (torch.Tensor, torch.nn.Parameter):  # the exporter's stand-ins have classes of their own
                raise _kept()
            if self._recorder is not None and isinstance(each, torch.Tensor) and self._recorder.shares_memory(each):
                raise capture_error(
                    "the forward writes to a tensor that shares its memory with an object of Python's",
                    hint="Write to a copy: torch.tensor(values), or tensor.clone().",
                )
        result = func(*args, **kwargs)
        if self._recorder is not None and getattr(func, "__name__", "") in _ELEMENTS and is_capturing():
            known = [each for each in pytree.tree_leaves(result) if not isinstance(each, _COMPUTED)]
            for tensor in self.values.constants_behind((args, kwargs)) if known else ():
                self._recorder.value_asked(tensor)
        return result

    def _check(self, method: str, name: str, args: Any, kwargs: Any) -> None:
        if name == "data":
            raise capture_error("the forward uses .data of a tensor, which export cannot record", hint=_DETACH)
        if name in _HISTORY:
            raise capture_error(
                f"the forward asks for .{name} of a tensor, which export cannot answer as a run does",
                hint="Keep it out of the forward.",
            )
        if method == "__get__":
            self.asked = True
        elif (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)) is not args[0].requires_grad:
            raise capture_error(
                "the forward sets requires_grad of a tensor, which export would lose",
                hint="Set it before the forward.",
            )


def refuse_writes(graph: Graph, constants: Collection[str]) -> None:
    """Refuse a graph that writes to a constant of the program, or to a view of one.

    Args:
        graph: the graph of an export.
        constants: the names of the attributes that hold the constants.

    Raises:
        CaptureError: the graph writes to one.
    """
    held = {node for node in graph.nodes if node.op == "get_attr" and node.target in constants}
    for node in graph.nodes:
        for argument in node.target._schema.arguments if isinstance(node.target, OpOverload) else ():
            value = node.kwargs.get(argument.name, node.args[0] if node.args else None)
            if value not in held or argument.alias_info is None:
                continue
            if argument.alias_info.is_write:
                raise _kept(str(node.meta.get("source", "")))
            held.add(node)


def _check_squeezed(input: torch.Tensor, dim: Any = None, *more: int) -> None:  # noqa: A002 - torch's name
    """Refuse to squeeze a dimension of which only a run knows whether its size is 1; export takes it for another."""
    dims = range(input.dim()) if dim is None else (*dim, *more) if isinstance(dim, (tuple, list)) else (dim, *more)
    for size in [input.shape[each] for each in dims] if input.dim() else ():
        if free_unbacked_symbols(size) and not any(map(statically_known_true, (size == 1, size != 1))):
            raise capture_error(
                "the forward squeezes a tensor whose size depends on values, and may be 1 or not",
                hint="Name dimensions whose sizes are known, as in squeeze(-1).",
            )


def _kept(where: str = "") -> CaptureError:
    return capture_error(
        "the forward writes to a tensor that is neither an argument, nor a parameter, nor a buffer",
        hint="Register it as a buffer of the model.",
        where=where,
    )


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the arguments that a function writes to, as its name tells."""
    name = getattr(func, "__name__", "")
    if args and (name in _WRITES or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")):
        yield args[0]
    if (out := kwargs.get("out")) is not None:
        yield from out if isinstance(out, (tuple, list)) else (out,)


def _called(func: Any) -> tuple[str, str]:
    """Return how a function accesses a tensor's attribute, and the attribute's name; empty strings if it does not."""
    if func is torch.Tensor.requires_grad_:
        return "", "requires_grad"
    method = getattr(func, "__name__", "")
    name = getattr(getattr(func, "__self__", None), "__name__", "") if method in ("__get__", "__set__") else ""
    return (method, name) if name in _HISTORY | {"data", "requires_grad"} else ("", "")


def _caller() -> Any:
    """Return the frame that calls the function, past the frames of other modes."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


_TORCH = Path(torch.__file__).parent
_FRONT = str(_TORCH / "nn") + "/"
"""The folder of torch's modules and functions, whose decisions count as the program's own."""
_RELAYS = tuple(str(_TORCH / name) for name in ("_utils.py", "_dynamo/external_utils.py", "compiler/__init__.py"))
_QUESTIONS = (torch.compiler.is_compiling, torch.compiler.is_exporting, torch.compiler.is_dynamo_compiling)


def answer_as_eager(interception: Interception) -> None:
    """Let the exported program find that nothing is being compiled or exported."""
    for question in _QUESTIONS:
        interception.function(question, _denied)


@contextmanager
def real_looking_tensors() -> Iterator[None]:
    """Let `isinstance` with `torch._subclasses.FakeTensor` find no stand-ins in the exported program."""
    held: Any = torch._subclasses
    before = held.FakeTensor
    held.FakeTensor = _Unseen
    try:
        yield
    finally:
        held.FakeTensor = before


def _denied(original: Call) -> Call:
    return lambda: not asked_by_program(sys._getframe(3)) and original()


def asked_by_program(frame: FrameType | None) -> bool:
    """Return whether the frame is the program's own, or that of a torch.nn function that the program calls."""
    while frame is not None and frame.f_code.co_filename in _RELAYS:
        frame = frame.f_back
    return frame is not None and (source.asked_by_users(frame) or frame.f_code.co_filename.startswith(_FRONT))


class _Unasked(type(FakeTensor)):  # type: ignore[misc]
    """Answers which objects are the exporter's stand-ins: to a program under export, none are."""

    def __instancecheck__(cls, value: object) -> bool:
        seen = isinstance(value, FakeTensor)
        return seen and not (is_capturing() and asked_by_program(sys._getframe(1)))

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, FakeTensor)


class _Unseen(FakeTensor, metaclass=_Unasked):
    """Replaces the class of the exporter's stand-ins in the program."""
