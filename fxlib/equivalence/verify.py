"""Checks whether two modules are the same program: runs both on the same state and inputs, and compares all effects.

It compares outputs, errors, the inputs after the run, gradients of parameters and inputs, parameters and buffers after
the run, and the random generator. It does not compare servers: a module that calls servers needs them to answer alike,
and a trial of the service also compares their state. To judge two roundings of one computation, both can be compared
with the same in float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.capture.coerce import Model, as_module
from fxlib.equivalence.node_trace import location_of_failure
from fxlib.equivalence.snapshot import RANDOM_GENERATOR, CallArguments, left_behind
from fxlib.errors import FxlibWarning, PassError
from fxlib.runtime import CapturedModule, is_call, is_issue
from fxlib.runtime.guards.conditions import parameters_of
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.submodules import local_modules
from fxlib.utils.compare import Tolerance, difference, largest_difference, relative_error, same_bits
from fxlib.utils.pytree import mapped

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128} | dict.fromkeys(
    (torch.float32, torch.float16, torch.bfloat16), torch.float64
)
_CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
_COPIES = frozenset({torch.Tensor.__deepcopy__})


def in_float64(module: nn.Module, batches: Sequence[CallArguments], *, grad: bool) -> dict[str, object]:
    """Run a copy of a module in float64, and return its effects, as `left_behind` does.

    Parameters, buffers, inputs and all dtypes that the program names are widened. A captured module runs its original,
    if it has one.

    Raises:
        PassError: the module calls servers, draws random numbers, cannot be copied, or cannot run in float64.
    """
    if isinstance(module, GraphModule) and any(is_call(node) or is_issue(node) for node in module.graph.nodes):
        raise _none("it calls servers, which would receive other values")
    try:
        with warnings.catch_warnings(), _in_float64():
            warnings.simplefilter("ignore", FxlibWarning)  # the original is meant to run
            left = left_behind(_widened(module), _wide(batches), grad=grad)
    except Exception as error:
        raise _none(f"{type(error).__name__}: {error}") from error
    if left.error is not None:
        raise _none(f"{type(left.error).__name__}: {left.error}") from left.error
    if not torch.equal(torch.get_rng_state(), _generator(left.found)):
        raise _none("it draws random numbers, which differ in float64")
    return left.found


def _none(why: str) -> PassError:
    hint = "Leave `reference` out, or put the module in eval mode if it draws random numbers only in training."
    return PassError(f"the first module has no float64 reference: {why}", where="verify", hint=hint)


def _generator(found: Mapping[str, object]) -> torch.Tensor:
    state = found[RANDOM_GENERATOR]
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
    """Widen the tensors and dtypes of a nested value; a tensor that takes a gradient keeps doing so."""

    def wide(each: Any) -> Any:
        if isinstance(each, torch.dtype):
            return _WIDE.get(each, each)
        if isinstance(each, torch.Tensor) and each.dtype in _WIDE:
            return each.detach().to(_WIDE[each.dtype]).requires_grad_(each.requires_grad)
        return each

    return mapped(wide, value)


class _Widening(TorchFunctionMode):
    """Makes a program that names a narrower dtype compute in float64."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        if func in _COPIES:  # which are handed all that was copied before
            return func(*args, **kwargs or {})
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference: where it is ("output[0]", "grad of bottom.0.weight", ...), and how the two differ."""

    where: str
    how: str

    def __str__(self) -> str:
        """Return the difference as one line."""
        return f"{self.where}: {self.how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far one tensor of the second module is from the first one's, and both from the reference, if there is one.

    `absolute` is the largest difference of two elements. The others divide such a difference by the largest magnitude
    of the tensor that it is measured against; they are infinite if only one side is not finite.
    """

    where: str
    absolute: float
    relative: float
    first_from_reference: float | None = None
    second_from_reference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of a comparison; true if nothing differs beyond the bound."""

    differences: tuple[Difference, ...]
    compared: tuple[str, ...]
    """Names of everything that was compared."""
    distances: tuple[Distance, ...] = ()
    """Distances of the floating-point tensors whose bits differ and, with a reference, of all tensors in it."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    notes: tuple[str, ...] = ()
    """Further remarks on the comparison, as sentences."""

    @property
    def max_absolute_error(self) -> float:
        """The largest difference of two elements; 0 if all bits are the same."""
        return max((each.absolute for each in self.distances), default=0.0)

    @property
    def max_relative_error(self) -> float:
        """The largest error of a tensor in the maximum norm; 0 if all bits are the same."""
        return max((each.relative for each in self.distances), default=0.0)

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        """Return the differences, one per line, and the largest errors of the two modules."""
        known = len(self.compared)
        head = f"the same in {known} respects, {self.tolerance}"
        if self.differences:
            head = f"{len(self.differences)} of {known} respects differ, compared {self.tolerance}"
        return "\n".join([head, *(f"  {each}" for each in self.differences), *self._errors(), *self.notes])

    def _errors(self) -> Iterator[str]:
        if self.max_absolute_error > 0:
            worst = max(self.distances, key=lambda each: each.relative)
            yield f"largest error: {self.max_absolute_error:.3g}, relative {worst.relative:.3g} ({worst.where})"
        known = [each for each in self.distances if each.first_from_reference is not None]
        if known:
            first = max(each.first_from_reference or 0.0 for each in known)
            second = max(each.second_from_reference or 0.0 for each in known)
            yield f"relative error against float64: {first:.3g} of the first module, {second:.3g} of the second"


def verify(
    a: Model,
    b: Model,
    inputs: Sequence[object],
    *more: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    grad: bool = True,
    reference: Literal["float64"] | None = None,
) -> Verification:
    """Run `a` and `b` on copies of `inputs` and compare them bit for bit, or within a tolerance.

    Both start from the present parameters, buffers and generator state, which are restored at the end.

    Args:
        a: a module of any kind, or an exported program.
        b: another one.
        inputs: the arguments of a call.
        more: the arguments of further calls, which both modules make one after another.
        kwargs: keyword arguments of every call.
        rtol: how far an element may be off, relative to `b`'s; if this and `atol` are 0, the bits must be the same.
        atol: how far an element may be off in addition.
        grad: whether to compare gradients, too, of all outputs that take one, with respect to parameters and to inputs
            that require it.
        reference: "float64": also measure how far both are from the result of `a` in float64.

    Raises:
        PassError: inputs are a lone tensor, a tolerance is negative, the modules do not run on the inputs (both raise
            the same error; the message names node, module path and line as far as they are known), or there is no
            reference.
    """
    batches, a, b = batches_of(inputs, *more, kwargs=kwargs), as_module(a), as_module(b)
    tolerance = Tolerance(rtol=rtol, atol=atol)
    first, second = (left_behind(module, batches, grad=grad) for module in (a, b))
    if first.error is not None and first.failure == second.failure:
        raise PassError(
            f"neither module runs on these inputs: {type(first.error).__name__}: {first.error}",
            where=location_of_failure(a, batches, first.error, grad=grad) or "verify",
            hint="Pass the arguments of one call, as the model takes them.",
        ) from first.error
    exact = {} if reference is None else in_float64(a, batches, grad=grad)
    one, other = first.found, second.found
    return Verification(
        differences=tuple(_compare(one, other, tolerance)),
        compared=tuple(one | other),
        distances=tuple(_distances(one, other, exact)),
        tolerance=tolerance,
        notes=tuple(
            f"the {which} module's original forward ran, not its graph: {why}"
            for which, module in (("first", a), ("second", b))
            if (why := stands_in(module, batches, grad=grad))
        ),
    )


def batches_of(*batches: Sequence[object], kwargs: Mapping[str, object] | None) -> tuple[CallArguments, ...]:
    """Return the calls that arguments describe.

    Raises:
        PassError: a single tensor was passed instead of a sequence.
    """
    if any(isinstance(each, torch.Tensor) for each in batches):
        raise PassError("inputs is one tensor", where="verify", hint="Pass a sequence of the arguments: [x].")
    return tuple((tuple(each), dict(kwargs or {})) for each in batches)


def stands_in(module: nn.Module, batches: Sequence[CallArguments] = (), *, grad: bool) -> str:
    """Return why a captured module runs its original instead of its graph, in words; empty if it does not."""
    if not isinstance(module, CapturedModule) or module._fxlib.original is None:
        return ""
    state, codegen = module._fxlib, module.graph._codegen
    given = [each for args, kwargs in batches for each in (*args, *kwargs.values())]
    why = state.broken(grad_enabled=grad) or state.conditions.changed_metadata(given)
    if why := why or state.stale(module, grad_enabled=grad):
        return why
    expected = codegen if isinstance(codegen, GuardedCodeGen) else parameters_of(type(module).forward)
    return next(filter(None, (state.misfit(expected, *batch) for batch in batches)), "")


def _compare(first: dict[str, object], second: dict[str, object], tolerance: Tolerance) -> Iterator[Difference]:
    for where in first | second:
        if where not in first or where not in second:
            yield Difference(where=where, how=f"only the {'first' if where in first else 'second'} module has it")
        elif how := difference(first[where], second[where], tolerance):
            yield Difference(where=where, how=how)


def _distances(first: dict[str, object], second: dict[str, object], exact: dict[str, object]) -> Iterator[Distance]:
    for where, one in first.items():
        other, truth = second.get(where), exact.get(where)
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            continue
        if not (one.is_floating_point() or one.is_complex()) or (truth is None and same_bits(one, other)):
            continue
        yield Distance(
            where=where,
            absolute=largest_difference(one, other),
            relative=relative_error(other, one),
            first_from_reference=_from_reference(one, truth),
            second_from_reference=_from_reference(other, truth),
        )


def _from_reference(value: torch.Tensor, truth: object) -> float | None:
    return relative_error(value.to(truth.dtype), truth) if isinstance(truth, torch.Tensor) else None
