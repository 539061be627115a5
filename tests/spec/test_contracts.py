"""What `fxlib.remote` learns of a function, and what a contract says of a call."""

from __future__ import annotations

from typing import Any

import pytest

import fxlib
from fxlib.errors import ContractError
from fxlib.spec.contract import Contract, contract_of


@fxlib.remote(writes="tables", part="table")
def push(indices: Any, table: str, gradient: Any) -> None:
    """Take the part second."""


@fxlib.remote(writes="tables", part="table")
def push_by_name(indices: Any, gradient: Any, *, table: str) -> None:
    """Take the part by its name alone."""


@pytest.mark.parametrize("args, kwargs", [((0, "users", 1), {}), ((0,), {"table": "users", "gradient": 1})])
def test_the_part_that_a_call_touches_is_told_by_place_and_by_name(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    contract = contract_of(push)
    assert contract is not None
    assert contract.part_of(args, kwargs) == "users"


def test_an_argument_that_is_given_by_its_name_alone_has_no_place() -> None:
    contract = contract_of(push_by_name)
    assert contract is not None
    assert contract.part_at is None
    assert contract.part_of(("users", "users"), {"table": "items"}) == "items"


class Table:
    """What takes pushes as a class, under a contract that is declared before or after it is a class method."""

    @classmethod
    @fxlib.remote(writes="tables", part="table")
    def push(cls, table: str, row: int, gradient: Any) -> None:
        """Take the part first, since a caller does not give the class."""

    @fxlib.remote(writes="tables", part="table")
    @classmethod
    def push_row(cls, table: str, row: int, gradient: Any) -> None:
        """Take it likewise."""


@pytest.mark.parametrize("function", [Table.push, Table.push_row])
def test_the_class_of_a_class_method_is_none_of_its_arguments(function: Any) -> None:
    contract = contract_of(function)
    assert contract is not None
    assert contract.part_of(("users", 1, 0), {}) == "users"


def test_a_call_that_may_touch_anything_names_no_part() -> None:
    contract = Contract(writes=frozenset({"*"}), part="table", part_at=0)
    assert contract.part_of(("users",), {}) is None


def test_a_part_that_is_none_of_the_arguments_is_refused() -> None:
    with pytest.raises(ContractError, match=r"part='rows' does not name an argument of the function"):
        fxlib.remote(writes="tables", part="rows")(lambda table: table)


@pytest.mark.parametrize("part, place", [(None, 0), ("table", -1)])
def test_a_place_of_no_argument_is_refused(part: str | None, place: int) -> None:
    with pytest.raises(ContractError, match="is not the position of an argument"):
        Contract(writes=frozenset({"tables"}), part=part, part_at=place)
