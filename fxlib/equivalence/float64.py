"""The same computation in float64, against which two roundings of it can be told apart."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.equivalence.snapshot import GENERATOR, Batch, left_behind
from fxlib.errors import FxlibWarning, PassError
from fxlib.runtime import CapturedModule, is_call, is_issue
from fxlib.runtime.submodules import local_modules
from fxlib.utils.pytree import mapped

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128} | dict.fromkeys(
    (torch.float32, torch.float16, torch.bfloat16), torch.float64
)
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


def in_float64(module: nn.Module, batches: Sequence[Batch], *, grad: bool) -> dict[str, object]:
    """Run a copy of a module in float64, and return what it leaves behind, as `left_behind` does.

    Parameters, buffers, inputs and all dtypes that the program names are widened. A captured module runs its original,
    where it has one.

    Raises:
        PassError: the module calls servers, draws random numbers, cannot be copied, or cannot run in float64.
    """
    if isinstance(module, GraphModule) and any(is_call(node) or is_issue(node) for node in module.graph.nodes):
        raise _none("it calls servers, which would be sent other values")
    try:
        with warnings.catch_warnings(), _in_float64():
            warnings.simplefilter("ignore", FxlibWarning)  # that the original runs is what is wanted
            left = left_behind(_widened(module), _wide(batches), grad=grad)
    except Exception as error:
        raise _none(f"{type(error).__name__}: {error}") from error
    if left.error is not None:
        raise _none(f"{type(left.error).__name__}: {left.error}") from left.error
    if not torch.equal(torch.get_rng_state(), _generator(left.found)):
        raise _none("it draws random numbers, which are others in float64")
    return left.found


def _none(why: str) -> PassError:
    hint = "Leave `reference` out, or put the module in eval mode if it draws random numbers in training alone."
    return PassError(f"the first module has no float64 reference: {why}", where="verify", hint=hint)


def _generator(found: Mapping[str, object]) -> torch.Tensor:
    state = found[GENERATOR]
    assert isinstance(state, torch.Tensor)  # noqa: S101 - narrows the type
    return state


def _widened(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    originals = [copied._fxlib.original] if isinstance(copied, CapturedModule) else []
    copied._apply(lambda each: each.to(_WIDE.get(each.dtype, each.dtype)))
    for root in (copied, *(each for each in originals if each is not None)):
        for _, each in local_modules(root):
            vars(each).update({name: _wide(value) for name, value in vars(each).items() if _is_tensor(value)})
    return copied


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _wide(value: Any) -> Any:
    """Widen the tensors and dtypes of a nest; a tensor that takes a gradient stays one that does."""

    def wide(each: Any) -> Any:
        if isinstance(each, torch.dtype):
            return _WIDE.get(each, each)
        if isinstance(each, torch.Tensor) and each.dtype in _WIDE:
            return each.detach().to(_WIDE[each.dtype]).requires_grad_(each.requires_grad)
        return each

    return mapped(wide, value)


class _Widening(TorchFunctionMode):
    """Has a program that names a narrower dtype compute in float64 all the same."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        dtypes = pytree.tree_map_only(torch.dtype, _wide, (tuple(args), dict(kwargs or {})))
        return func(*dtypes[0], **dtypes[1])


@contextmanager
def _in_float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widening():
            yield
    finally:
        torch.set_default_dtype(default)
