"""A trial's servers, in this process: state set up, digested and brought back."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

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
    assert "state of object 'net'" in before
    with torch.no_grad():
        next(made.parameters()).add_(1)
    assert server_state.state_digests() != before
    server_state.reset()
    assert server_state.state_digests() == before


def test_rows_that_a_module_makes_as_they_are_asked_for_are_compared_and_brought_back() -> None:
    functions.allow_module(ALLOWED)
    server_state.serve(Server(name="ps0"), Optimizer(), seed=1)
    made: Any = server_state.create("rows", RemoteObject(owner="ps0", cls=f"{ALLOWED}:Rows", args=(2,)))
    before = server_state.state_digests()
    assert before["other state of object 'rows'"] == server_state.UNKNOWN  # of its lock
    made.push(torch.tensor([1]), torch.ones(1, 2))
    after = server_state.state_digests()
    assert after["state of object 'rows'"] != before["state of object 'rows'"]
    server_state.reset()
    assert server_state.state_digests() == before
    assert made.row(1) is None
    assert made(torch.tensor([1])).tolist() == [[0.0, 0.0]]


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


class Opaque:
    """A value whose class says nothing of its state."""


class Counts(nn.Module):
    """A module that counts, and knows itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = {"forwards": count}
        self.itself = (self,)
        self.activation = torch.relu


def ones(value: float = 1.0) -> nn.Module:
    module = nn.Linear(2, 2, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def array(at: int) -> np.ndarray:
    found = np.zeros(5000, dtype=np.float32)
    found[at] = 1.0
    return found


@pytest.mark.parametrize(
    "one, other",
    [
        ({7: torch.ones(2)}, {5: torch.ones(2)}),
        ({"a": torch.ones(2), "b": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.ones(2)}),
        ([ones(1.0)], [ones(2.0)]),
        ({"rows": array(2500)}, {"rows": array(2501)}),
        ({"rows": np.zeros(2)}, {"rows": np.zeros(2, dtype=np.int64)}),
        ((torch.ones(2), 3), (torch.ones(2), 4)),
        ({"a": torch.ones(2), "b": Opaque()}, {"a": torch.zeros(2), "b": Opaque()}),
        (ones(1.0), ones(2.0)),
        (Counts(1), Counts(2)),
        ([ones(1.0), Counts(1)], [ones(1.0), Counts(2)]),
    ],
)
def test_setups_that_return_other_state_have_another_digest(one: object, other: object) -> None:
    assert digests_of(one)["state of its setup"] != digests_of(other)["state of its setup"]
    assert digests_of(one) == digests_of(copy.deepcopy(one))


def digests_of(returned: object) -> dict[str, str]:
    functions.allow_module(ALLOWED)
    server_state.serve(Server(name="ps0", setup=f"{ALLOWED}:prepare"), Optimizer(), seed=1)
    assert server_state._state is not None
    server_state._state.returned = returned
    return server_state.state_digests()


def test_the_order_in_which_a_setup_s_rows_were_made_does_not_count() -> None:
    rows = {7: torch.ones(2), 5: torch.zeros(2)}
    assert digests_of(rows) == digests_of(dict(reversed(rows.items())))


def test_keys_that_are_objects_of_the_setup_are_the_same_behind_each_setup() -> None:
    assert digests_of({Opaque(): torch.ones(2)}) == digests_of({Opaque(): torch.ones(2)})
    assert digests_of({Opaque(): torch.ones(2)}) != digests_of({Opaque(): torch.zeros(2)})


def test_state_that_holds_itself_is_unknown() -> None:
    module, held = ones(), list[object]()
    held.append(held)
    vars(module)["held"] = held
    assert digests_of(module)["other state of its setup"] == server_state.UNKNOWN


@pytest.mark.parametrize("module", [nn.LSTM(2, 2), nn.TransformerEncoderLayer(2, 1), nn.ParameterList([torch.ones(1)])])
def test_all_state_of_torch_s_own_modules_is_known(module: nn.Module) -> None:
    assert "other state of its setup" not in digests_of(module)


@pytest.mark.parametrize("opaque", [Opaque(), np.array([Opaque()], dtype=object), {3}])
def test_state_of_no_known_class_is_unknown_beside_what_is_known(opaque: object) -> None:
    known, found = digests_of([torch.ones(2)]), digests_of([torch.ones(2), opaque])
    assert found == {**known, "other state of its setup": server_state.UNKNOWN}
    assert digests_of(opaque)["state of its setup"] == server_state.UNKNOWN


def test_an_unknown_setup_is_refused() -> None:
    with pytest.raises(WorkloadError, match="operator allowed"):
        server_state.serve(Server(name="ps0", setup="os:getcwd"), Optimizer(), seed=1)


def test_functions_are_served_by_name() -> None:
    names = ["fxlib.ps:lookup", "torch:add", ".forward", "os:system", "nobody.knows:this"]
    assert server_state.not_served(names) == ["os:system", "nobody.knows:this"]
