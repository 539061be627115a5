"""Loops during which the process of a server ends: run as `python -m tests.pipeline.mortal_loop`."""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from contextlib import suppress

import torch
from torch import nn
from torch.distributed import rpc

import fxlib
from fxlib.pipeline.watch import WATCH
from tests.random_programs import simulation
from tests.random_programs.mortal_world import MORTAL, _join, die
from tests.random_programs.trainings import look_up_table

DIES_AT = 3
VICTIMS = ("plain", "ahead", "rewritten", "deferred")


class Table(nn.Module):
    def __init__(self, server: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))
        self._server = server

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync(self._server, look_up_table, args=(x,)) * self.weight


def outcome(name: str) -> dict[str, object]:
    """Train with one server until it is dead; return the error, and all that the loop did before."""
    rpc.rpc_sync(name, simulation.reset, (MORTAL,))
    captured = fxlib.capture(Table(name))
    module = fxlib.optimize(captured) if name in {"rewritten", "deferred"} else captured
    given = [torch.full((2, 4), float(place)) for place in range(8)]
    deferred = name == "deferred"
    loop = given if name == "plain" else fxlib.pipeline(given, module, depth=2, trainers=1, defer_pushes=deferred)
    losses: list[float] = []
    error, step, begun = "", 0, 0.0
    try:
        for step, batch in enumerate(loop, start=1):
            output = module(batch)
            losses.append(float(output.detach().sum()))
            output.sum().backward()
            if step == DIES_AT:
                begun = time.monotonic()
                with suppress(Exception):
                    rpc.rpc_sync(name, die)
            fxlib.push_gradients(module)
            if deferred and step == DIES_AT:
                module.state_dict()  # where the push is raised at the latest
    except Exception as raised:  # noqa: BLE001 - which one it is, is the question
        error = type(raised).__name__
    ended_s = time.monotonic() - begun
    return {"error": error, "steps": step, "losses": losses, "watching": WATCH.is_watching, "ended_s": ended_s}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        _join(folder, VICTIMS)
        print(json.dumps([outcome(name) for name in VICTIMS]), flush=True)
    os._exit(0)  # a group with dead members never shuts down in order
