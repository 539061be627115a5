"""Programs with `DistributedDataParallel` inside, remote calls and collectives, and what each rank says of a run."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

import fxlib
from fxlib import wire
from fxlib.errors import FxlibWarning
from tests.random_programs import simulation
from tests.wire.support import over_the_wire

STEPS = 3
"""The second of them orders the buckets of gradients anew."""


class Layers(nn.Module):
    """Layers of a class of its own, that draw random numbers and work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.dropout(torch.relu_(self.first(x)), 0.3, self.training))


class Counting(nn.Module):
    """A layer with a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.detach().sum(0))
        result: torch.Tensor = self.layer(x) + self.seen.clone()
        return result


INNER: list[Callable[[], nn.Module]] = [Layers, Counting, lambda: nn.Linear(4, 4)]
world = dist.distributed_c10d._get_default_group


class Model(nn.Module):
    """Its forward is a straight line of its parts, remote calls and collectives, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seed = seed
        draw = random.Random(seed)
        inner = [draw.choice(INNER)() for _ in range(3)]
        wrapped = [DistributedDataParallel(each, **_options(draw)) for each in inner]
        self.parts = nn.ModuleList([*wrapped, nn.Linear(4, 4), nn.Dropout(0.2)])

    def forward(self, x: torch.Tensor) -> Any:
        draw = random.Random(self.seed)
        values: list[Any] = [x]
        once = list(range(3))
        draw.shuffle(once)
        for _ in range(draw.randint(5, 12)):
            value = draw.choice(values[-4:])
            choice = draw.random()
            if choice < 0.4:
                values.append(_called(draw, value))
            elif choice < 0.7 and once:
                values.append(self.parts[once.pop()](value))
            elif choice < 0.8:
                values.append(functional.all_reduce(value, "sum", world()))
            else:
                values.append(self.parts[draw.choice([3, 4])](value))
        return sum(each.sum() for each in values[1:])


def _options(draw: random.Random) -> dict[str, Any]:
    flags = ("find_unused_parameters", "gradient_as_bucket_view", "forward_sync_buffers")
    return {name: draw.random() < 0.5 for name in flags} | {"bucket_cap_mb": draw.choice([None, 1])}


def _called(draw: random.Random, value: Any) -> Any:
    likely = (simulation.count, simulation.both, simulation.pure, simulation.lookup) * 3
    rare = (simulation.push, simulation.add, simulation.unknown, simulation.failing_read)
    return rpc.rpc_sync(draw.choice(simulation.SERVERS), draw.choice(likely + rare), (value,))


def outcomes(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train each program as captured, rewritten, and rewritten on one rank alone; return errors and bits of all."""
    found = []
    for seed in seeds:
        runs = []
        for chosen in ((), (0, 1), (0,)):
            model = Model(seed)
            captured = fxlib.capture(model)
            rewritten = _travelled(captured)
            runs.append(_trained(rewritten if dist.get_rank() in chosen else captured, model, seed))
        parts = [each.module for each in model.parts if isinstance(each, DistributedDataParallel)]
        found.append({"runs": runs, "moved": _moved(rewritten), "kinds": {type(each).__name__ for each in parts}})
    return found


def _travelled(captured: Any) -> Any:
    """Rewrite where only the message is known, and bind the answer."""
    there = over_the_wire(captured)
    answer = wire.encode(fxlib.optimize(there), beside=there)
    rewritten = wire.decode(wire.parse(wire.serialize(answer.graph)), root=captured)
    rewritten.meta["rewrite"] = fxlib.optimize(captured).meta["rewrite"]
    return rewritten


def _moved(rewritten: Any) -> bool:
    return any(each.action == "moved" for each in rewritten.meta["rewrite"].calls)


def _trained(module: nn.Module, model: nn.Module, seed: int) -> tuple[list[str], list[bytes]]:
    torch.manual_seed(dist.get_rank() + 1)
    errors, bits = [], list[bytes]()
    with simulation.simulated(seed) as servers:
        for _ in range(STEPS):
            error, found = _step(module, model)
            errors.append(error)
            bits += found
            servers.drain()
        state = servers.snapshot()
    return errors, [*bits, *(_bytes(state[name]) for name in sorted(state))]


def _step(module: nn.Module, model: nn.Module) -> tuple[str, list[bytes]]:
    x = torch.randn(2, 4, requires_grad=True)
    model.zero_grad()
    generator = torch.get_rng_state()
    try:
        out = module(x)
        if out.requires_grad:
            out.backward()
        fxlib.push_gradients(module)
    except (RuntimeError, ValueError) as raised:
        found = re.search(r"(no row|refused) [-\d.]+", str(raised))
        if found is None:  # no other error is a program's own
            raise
        torch.set_rng_state(generator)  # after an exception it is unspecified, and so are buffers
        for each in model.buffers():
            each.zero_()
        return found[0], []
    held = (*model.buffers(), *(each.grad for each in model.parameters()))
    return "", [_bytes(each) for each in (out, x.grad, *held, torch.get_rng_state())]


def _bytes(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.detach().contiguous().numpy().tobytes()


def accumulated() -> list[list[bytes]]:
    """Add up gradients of two steps, reduced over the ranks in the second one alone; as captured and rewritten."""
    found = []
    for rewrites in (False, True):
        model = Model(1)
        captured = fxlib.capture(model)
        module = _travelled(captured) if rewrites else captured
        torch.manual_seed(dist.get_rank() + 1)
        with simulation.simulated(1), ExitStack() as unreduced:
            for each in model.parts:
                if isinstance(each, DistributedDataParallel):
                    unreduced.enter_context(each.no_sync())
            module(torch.randn(2, 4)).backward()
            alone = [_bytes(each.grad) for each in model.parameters()]
            unreduced.close()
            module(torch.randn(2, 4)).backward()
            found.append([*alone, *(_bytes(each.grad) for each in model.parameters())])
        assert not fxlib.usage(module).original
    return found


def refused() -> tuple[str, str, list[str]]:
    """Ask, as one of the ranks, for what no trial can hold; nobody listens at the address."""
    model = Model(1)
    workload = fxlib.Workload(batches=[torch.randn(2, 4)], trainers=3)
    with warnings.catch_warnings(record=True) as warned, fxlib.connect("127.0.0.1:9") as client:
        warnings.simplefilter("always")
        result = client.optimize(model, workload, group="world", progress=False)
    told = [str(each.message) for each in warned if issubclass(each.category, FxlibWarning)]
    return "" if result.reason is None else result.reason.name, result.explanation, told
