"""The example model trains the same bits, blocking and rewritten, against real servers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.rpc import rpc_sync

import fxlib
from examples.dlrm.model import DLRM, SPARSE_FEATURES, tables
from examples.dlrm.training import Batches, ahead, compute_step, one_by_one, train, training_step
from fxlib import ps
from fxlib.runtime import exposed_s, is_wait, record
from fxlib.runtime.ops import send_gradient
from tests.shared.rpc_world import rpc_world
from tests.shared.undisturbed import undisturbed

ROWS, DIM, BATCH = 50, 4, 16
SERVERS = ps.place(tables(ROWS, DIM), ("ps0", "ps1"))


def batches() -> Batches:
    generator = torch.Generator().manual_seed(0)

    def batch() -> fxlib.Batch:
        dense = torch.rand(BATCH, 13, generator=generator)
        sparse = torch.randint(0, ROWS, (BATCH, SPARSE_FEATURES), generator=generator)
        return fxlib.Batch(inputs=(dense, sparse), target=(dense[:, 0] > 0.5).float())

    return [batch() for _ in range(3)]


def model() -> DLRM:
    torch.manual_seed(0)
    return DLRM(SERVERS, dim=DIM, hidden=32)


def test_tables_are_spread_over_the_servers() -> None:
    assert [len(server.tables) for server in SERVERS] == [13, 13]


@pytest.mark.slow
def test_original_and_rewritten_train_the_same_bits_on_trainer_and_servers() -> None:
    dlrm, data = model(), batches()
    graph = fxlib.capture(dlrm)
    rewritten = fxlib.optimize(graph)
    assert sum(map(is_wait, rewritten.graph.nodes)) == SPARSE_FEATURES
    assert sum(node.target is send_gradient for node in rewritten.graph.nodes) == SPARSE_FEATURES
    start = {name: value.clone() for name, value in dlrm.state_dict().items()}
    outcomes: list[tuple[list[float], dict[str, Tensor], list[str]]] = []
    with rpc_world(*SERVERS):
        for module, loops in ((graph, one_by_one), (rewritten, one_by_one), (rewritten, partial(ahead, rewritten))):
            losses = train(module, loops(training_step(module)), data, steps=24, servers=SERVERS, start=start)
            weights = {name: value.clone() for name, value in module.state_dict().items()}
            outcomes.append((losses, weights, [rpc_sync(server.name, ps.state_digest) for server in SERVERS]))
    losses, weights, digests = outcomes[0]
    for other_losses, other_weights, other_digests in outcomes[1:]:
        assert losses == other_losses
        assert digests == other_digests
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_rewritten_forward_stands_still_for_less_than_half_the_time() -> None:
    graph = fxlib.capture(model())
    (batch, *_) = batches()
    slow = ps.place(tables(ROWS, DIM), ("ps0", "ps1"), service_time_s=0.005)

    def still_s(module: torch.nn.Module) -> float:
        with record() as recording:
            module(*batch.inputs)
        return sum(exposed_s(recording.timeline).values())

    with rpc_world(*slow):
        blocking_s, rewritten = still_s(graph), fxlib.optimize(graph)
        overlapped_s = undisturbed(lambda: still_s(rewritten), lambda found_s: found_s < blocking_s / 2)
        rpc_world_at_rest()
    assert blocking_s > SPARSE_FEATURES * 0.005
    assert overlapped_s < blocking_s / 2


def rpc_world_at_rest() -> None:
    for server in SERVERS:
        rpc_sync(server.name, ps.set_service_time, args=(0.0,))


def test_compute_alone_makes_no_remote_call() -> None:
    dlrm, data = model(), batches()
    with rpc_world(*SERVERS):
        step = compute_step(dlrm, data[0])
        before = [rpc_sync(server.name, ps.state_digest) for server in SERVERS]
        assert step(data[0]) > 0
        assert [rpc_sync(server.name, ps.state_digest) for server in SERVERS] == before
