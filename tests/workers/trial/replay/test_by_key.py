"""A replayed server whose contracts name keys answers row by row, so that a stale row shows, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxlib.spec.contract import Contract
from fxlib.spec.profile import Opaque, Result, ServerProfile, Spread, TensorShape
from fxlib_workers.trial.replay.plan import RecordedCall, ReplayPlan
from fxlib_workers.trial.replay.server import ReplayServer

READ, PUSH, CLEAR = "job.ps:lookup", "job.ps:push", "job.ps:clear"
TABLES = frozenset({"tables"})
READS = Contract(reads=TABLES, part="table", part_at=0, keys="indices", keys_at=1)
KEYS = torch.tensor([3, 1, 4, 5])


def line(returns: Result) -> RecordedCall:
    return RecordedCall(
        to="ps0", returns=returns, service_s=Spread(quantiles=(0.0,)), request_bytes=0, response_bytes=0
    )


def served(dtype: torch.dtype = torch.float32, *, commutes: bool = False) -> ReplayServer:
    plan = ReplayPlan(
        calls={
            READ: {"read": line(TensorShape(shape=(4, 8), dtype=dtype))},
            PUSH: {"push": line(Opaque())},
            CLEAR: {"clear": line(Opaque())},
        },
        functions=frozenset({READ, PUSH, CLEAR}),
        contracts={
            READ: READS,
            PUSH: replace(READS, reads=frozenset(), writes=TABLES, commutes=commutes),
            CLEAR: Contract(writes=TABLES),
        },
        servers={"ps0": ServerProfile(name="ps0", round_trip_s=0.0, concurrency=16, bytes_per_s=1e12)},
    )
    return ReplayServer(plan, "ps0")


def read(server: ReplayServer, keys: torch.Tensor = KEYS, table: str = "a") -> torch.Tensor:
    found: torch.Tensor = server.answer(READ, "read", (table, keys), {})
    return found


def push(server: ReplayServer, *keys: int, table: str = "a", gradient: float = 1.0) -> None:
    server.answer(PUSH, "push", (table, torch.tensor(keys), torch.full((len(keys), 8), gradient)), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_push_changes_the_rows_of_its_keys_alone(dtype: torch.dtype) -> None:
    server = served(dtype)
    before = read(server)
    push(server, 1, 5, 77)
    assert (read(server) == before).all(1).tolist() == [True, False, True, False]


def test_a_row_is_the_same_whichever_others_are_read_with_it() -> None:
    server = served()
    push(server, 4)
    assert torch.equal(read(server, KEYS[1:3]), read(server)[1:3])


def test_what_a_push_brings_and_how_often_shows_in_its_rows() -> None:
    rows = []
    for gradients in ([1.0], [2.0], [1.0, 1.0]):
        server = served()
        for each in gradients:
            push(server, 3, gradient=each)
        rows.append(read(server)[0].tolist())
    assert len({tuple(each) for each in rows}) == 3


@pytest.mark.parametrize("commutes", [True, False])
def test_the_order_of_pushes_shows_unless_they_commute(commutes: bool) -> None:
    one, other = served(commutes=commutes), served(commutes=commutes)
    for server, gradients in ((one, (1.0, 2.0)), (other, (2.0, 1.0))):
        for each in gradients:
            push(server, 3, gradient=each)
    assert torch.equal(read(one), read(other)) is commutes


def test_another_table_has_other_rows_and_keeps_them() -> None:
    server = served()
    before = read(server, table="b")
    push(server, *KEYS.tolist(), table="a")
    assert torch.equal(read(server, table="b"), before)
    assert not torch.equal(read(server, table="b"), read(server, table="a"))


def test_a_write_without_keys_changes_all_rows() -> None:
    server = served()
    before = read(server)
    server.answer(CLEAR, "clear", (), {})
    assert (read(server) == before).all(1).tolist() == [False] * 4


def test_a_row_of_several_keys_changes_with_any_of_them() -> None:
    server, bags = served(), KEYS.view(2, 2)
    before = read(server, bags)
    push(server, 4)
    assert (read(server, bags) == before).all(1).tolist() == [True, False]
