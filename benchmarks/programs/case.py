"""One program at one speed of its servers: captured, profiled, optimized by the service, and raced in its own launcher.

Run as a process of its own, `python -m benchmarks.programs.case`, which writes what came of it as one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.fx import GraphModule

import fxlib
from benchmarks.programs import catalogue, world
from benchmarks.programs.catalogue import Program
from benchmarks.programs.evaluation import Evaluated, evaluated
from benchmarks.programs.loading import quiet
from fxlib.analysis.cost.simulate import predict
from fxlib.spec.job import TrialOptions
from fxlib.spec.training import scalar_loss
from fxlib.spec.workload import Batch, Workload
from fxlib.utils.hardware import cores
from fxlib.utils.pytree import leaves

ORIGINAL: Final = "original"
STEPS: Final = 5
"""Number of steps in a block."""
PROFILED: Final = 10
"""Number of steps in a profile; left to itself, `fxlib.profile` runs programs that may write to servers for one."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What came of one case.

    Attributes:
        captured: whether fxlib made a graph of the model.
        adopted: whether the service gave a rewritten module back.
        bitwise: whether that trains as the original does, bit for bit, as far as the original does; None: not tried.
        why: the reason, in words, where it was not captured or not adopted.
        asked_s: how long the answer of the service took.
        seconds: of a step, by arm, block after block.
        busy: share of the machine's cores that launchers and servers kept busy while an arm ran; from 0 to 1.
        predicted_s: a step of an arm by the cost model, its processes sharing this host's cores as they do.
        bound_s: the shortest step of any legal order by the cost model; None: it was not computed.
        evaluation: what came of evaluating the model; None: it was not tried.
    """

    captured: bool = False
    adopted: bool = False
    bitwise: bool | None = None
    why: str = ""
    asked_s: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    predicted_s: dict[str, float] = field(default_factory=dict)
    bound_s: float | None = None
    evaluation: Evaluated | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One case: a program, where it is, how slow its servers are, the service, and which launcher this process is."""

    name: str
    sources: str
    service_ms: float
    address: str
    folder: str
    quick: bool
    launcher: int = 0


def run(asked: Asked) -> Found:
    """Run one case in this process, and, for the other launchers of a program, in others."""
    found, program, sources = Found(), catalogue.named(asked.name), Path(asked.sources)
    torch.set_num_threads(1)
    try:
        module = program.load(sources)
    except Exception as error:  # noqa: BLE001 - told as what came of it
        found.why = f"not loaded: {type(error).__name__}: {error}"
        return found
    others = range(1, program.launchers) if asked.launcher == 0 else ()
    command = [sys.executable, "-m", "benchmarks.programs.case"]
    started = [
        subprocess.Popen([*command, json.dumps(asdict(replace(asked, launcher=each)))], stdout=subprocess.DEVNULL)
        for each in others
    ]
    try:
        with world.joined(program, sources, asked.service_ms, Path(asked.folder), asked.launcher):
            try:
                _run(program, module, asked, found)
            except Exception as error:
                found.why = f"{type(error).__name__}: {error}"
                if program.parallel:  # the other launchers wait for this one in a collective
                    raise
    except Exception as error:  # noqa: BLE001 - told as what came of it
        found.why = found.why or f"{type(error).__name__}: {error}"
    finally:
        for each in started:
            each.kill()
    return found


def _run(program: Program, module: Any, asked: Asked, found: Found) -> None:
    torch.manual_seed(0)
    model, batch = program.make(module), program.batch()
    workload = Workload(
        batches=[batch],
        loss="mean" if batch.target is None else _loss(batch.target),
        mode=program.mode,
        trainers=program.launchers,
        contracts=program.contracts,
    )
    graph = fxlib.capture(model, contracts=program.contracts, sample_inputs=batch.inputs)
    found.captured = True
    profile = fxlib.profile(graph, workload, steps=PROFILED)
    begun = time.perf_counter()
    with fxlib.connect(asked.address) as client:
        result = client.optimize(
            graph,
            workload,
            profile=profile,
            name=program.name,
            fresh=True,
            progress=False,
            budget_s=15 if asked.quick else TrialOptions().budget_s,
            group="world" if program.parallel else None,
        )
    found.asked_s = time.perf_counter() - begun
    found.adopted = result.adopted
    found.why = "" if result.adopted else result.explanation
    arms: dict[str, Callable[..., Any]] = {ORIGINAL: model, "fxlib": result.module}
    found.bound_s = result.bound_s
    found.predicted_s = {ORIGINAL: predict(graph, profile).shared_s}
    if isinstance(result.module, GraphModule):
        found.predicted_s["fxlib"] = predict(result.module, profile).shared_s
    if program.hand is not None:
        arms["hand"] = program.hand(model)
        arms["unprofiled"] = fxlib.optimize(graph)
    steps = {name: _step(arm, workload, batch, model) for name, arm in arms.items()}
    found.bitwise = _agree([_bits(steps[ORIGINAL], program) for _ in range(3)], _bits(steps["fxlib"], program))
    rounds = 7 if asked.quick else 15
    found.seconds, found.busy = _race(steps, rounds=rounds)
    if not program.is_random:
        found.evaluation = evaluated(program, model, batch, rounds=rounds)


def _loss(target: torch.Tensor) -> str:
    return "bce_with_logits" if target.is_floating_point() else "cross_entropy"


def _step(
    forward: Callable[..., Any], workload: Workload, batch: Batch, model: nn.Module
) -> Callable[[], list[torch.Tensor]]:
    """Return a step under distributed autograd: what it leaves is the loss, and the gradients here and on servers."""
    rrefs = _rrefs(model)

    def step(*, inspect: bool = False) -> list[torch.Tensor]:
        with dist_autograd.context() as context:
            output = forward(*batch.inputs)
            first = output[0] if isinstance(output, tuple) else output
            loss = scalar_loss(workload.loss, first, batch.target)
            dist_autograd.backward(context, [loss])
            if not inspect:
                return []
            held = dist_autograd.get_gradients(context)
            own = [held[each] for each in _parameters(model) if each in held]
            far = [each for rref in rrefs for each in rpc.rpc_sync(rref.owner(), world.gradients, (rref, context))]
        outputs = [leaf for _, leaf in leaves(output, "") if isinstance(leaf, torch.Tensor)]
        return [loss, *outputs, *own, *far]

    return step


def _rrefs(model: nn.Module) -> list[Any]:
    """Return the RRefs that a model holds, in attributes, lists and remote modules."""
    found: list[Any] = []
    for each in (vars(model), model._modules):
        for value in each.values():
            held = (getattr(each, "module_rref", each) for each in (value if isinstance(value, list) else [value]))
            found += [rref for rref in held if isinstance(rref, rpc.PyRRef)]
    return found


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    modules = [each for each in model._modules.values() if each is not None and not hasattr(each, "module_rref")]
    return [parameter for module in modules for parameter in module.parameters()]


def _bits(step: Callable[..., list[torch.Tensor]], program: Program) -> list[bytes]:
    """Return the bits that three steps leave behind, which begin with the same random numbers everywhere."""
    found: list[bytes] = []
    for number in range(3):
        for server in program.servers:
            rpc.rpc_sync(server, world.seed, (number,))
        world.seed(number)
        found += [
            each.detach().contiguous().view(torch.uint8).numpy().tobytes()
            for each in map(torch.atleast_1d, step(inspect=True))
        ]
    return found


def _agree(originals: Sequence[list[bytes]], actual: list[bytes]) -> bool:
    """Whether values have the original's bits, as far as it reproduces itself: a server may add up in any order."""
    if any(len(each) != len(actual) for each in originals):
        return False
    runs = zip(*originals, strict=True)
    return all(len({*run}) > 1 or bits == run[0] for bits, run in zip(actual, runs, strict=True))


def _race(steps: Mapping[str, Callable[[], object]], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return seconds per step of each arm, in blocks whose order is new in each round, and how busy the cores were."""
    seconds: dict[str, list[float]] = {arm: [] for arm in steps}
    cpu_s = dict.fromkeys(steps, 0.0)
    order, dice = list(steps), random.Random(0)
    for turn in range(rounds + 1):
        dice.shuffle(order)
        for arm in order:
            cpu_before_s, begun = _cpu_s(), time.perf_counter()
            for _ in range(STEPS):
                steps[arm]()
            passed_s = time.perf_counter() - begun
            if turn:  # the first warms up
                seconds[arm].append(passed_s / STEPS)
                cpu_s[arm] += _cpu_s() - cpu_before_s
    return seconds, {arm: cpu_s[arm] / (sum(each) * STEPS * cores()) for arm, each in seconds.items()}


def _cpu_s() -> float:
    """Return what this process has taken of the cores so far, and servers and launchers that it started."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))


def main() -> None:
    """Run the case that the command line describes in JSON, and print what came of it."""
    out = sys.stdout
    quiet()
    found = run(Asked(**json.loads(sys.argv[1])))
    out.write(json.dumps(asdict(found)) + "\n")
    out.flush()
    os._exit(0)  # what a broken collective left running is left


if __name__ == "__main__":
    main()
