"""Convert the conditions on sizes that `torch.export` found to expressions that `guards.export_guards` evaluates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from fxlib.capture.samples import Samples
from fxlib.errors import CaptureError
from fxlib.runtime.guards.export_guards import (
    Expression,
    Guard,
    InputGuards,
    TensorGuard,
    ValueGuard,
    autocast_modes,
    in_words,
    peculiarity,
    repeated,
    symbols_of,
)
from fxlib.runtime.guards.value_conditions import ValueCondition

_NAMES = {
    "Equality": "eq", "Unequality": "ne", "StrictLessThan": "lt", "LessThan": "le", "StrictGreaterThan": "gt",
    "GreaterThan": "ge", "Mod": "mod", "PythonMod": "mod", "FloorDiv": "floordiv", "CleanDiv": "floordiv",
    "Add": "add", "Mul": "mul", "And": "and", "Or": "or", "Not": "not", "Max": "max", "Min": "min",
}  # fmt: skip
_HINT = "Declare fewer dynamic dimensions in dynamic_shapes=, or take the condition out of the forward."


def guards_of(
    program: ExportedProgram,
    samples: Samples,
    *,
    gradients: bool,
    decided: Iterable[ValueCondition],
    as_traced: bool,
) -> InputGuards:
    """Return the guards on the leaves of the arguments on which an exported program relies.

    Args:
        program: the exported program.
        samples: the arguments with which it was exported.
        gradients: whether the program depends on which of the arguments take a gradient.
        decided: the conditions on the arguments' values by which the program decided.
        as_traced: whether the program is only valid for the sizes that its trace took into account. A trace decides
            conditions as for sizes of at least 2, but the program itself takes 0 and 1 if they were declared.

    Raises:
        CaptureError: a condition cannot be checked before a run.
    """
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    kinds = [spec.kind.name for spec in program.graph_signature.input_specs]
    given = pytree.tree_leaves((samples.args, samples.kwargs))
    inputs = [value for value, kind in zip(values, kinds, strict=True) if kind == "USER_INPUT"]
    same = repeated(given)
    leaves = tuple(
        _guard(*each, gradients=gradients, same_as=same.get(place))
        for place, each in enumerate(zip(inputs, given, strict=True))
    )
    known: set[str] = set()
    for leaf in leaves:
        known |= {size for size in leaf.sizes if isinstance(size, str)} if isinstance(leaf, TensorGuard) else set()
    for leaf in leaves:
        for size in (*leaf.sizes, *(leaf.strides or ())) if isinstance(leaf, TensorGuard) else ():
            _check_known(size, known)
    shape_env = _shape_env(values)
    # The graph itself asserts the conditions on sizes that only a run finds out. If two sizes were found to be equal,
    # only one symbol is left, but earlier conditions may name the other.
    found = [] if shape_env is None else shape_env.guards
    conditions = [expression(shape_env.replace(guard.expr)) for guard in found]
    conditions = [each for each in dict.fromkeys(conditions) if each is not True and symbols_of(each) <= known]
    ranges = [
        (str(symbol), max(int(found.lower), 0), None if found.upper in (int_oo, sympy.oo) else int(found.upper))
        for symbol, found in _ranges(program, shape_env if as_traced else None)
        if str(symbol) in known
    ]
    return InputGuards(
        leaves=leaves,
        ranges=tuple(ranges),
        conditions=tuple(conditions),
        autocast=autocast_modes(),
        values=tuple(decided),
        ordered=samples.starred if len(samples.starred) > 1 else (),
    )


def _guard(value: Any, sample: Any, *, gradients: bool, same_as: int | None) -> Guard:
    if isinstance(value, torch.Tensor):
        if problem := peculiarity(value):
            raise CaptureError(
                f"an argument {problem}",
                where="sample_inputs",
                hint="A graph takes dense tensors, conjugates resolved.",
            )
        return TensorGuard(
            dtype=value.dtype,
            device=value.device.type,
            sizes=_expressions(value.shape),
            strides=None if value.is_contiguous() else _expressions(value.stride()),
            requires_grad=sample.requires_grad if gradients else None,
            same_as=same_as,
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return ValueGuard(value=value)
    raise CaptureError(
        f"an argument is a {type(value).__name__}",
        where="sample_inputs",
        hint="A graph takes tensors, numbers, flags, strings, None, and nests of these.",
    )


def _ranges(program: ExportedProgram, shape_env: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the symbols of a program with their ranges, narrowed to those that a trace took into account."""
    traced = {} if shape_env is None else shape_env.var_to_range
    for symbol, declared in program.range_constraints.items():
        yield symbol, declared & traced.get(symbol, declared)


def _expressions(sizes: Iterable[Any]) -> tuple[Expression, ...]:
    return tuple(expression(getattr(size, "node", size)) for size in sizes)


def _check_known(size: Expression, known: set[str]) -> None:
    if missing := symbols_of(size) - known:
        raise CaptureError(
            f"the size {in_words(size)} depends on {', '.join(sorted(missing))}, which is no size of an input",
            where="dynamic_shapes",
            hint="Declare the size itself as a Dim.",
        )


def _shape_env(values: list[Any]) -> Any:
    return next((value.fake_mode.shape_env for value in values if hasattr(value, "fake_mode")), None)


def expression(found: Any) -> Expression:
    """Return a sympy expression over sizes, or the node of a symbolic size, converted to plain data.

    Raises:
        CaptureError: the expression has unknown operations.
    """
    if hasattr(found, "expr"):  # `found` is the node of a torch.SymInt
        found = found.expr
    if found is sympy.true or found is sympy.false:
        return bool(found)
    if isinstance(found, sympy.Symbol):
        return str(found)
    if isinstance(found, (sympy.Integer, int)):
        return int(found)
    if (exponent := _exponent(found)) > 0:
        return ("mul", *[expression(found.args[0])] * exponent)
    name = _NAMES.get(type(found).__name__)
    if name is None:
        raise CaptureError(
            f"the forward depends on {found}, a condition on sizes that fxlib cannot check",
            where="dynamic_shapes",
            hint=_HINT,
        )
    return (name, *map(expression, found.args))


def _exponent(found: Any) -> int:
    """Return the exponent of a power if it is a natural number, and 0 for anything else."""
    is_power = type(found).__name__ in ("Pow", "PowByNatural") and isinstance(found.args[1], sympy.Integer)
    return int(found.args[1]) if is_power else 0
