"""Programs during which a server dies: run as `python -m tests.random_programs.mortal_world FIRST LAST`.

A process can join one RPC group in its life, and a dead server stays dead; so a group has one server that survives, and
for each run one that dies.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed import rpc
from torch.fx import GraphModule, Node

import fxlib
from fxlib.ps.local import end_with_parent
from fxlib.recipes import recipes
from fxlib.runtime import functions, is_call
from tests.random_programs import running, simulation
from tests.random_programs.programs import NOISE, Program, random_program
from tests.random_programs.simulation import simulated

SURVIVOR, MORTAL = simulation.SERVERS


def die(*_: object) -> None:
    """End the server that is called."""
    os._exit(1)


functions.register(die)


def fatal_programs(seed: int) -> list[Program]:
    """Make a program that runs through but for one call, which kills its server; none if the seed has none such.

    After it come those that die earlier, at each call to that server before the one that kills it: a call that travels
    early may be the server's end before an earlier one has its answer, and then the program ends as if at that one.
    """
    if running.outcome(program := random_program(seed), program.module, simulated(seed))["error"]:
        return []
    calls = len(_calls_to_mortal(program))
    return [] if not calls else [_dying(seed, place) for place in range(random.Random(seed).randrange(calls), -1, -1)]


def _dying(seed: int, place: int) -> Program:
    program = random_program(seed)
    _calls_to_mortal(program)[place].update_arg(1, functions.name_of(die))
    program.module.recompile()
    return program


def _calls_to_mortal(program: Program) -> list[Node]:
    """Return the calls by name, and by the input `to`."""
    nodes = program.module.graph.nodes
    return [node for node in nodes if is_call(node) and (node.args[0] == MORTAL or isinstance(node.args[0], Node))]


def run(program: Program, module: GraphModule, victim: str) -> Mapping[str, str]:
    """Run one step with `victim` in the part of the server that dies; return the error, and the survivor's state."""
    for name, role in ((SURVIVOR, SURVIVOR), (victim, MORTAL)):
        rpc.rpc_sync(name, simulation.reset, (role,))
    _redirect(module.graph.nodes, victim)
    module.recompile()
    torch.manual_seed(program.seed)
    x, y = (torch.randn(2, 4).requires_grad_().clone() for _ in range(2))
    error = ""
    try:
        outputs = module(x, y, victim)
        takers = [each for each in outputs if each.requires_grad]
        if takers:
            torch.stack([each.sum() for each in takers]).sum().backward()
        fxlib.push_gradients(module)
    except Exception as raised:  # noqa: BLE001 - which one it is, is the question
        error = type(raised).__name__
    NOISE.zero_()
    state = rpc.rpc_sync(SURVIVOR, simulation.own_state)
    return {"error": error, **{name: tensor.numpy().tobytes().hex() for name, tensor in state.items()}}


def _redirect(nodes: Iterable[Node], victim: str) -> None:
    def renamed(value: object) -> object:
        return victim if value == MORTAL else value

    for node in nodes:
        node.args = torch.fx.node.map_aggregate(node.args, renamed)  # type: ignore[arg-type]


def compare(seeds: Sequence[int]) -> list[dict[str, object]]:
    """Run each seed's programs as they are and the first one scheduled, each against a server of its own that dies."""
    cases = [(seed, programs) for seed in seeds if (programs := fatal_programs(seed))]
    count = sum(len(programs) + 1 for _, programs in cases)
    victims = [f"victim{index}" for index in range(count)]  # the first name of all leads, so it survives
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        _join(folder, victims)
        for seed, programs in cases:
            first = programs[0]
            rewrite = recipes.apply(first.module)
            moved = sum(call.action != "left_alone" for call in rewrite.calls)
            after = run(first, rewrite.module, victims.pop())
            before = [run(each, each.module, victims.pop()) for each in programs]
            found.append({"seed": seed, "moved": moved, "before": before, "after": after})
    return found


def _join(folder: str, victims: Sequence[str]) -> None:
    # Forked from one process that has loaded what they need: loading it is nearly all that so short a life takes.
    fork, size = multiprocessing.get_context("forkserver"), len(victims) + 2
    fork.set_forkserver_preload([running.__name__])
    for rank, name in enumerate((SURVIVOR, *victims), start=1):
        fork.Process(target=_serve, args=(name, rank, size, folder), daemon=True).start()
    rpc.init_rpc("trainer", rank=0, world_size=size, rpc_backend_options=_options(folder))


def _serve(name: str, rank: int, size: int, folder: str) -> None:
    life = threading.Thread(target=end_with_parent, daemon=True)
    life.start()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=_options(folder))
    life.join()  # no shutdown: it fails where a member has died


def _options(folder: str) -> rpc.TensorPipeRpcBackendOptions:
    meeting = f"file://{Path(folder, 'meeting')}"
    return rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=20, _transports=["uv"], _channels=["basic"])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(compare(range(int(sys.argv[1]), int(sys.argv[2])))), flush=True)
    os._exit(0)  # a group with dead members never shuts down in order
