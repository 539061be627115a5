"""Names of remote functions, and their resolution."""

import functools
import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.capture import builtin_contracts
from fxlib.errors import ContractError
from fxlib.runtime import functions
from fxlib.spec.contract import PURE, Contract, contract_of, remote
from tests.capture.servers import Arithmetic, Table, double


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.parametrize(
    "function, name",
    [
        (double, "tests.capture.servers:double"),
        (Arithmetic.triple, "tests.capture.servers:Arithmetic.triple"),
        (Arithmetic.named, "tests.capture.servers:Arithmetic.named"),
        (Table.rows, "tests.capture.servers:Table.rows"),
        (Table, "tests.capture.servers:Table"),
        (torch.add, "torch:add"),
        (torch.Tensor.add, "torch:Tensor.add"),
        (torch.nn.functional.relu, "torch.nn.functional:relu"),
        (torch.zeros, "torch:zeros"),
        (nn.Linear, "torch.nn.modules.linear:Linear"),
        (operator.add, "_operator:add"),
        (len, "builtins:len"),
        (scripted, f"{__name__}:scripted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_registered_function_is_found_by_its_name(function: Any, name: str) -> None:
    assert functions.register(function) == name
    assert functions.resolve(name) == function


def test_marking_a_function_lets_it_be_found() -> None:
    @remote(reads="tables")
    def marked() -> None: ...

    assert functions.resolve(f"{__name__}:{marked.__qualname__}") is marked


def test_static_and_class_methods_can_be_marked() -> None:
    class Server:
        @remote(pure=True)
        @staticmethod
        def one() -> int:
            return 1

        @staticmethod
        @remote(pure=True)
        def two() -> int:
            return 2

    assert contract_of(Server.one) == contract_of(Server.two) is not None


def nothing() -> None: ...


class Instance:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    "function",
    [lambda: None, functools.partial(nothing), Instance(), functools.wraps(nothing)(lambda: None)],
    ids=["lambda", "partial", "callable object", "under another's name"],
)
def test_what_no_other_process_could_find_has_no_name(function: Any) -> None:
    with pytest.raises(ContractError):
        functions.name_of(function)


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "builtins:eval", "builtins:exec", "builtins:getattr", "_operator:attrgetter"),
        *("_operator:methodcaller", "torch:load", "torch:save", "torch.os:system", "torch:Tensor.register_hook"),
        *("torch:Tensor.__reduce_ex__", "torch.jit:load", "torch.hub:load", "torch:Tensor.numpy"),
        *("tests.capture.servers:nonexistent", "x", ""),
    ],
)
def test_names_outside_the_tables_do_not_resolve(name: str) -> None:
    with pytest.raises(ContractError, match="no remote function"):
        functions.resolve(name)


def test_an_allowed_module_brings_what_it_defines_and_no_more() -> None:
    names = functions.allow_module("tests.capture.servers")

    assert "tests.capture.servers:Table.rows" in names
    assert "tests.capture.servers:double" in names
    assert not [name for name in names if "rpc" in name or "torch" in name or "._" in name]


def test_a_module_that_is_not_there_cannot_be_allowed() -> None:
    with pytest.raises(ContractError, match="cannot import"):
        functions.allow_module("not.there")


def double_all(calls: list[Any]) -> list[torch.Tensor]:
    return [double(*args, **kwargs) for args, kwargs in calls]


def test_a_batched_form_needs_no_declaration_of_its_own_to_be_found() -> None:
    name = f"{__name__}:double_all"
    with pytest.raises(ContractError):
        functions.resolve(name)
    contract = Contract(reads=frozenset({"t"}), batched_by=name)
    fxlib.capture(lambda x: rpc.rpc_sync("ps0", double, (x,)), contracts={"tests.capture.servers:double": contract})
    assert functions.resolve(name) is double_all


@pytest.mark.parametrize(
    "name, pure",
    {
        **dict.fromkeys(("_operator:add", "_operator:getitem", "builtins:len", "builtins:sorted", "torch:add"), True),
        **dict.fromkeys(("builtins:setattr", "builtins:getattr", "builtins:exec", "builtins:print"), False),
        **dict.fromkeys(("builtins:next", "_operator:call", "_operator:setitem", "_operator:iadd"), False),
    }.items(),
)
def test_a_builtin_is_pure_if_it_only_computes(name: str, pure: bool) -> None:
    assert builtin_contracts.of_function(name, {}) == (PURE if pure else None)


def test_a_function_that_is_given_one_of_the_programs_is_not_pure() -> None:
    assert builtin_contracts.of_function("builtins:sorted", {"key": print}) is None
    loss = "torch.nn.functional:triplet_margin_with_distance_loss"
    assert builtin_contracts.of_function(loss, {}) == PURE
    assert builtin_contracts.of_function(loss, {"distance_function": print}) is None
