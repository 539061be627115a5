"""A trial's servers, in this process: state set up, digested and brought back."""

from __future__ import annotations

import pytest
import torch

from fxlib import ps
from fxlib.errors import WorkloadError
from fxlib.runtime import functions
from fxlib.spec.workload import Optimizer, RemoteObject, Server, Table
from fxlib_workers.trial import server_state

TABLES = Server(name="ps0", tables=(Table(name="t", rows=5, dim=2),))
ALLOWED = "tests.workers.remote_code"


def test_state_comes_back_to_the_seed() -> None:
    server_state.serve(TABLES, Optimizer(), seed=1)
    before = server_state.state_digests()
    ps.push("t", torch.tensor([1]), torch.ones(1, 2))
    assert server_state.state_digests() != before
    server_state.reset()
    assert server_state.state_digests() == before


def test_modules_behind_rrefs_are_made_from_the_seed() -> None:
    server_state.serve(Server(name="ps0"), Optimizer(), seed=1)
    made = server_state.create("net", RemoteObject(owner="ps0", cls="torch.nn:Linear", args=(2, 2)))
    before = server_state.state_digests()
    assert "object 'net'" in before
    with torch.no_grad():
        next(made.parameters()).add_(1)
    assert server_state.state_digests() != before
    server_state.reset()
    assert server_state.state_digests() == before


@pytest.mark.parametrize(
    "cls", ["subprocess:Popen", "torch.nn:functional", "torch.nn.modules.linear:os", "os:system", "x"]
)
def test_only_modules_of_torch_and_of_the_operator_are_made(cls: str) -> None:
    server_state.serve(Server(name="ps0"), Optimizer(), seed=1)
    with pytest.raises(WorkloadError, match="operator allowed"):
        server_state.create("net", RemoteObject(owner="ps0", cls=cls))


def test_what_is_no_module_cannot_be_brought_back() -> None:
    functions.allow_module(ALLOWED)
    server_state.serve(Server(name="ps0"), Optimizer(), seed=1)
    with pytest.raises(WorkloadError, match=r"not a torch\.nn\.Module"):
        server_state.create("net", RemoteObject(owner="ps0", cls=f"{ALLOWED}:prepare", args=("ps0", 1)))


def test_an_unknown_setup_is_refused() -> None:
    with pytest.raises(WorkloadError, match="operator allowed"):
        server_state.serve(Server(name="ps0", setup="os:getcwd"), Optimizer(), seed=1)


def test_functions_are_served_by_name() -> None:
    names = ["fxlib.ps:lookup", "torch:add", ".forward", "os:system", "nobody.knows:this"]
    assert server_state.not_served(names) == ["os:system", "nobody.knows:this"]
