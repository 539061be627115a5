"""The training job itself: one step, many steps, and how fast they are."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice

import torch
from torch import Tensor, nn
from torch.distributed.rpc import rpc_sync
from torch.nn import functional as F

import fxlib
from examples.dlrm.model import DLRM
from fxlib import ps

LR = 0.001
Batches = Sequence[fxlib.Batch]
Step = Callable[[fxlib.Batch], float]
Loop = Callable[[Batches], list[float]]
"""Trains on batches, in order; returns the loss of each."""


def click_loss(logits: Tensor, batch: fxlib.Batch) -> Tensor:
    """Mean cross entropy of the logits [batch] with the labels."""
    assert batch.target is not None
    return F.binary_cross_entropy_with_logits(logits, batch.target)


def training_step(module: nn.Module) -> Step:
    """Forward, loss, backward, optimizer, gradients to the servers."""
    optimizer = torch.optim.Adam(module.parameters(), lr=LR)

    def step(batch: fxlib.Batch) -> float:
        optimizer.zero_grad()
        loss = click_loss(module(*batch.inputs), batch)
        loss.backward()
        optimizer.step()
        fxlib.push_gradients(module)
        return loss.item()

    return step


def compute_step(model: DLRM, batch: fxlib.Batch) -> Step:
    """The same local work with no remote call at all: embeddings are there already, their gradients go nowhere."""
    columns = batch.inputs[1].unbind(1)
    vectors = [
        rpc_sync(server, ps.lookup, args=(table, rows)).requires_grad_()
        for (server, table), rows in zip(model.owners, columns, strict=True)
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    def step(batch: fxlib.Batch) -> float:
        optimizer.zero_grad()
        loss = click_loss(model.interact(batch.inputs[0], vectors), batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def one_by_one(step: Step) -> Loop:
    """Return the loop as it is written."""
    return lambda batches: [step(batch) for batch in batches]


def ahead(module: nn.Module, step: Step) -> Loop:
    """Return the same loop, whose next batch's lookups are made while this one trains."""
    return lambda batches: [step(batch) for batch in fxlib.pipeline(batches, module)]


def train(
    module: nn.Module,
    loop: Loop,
    batches: Batches,
    *,
    steps: int,
    servers: Sequence[fxlib.Server],
    start: Mapping[str, Tensor],
) -> list[float]:
    """Train from the given weights and the servers' first state; return the loss of each step."""
    module.load_state_dict(start)
    for server in servers:
        rpc_sync(server.name, ps.reset, args=(0,))
    return loop(list(islice(cycle(batches), steps)))


def race(loops: Mapping[str, Loop], batches: Batches, *, rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each arm, in blocks of a pass over the batches; blocks in a new random order each round."""
    seconds: dict[str, list[float]] = {arm: [] for arm in loops}
    order, dice = list(loops), random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for arm in order:
            start = time.perf_counter()
            loops[arm](batches)
            seconds[arm].append((time.perf_counter() - start) / len(batches))
    return seconds
