"""Restrict `torch.compile` of a captured module that calls servers to the operators between its calls.

TorchDynamo compiles frame by frame, and cannot follow this runtime: it would break graphs inside of it, and warn of
what it does not know. So the runtime's functions carry the two marks by which TorchDynamo leaves functions alone: an
attribute of functions that it would inline, and the strategy of code that it would compile as a frame.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
_dynamo: Any = torch._C._dynamo.eval_frame


def is_compiled() -> bool:
    """Return whether TorchDynamo looks at the frames that this thread begins."""
    return _dynamo.get_eval_frame_callback() is not None


def outside_of_dynamo(function: F) -> F:
    """Have TorchDynamo break its graph at a call of a function, and compile nothing that the function does."""
    break_at(function)
    skip(function.__code__)
    return function


def break_at(function: Callable[..., Any]) -> None:
    """Have TorchDynamo break its graph at a call of a function, and not follow it."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, "it is a part of fxlib's runtime"


def skip(code: CodeType, *, inner: bool = True) -> None:
    """Keep TorchDynamo from compiling frames of this code and, if `inner`, the frames that they begin."""
    action, other = _dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT
    _dynamo.set_code_exec_strategy(code, _dynamo._FrameExecStrategy(action, action if inner else other))


skip(is_compiled.__code__)
