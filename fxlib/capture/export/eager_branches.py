"""What a program under export is told when it asks whether it is being exported: no, as in the runs that follow.

Programs take other branches where they are compiled: other kernels, materialized masks, copies, whose results differ in
their last bits from eager's. The graph is to be the program that eager runs. The exporter's own machinery, which asks
the same functions, gets the true answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses import FakeTensor

from fxlib.capture import source
from fxlib.capture.intercept import Call, Interception, is_capturing

_TORCH = Path(torch.__file__).parent
_FRONT = str(_TORCH / "nn") + "/"
"""Modules and functions of torch that a program calls: they decide as the program does."""
_RELAYS = tuple(str(_TORCH / name) for name in ("_utils.py", "_dynamo/external_utils.py", "compiler/__init__.py"))
_QUESTIONS = (torch.compiler.is_compiling, torch.compiler.is_exporting, torch.compiler.is_dynamo_compiling)


def install(interception: Interception) -> None:
    """Let the program under export hear that nothing is compiled or exported."""
    for question in _QUESTIONS:
        interception.function(question, _denied)


@contextmanager
def real_looking_tensors() -> Iterator[None]:
    """Let a program that looks for the exporter's stand-ins, by `torch._subclasses.FakeTensor`, find none."""
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
    """Whether the frame is the program's own, or of what it calls of torch.nn."""
    while frame is not None and frame.f_code.co_filename in _RELAYS:
        frame = frame.f_back
    return frame is not None and (source.asked_by_users(frame) or frame.f_code.co_filename.startswith(_FRONT))


class _Unasked(type(FakeTensor)):  # type: ignore[misc]
    """Answers what is a stand-in of the exporter's: to a program under export, nothing is."""

    def __instancecheck__(cls, value: object) -> bool:
        seen = isinstance(value, FakeTensor)
        return seen and not (is_capturing() and asked_by_program(sys._getframe(1)))

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, FakeTensor)


class _Unseen(FakeTensor, metaclass=_Unasked):
    """Stands for the class of the exporter's stand-ins."""
