"""Torch's pytree over what a forward computes and receives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.rpc import remote, rpc_sync
from torch.utils import _pytree as pytree

import fxlib
from fxlib.errors import CaptureError
from tests.capture import servers
from tests.capture.checks import assert_same, same

X = torch.ones(2, 4)
pytestmark = pytest.mark.usefixtures("world")


def maps_a_declared_result(x: torch.Tensor) -> Any:
    return pytree.tree_map(lambda each: each * 2, rpc_sync("ps0", servers.several, args=(x,)))


def counts_a_declared_results_leaves(x: torch.Tensor) -> Any:
    found, spec = pytree.tree_flatten({"all": rpc_sync("ps0", servers.several, args=(x,)), "x": x})
    return pytree.tree_unflatten([each + len(found) for each in found], spec), len(pytree.tree_leaves(found))


def maps_its_own(x: torch.Tensor) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda each: each * 2, {"a": [x, 1], "b": x + 1})


def maps_numbers(x: torch.Tensor) -> Any:
    numbers = (x.shape[0], x.size(1) * 2, x.dim(), x.sum().item(), x.dtype)
    return pytree.tree_map(lambda each: each, [numbers, x])


def fetches_all(x: torch.Tensor) -> Any:
    return pytree.tree_map(lambda each: each.to_here(), {"a": remote("ps0", servers.double, args=(x,))})


@pytest.mark.parametrize(
    "forward", [maps_a_declared_result, counts_a_declared_results_leaves, maps_its_own, maps_numbers, fetches_all]
)
def test_it_takes_values_apart_as_in_a_run(forward: Callable[[torch.Tensor], Any]) -> None:
    captured = same(forward, X)
    for form in (captured, fxlib.optimize(captured)):
        assert pytree.tree_structure(form(X)) == pytree.tree_structure(forward(X))
        assert_same(form(X), forward(X))


@pytest.mark.parametrize("put", [lambda x: (x, x * 2), lambda x: rpc_sync("ps0", servers.pair, args=(x,))])
def test_an_element_that_the_forward_has_exchanged_may_be_a_container(put: Callable[[torch.Tensor], Any]) -> None:
    def forward(x: torch.Tensor) -> Any:
        found = rpc_sync("ps0", servers.several, args=(x,))
        found[1][0] = put(x)
        return pytree.tree_map(lambda each: each * 3, found[1])

    with pytest.raises(CaptureError, match="only a run knows"):
        fxlib.capture(forward)


@pytest.mark.parametrize("asks", [lambda it: pytree.tree_map(lambda each: each * 2, it), pytree.tree_leaves])
def test_what_only_a_run_knows_to_be_a_container_is_refused(asks: Callable[[Any], Any]) -> None:
    def forward(x: torch.Tensor) -> Any:
        return asks([x, rpc_sync("ps0", servers.pair, args=(x,))])

    with pytest.raises(CaptureError, match="the class of a traced value is asked for") as refusal:
        fxlib.capture(forward)
    assert refusal.value.where.startswith(__file__)
