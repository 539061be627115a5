"""One row of the registry for each operator of fxlib's, and all who ask read the same."""

from __future__ import annotations

import inspect

import pytest

from fxlib.runtime.ops import calls
from fxlib.runtime.ops.registry import BY_LABEL, OPERATORS, Role, RuntimeOperator
from fxlib.wire.targets import function_name, functions


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.label)
def test_a_row_says_what_the_function_takes(row: RuntimeOperator) -> None:
    names = list(inspect.signature(row.function).parameters)
    if row.arguments is not None:
        assert len(names) == row.arguments
    if row.function_at is not None:
        assert "function" in names[row.function_at] or names[row.function_at] in ("name", "gradient")
    if row.destination_at is not None:
        assert names[row.destination_at] in ("to", "rref")


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.label)
def test_a_row_travels_under_its_label(row: RuntimeOperator) -> None:
    assert functions()[row.label] is row.function
    assert function_name(row.function) == row.label


def test_the_operators_of_call_kinds_are_rows() -> None:
    own = {each for kind in calls.kinds() for each in kind.operators if each.__module__.startswith("fxlib.")}
    assert own == {row.function for row in OPERATORS if row.role in (Role.CALL, Role.ISSUE, Role.WAIT)}
    assert len(BY_LABEL) == len(OPERATORS)
