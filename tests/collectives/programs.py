"""Programs with functional collectives, and what each rank says of a run of one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import rpc

import fxlib
from fxlib.runtime import is_issue, kind_of
from fxlib.runtime.ops.calls import COLLECTIVE
from tests.random_programs import simulation

RAW = torch.ops._c10d_functional
world = dist.distributed_c10d._get_default_group
Program = Callable[["Model", torch.Tensor], Any]


class Model(nn.Module):
    """Its forward is one of the programs below."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.bottom, self.middle, self.top = (nn.Linear(4, 4) for _ in range(3))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.program(self, x)


def reduced_and_used_later(model: Model, x: torch.Tensor) -> Any:
    h = functional.all_reduce(model.bottom(x), "sum", world())
    y = model.middle(x)
    return model.top(h.relu()) + y


def reduced_and_used_at_once(model: Model, x: torch.Tensor) -> Any:
    h = functional.all_reduce(model.bottom(x), "sum", world()).relu()
    return model.top(model.middle(x)) + h


def gathered_and_scattered(model: Model, x: torch.Tensor) -> Any:
    gathered = functional.all_gather_single(model.bottom(x), 0, [0, 1])
    wide = functional.all_gather_single(model.middle(x), 1, [0, 1])
    scattered = functional.reduce_scatter_single(model.top(wide[:, :4]), "sum", 0, world())
    narrow = functional.reduce_scatter_single(wide, "sum", 1, world())
    return gathered.sum() + scattered.sum() * narrow.sum()


def exchanged(model: Model, x: torch.Tensor) -> Any:
    swapped = functional.all_to_all_single(model.bottom(x), None, None, world())
    uneven = functional.all_to_all_single(model.middle(x), [1, 1], [1, 1], world())
    return model.top(swapped) * uneven


def sent_to_all(model: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        first = functional.broadcast(x, 0, world())
    return model.top(model.middle(x)) + first


def coalesced(model: Model, x: torch.Tensor) -> Any:
    a, b = functional.all_reduce_coalesced([model.bottom(x), model.middle(x)], "sum", world())
    return model.top(x) + a * b


def raw_operators_waited_for_too_early(model: Model, x: torch.Tensor) -> Any:
    h = RAW.wait_tensor(RAW.all_reduce(model.bottom(x), "sum", "0"))
    g = RAW.all_reduce.default(model.middle(x), reduce_op="sum", group_name="0")
    g = functional.wait_tensor(g)
    return model.top(model.top(x)) + h + g


def two_groups_and_a_write(model: Model, x: torch.Tensor) -> Any:
    h = functional.all_reduce(x, "sum", world()) + functional.all_reduce(x.detach(), "max", [0, 1])
    model.seen.add_(x.detach().sum(0))
    x.data.mul_(2)
    return model.top(model.bottom(x)) + h + model.seen


PROGRAMS: list[Program] = [
    *(reduced_and_used_later, reduced_and_used_at_once, gathered_and_scattered, exchanged, sent_to_all, coalesced),
    *(raw_operators_waited_for_too_early, two_groups_and_a_write),
]


def random_program(seed: int) -> Program:
    """Draw a straight-line program of layers, elementwise work and collectives, each used at once or later."""

    def program(model: Model, x: torch.Tensor) -> Any:
        draw = random.Random(seed)
        values: list[Any] = [x]
        for _ in range(draw.randint(4, 12)):
            values.append(_draw_step(draw, model, draw.choice(values[-4:])))
        return sum(each.sum() for each in values[1:])

    return program


def _draw_step(draw: random.Random, model: Model, value: Any) -> Any:
    choice = draw.randrange(7)
    if choice == 0:
        return functional.all_reduce(value, draw.choice(["sum", "SUM"]), world())
    if choice == 1:
        return functional.reduce_scatter_single(torch.cat([value, value * 2]), "sum", 0, world())
    if choice == 2:
        return RAW.wait_tensor(RAW.all_reduce(value.sin(), "sum", "0"))
    if choice == 3:
        return functional.all_gather_single(value, 0, world())[:2]
    if choice == 4:
        return value.sin() * 0.5
    return draw.choice([model.bottom, model.middle, model.top])(value)


def mixed_program(seed: int) -> Program:
    """Draw a program of layers, collectives and remote calls, some of which fail."""

    def program(model: Model, x: torch.Tensor) -> Any:
        draw = random.Random(seed)
        values: list[Any] = [x]
        for _ in range(draw.randint(5, 14)):
            value = draw.choice(values[-4:])
            values.append(_draw_call(draw, value) if draw.random() < 0.5 else _draw_step(draw, model, value))
        return sum(each.sum() for each in values[1:])

    return program


def _draw_call(draw: random.Random, value: Any) -> Any:
    to = draw.choice(simulation.SERVERS)
    likely = (simulation.count, simulation.both, simulation.pure, simulation.lookup) * 3
    rare = (simulation.push, simulation.add, simulation.unknown, simulation.failing_read, simulation.failing_write)
    function = draw.choice(likely + rare)
    if draw.random() < 0.3:
        return rpc.rpc_async(to, function, (value,)).wait()
    return rpc.rpc_sync(to, function, (value,))


def mixed_outcomes(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Run mixed programs captured and rewritten; for each: results, or errors, and what the servers hold."""
    found = []
    for seed in seeds:
        captured = fxlib.capture(Model(mixed_program(seed)))
        forms = (captured, fxlib.optimize(captured))
        found.append({"bits": [_mixed_bits(form, seed) for form in forms]})
    return found


def _mixed_bits(module: torch.fx.GraphModule, seed: int) -> tuple[str, list[bytes]]:
    with simulation.simulated(seed) as servers:
        try:
            error, bits = "", _bits(module)
            fxlib.push_gradients(module)
        except (RuntimeError, ValueError) as raised:
            found = re.search(r"(no row|refused) [-\d.]+", str(raised))
            if found is None:  # no other error is a program's own
                raise
            error, bits = found[0], []
        servers.drain()
        state = servers.snapshot()
    return error, [*bits, *(state[name].detach().numpy().tobytes() for name in sorted(state))]


def outcomes(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """Run each program as it is, captured and rewritten; for each: all bits, and the calls."""
    return [_outcome(program) for program in programs]


def random_outcomes(seeds: Sequence[int]) -> list[dict[str, Any]]:
    return outcomes([random_program(seed) for seed in seeds])


def _outcome(program: Program) -> dict[str, Any]:
    model = Model(program)
    captured = fxlib.capture(model)
    rewritten = fxlib.optimize(captured)
    bits = [_bits(form) for form in (model, captured)]
    with fxlib.runtime.record() as recording:
        bits.append(_bits(rewritten))
    return {
        "bits": bits,
        "flights": [span.to for span in recording.timeline.spans if span.kind == "in_flight"],
        "issued": [_operations(form) for form in (captured, rewritten)],
        "calls": [(each.function, each.to, each.action) for each in rewritten.meta["rewrite"].calls],
        "order": [node.name for node in rewritten.graph.nodes],
    }


def _bits(model: nn.Module) -> list[bytes]:
    model.zero_grad()
    model.get_buffer("seen").zero_()
    torch.manual_seed(dist.get_rank() + 1)
    x = torch.randn(2, 4, requires_grad=True)
    out = model(x)
    if out.requires_grad:
        out.sum().backward()
    tensors = [out, x, x.grad, *model.buffers(), *(each.grad for each in model.parameters())]
    return [b"" if each is None else each.detach().contiguous().numpy().tobytes() for each in tensors]


def _operations(module: torch.fx.GraphModule) -> list[str]:
    nodes = module.graph.nodes
    return [str(node.args[0]) for node in nodes if kind_of(node) is COLLECTIVE and (is_issue(node) or not _waits(node))]


def _waits(node: torch.fx.Node) -> bool:
    return node.target is COLLECTIVE.wait
