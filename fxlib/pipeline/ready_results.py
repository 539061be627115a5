"""Give a graph's generated code the results of calls that were made ahead, in place of the operators that make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeAlias

from fxlib.runtime.ops import operators

Take: TypeAlias = Callable[[], Any]
"""Returns the future of a call that was made ahead, or None if the call is to be made after all."""


def with_results(generated: Callable[..., Any], results: Mapping[Any, Mapping[int, Take]]) -> Callable[..., Any]:
    """Return a forward that asks for results before it makes calls; it is for one forward.

    Args:
        generated: the function of the graph's generated code. It is straight-line code, so an operator's uses come in
            the order of its nodes.
        results: what takes the result in place of a use of an operator, by the operator and the number of the use.
    """
    code: FunctionType = generated  # type: ignore[assignment]
    names: dict[str, Any] = dict(code.__globals__)
    for name, value in code.__globals__.items():
        is_hashable = type(value).__hash__ is not None
        if is_hashable and callable(value) and (found := results.get(value)) is not None:
            names[name] = _stand_in(value, found)
    return FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)


def _stand_in(operator: Callable[..., Any], found: Mapping[int, Take]) -> Callable[..., Any]:
    position = -1
    blocks = operator is operators.remote_call

    def replacement(*args: Any) -> Any:
        nonlocal position
        position += 1
        future = found[position]() if position in found else None
        if future is None:
            return operator(*args)
        return future.wait() if blocks else future

    returned: Any = replacement
    returned.stands_for = operator  # a recording looks for it
    return replacement
