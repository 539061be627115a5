"""Random training loops: a model that looks parameters up on several servers, and a program around it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import rpc
from torch.fx import Graph, GraphModule, Node

import fxlib
from fxlib import batch
from fxlib.errors import FxlibError
from fxlib.runtime import CapturedModule, functions, ops
from fxlib.runtime.gradients.tape import Tape
from fxlib.runtime.module_state import ModuleState
from fxlib.spec.contract import contract_of
from tests.random_programs import simulation
from tests.random_programs.simulation import SERVERS

HERE = "tests.random_programs.trainings"
REFUSED_AT = 7.0
"""The table's first element from which `push_or_fail` fails."""


@fxlib.remote(reads="table", gradient=f"{HERE}:push_table")
def look_up_table(x: torch.Tensor) -> torch.Tensor:
    return simulation._state()["table"] * 0.5 + x.detach() * 0.25


@fxlib.remote(writes="table")
def push_table(x: torch.Tensor, gradient: torch.Tensor) -> None:
    _update("table", x, gradient)


@fxlib.remote(reads="count", gradient=f"{HERE}:push_count")
def look_up_count(x: torch.Tensor) -> torch.Tensor:
    return simulation._state()["count"] + x.detach().sin()


@fxlib.remote(writes="count", batchable=False)
def push_count(x: torch.Tensor, gradient: torch.Tensor) -> None:
    _update("count", x, gradient)


@fxlib.remote(reads=["table", "count"], gradient=f"{HERE}:push_both")
def look_up_both(x: torch.Tensor) -> torch.Tensor:
    return simulation._state()["table"] * x.detach() - simulation._state()["count"]


@fxlib.remote(writes=["table", "count"])
def push_both(x: torch.Tensor, gradient: torch.Tensor) -> None:
    _update("table", x, gradient)
    _update("count", x, gradient)


@fxlib.remote(reads="table", gradient=f"{HERE}:push_or_fail")
def look_up_or_fail(x: torch.Tensor) -> torch.Tensor:
    return simulation._state()["table"] * 0.25


@fxlib.remote(writes="table", batchable=False)
def push_or_fail(x: torch.Tensor, gradient: torch.Tensor) -> None:
    first = float(simulation._state()["table"].detach()[0, 0])
    if abs(first) > REFUSED_AT:
        raise ValueError(f"refused at {first:.6f}")
    _update("table", x, gradient * 8)


@fxlib.remote(reads="table", gradient=f"{HERE}:push_anywhere")
def look_up_anywhere(x: torch.Tensor) -> torch.Tensor:
    return simulation._state()["table"] * 0.125 + x.detach()


def push_anywhere(x: torch.Tensor, gradient: torch.Tensor) -> None:
    """Declares nothing, and writes on every server, where it can reach them."""
    for state in simulation._WORLD[-1].states.values() if simulation._WORLD else [simulation._state()]:
        state["count"] = (state["count"] * 0.5 + state["table"] * 0.25 + gradient).detach()


functions.register(push_anywhere)


def _update(name: str, x: torch.Tensor, gradient: torch.Tensor) -> None:
    state = simulation._state()
    state[name] = (state[name] * 0.75 + x.detach().mean() * gradient + gradient.detach() * 0.5).detach()


@fxlib.remote(reads="rows", gradient=f"{HERE}:push_row")
def look_up_row(x: torch.Tensor, row: str = "first") -> torch.Tensor:
    return simulation._state().get(row, torch.ones(2, 4)) + x.detach() * 0.5


@fxlib.remote(writes="rows", part="row")
def push_row(x: torch.Tensor, gradient: torch.Tensor, row: str = "first") -> None:
    state = simulation._state()
    state[row] = (state.get(row, torch.ones(2, 4)) * 0.75 + gradient).detach()


@fxlib.remote(reads="count", gradient=f"{HERE}:push_count")
def look_up_unsteadily(x: torch.Tensor) -> torch.Tensor:
    """Fails where what it reads has come so far."""
    found = simulation._state()["count"]
    if float(found.detach()[0, 0]) > 0.9:  # found[0, 0] may deadlock: docs/explanation/effects.md
        raise LookupError(f"no row at {float(found.detach().sum()):.6f}")
    return found * x.detach()


KEYED_ROWS, REFUSED_ROW = 1000, 3.0
"""The rows of a table that is read by keys, and an element from which `look_up_rows_or_fail` fails."""


def _rows(table: str) -> torch.Tensor:
    first = torch.arange(KEYED_ROWS * 4, dtype=torch.float32).view(KEYED_ROWS, 4).sin()
    return simulation._state().get(table, first)


@fxlib.remote(reads="keyed", part="table", keys="keys", concurrent=True, gradient=f"{HERE}:push_rows")
def look_up_rows(table: str, keys: torch.Tensor) -> torch.Tensor:
    return _rows(table)[keys]


@fxlib.remote(reads="keyed", part="table", keys="keys", gradient=f"{HERE}:push_rows_last")
def look_up_rows_or_fail(keys: torch.Tensor, table: str) -> torch.Tensor:
    found = _rows(table)[keys]
    if float(found.abs().max()) > REFUSED_ROW:
        raise LookupError(f"no row at {float(found.sum()):.6f}")
    return found


@fxlib.remote(writes="keyed", part="table", keys="keys")
def push_rows(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    changed = _rows(table).clone()
    changed.index_add_(0, keys.reshape(-1).remainder(KEYED_ROWS), gradient.reshape(-1, 4), alpha=-2.0)
    simulation._state()[table] = changed


@fxlib.remote(writes="keyed", part="table", keys="keys")
def push_rows_last(keys: torch.Tensor, table: str, gradient: torch.Tensor) -> None:
    push_rows(table, keys, gradient)


@fxlib.remote(reads="keyed", keys="keys", concurrent=True, gradient=f"{HERE}:push_bags")
def look_up_bags(table: str, keys: torch.Tensor) -> torch.Tensor:
    return _rows(table)[keys].sum(1)


@fxlib.remote(writes="keyed", keys="keys")
def push_bags(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    push_rows(table, keys, gradient.unsqueeze(1).expand(*keys.shape, 4))


@fxlib.remote(reads="keyed", part="table", keys="keys", gradient=f"{HERE}:push_and_decay")
def look_up_decayed(table: str, keys: torch.Tensor) -> torch.Tensor:
    return _rows(table)[keys]


@fxlib.remote(writes="keyed", part="table")
def push_and_decay(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    simulation._state()[table] = _rows(table) * 0.75
    push_rows(table, keys, gradient)


@fxlib.remote(
    reads="keyed",
    part="table",
    keys="keys",
    concurrent=True,
    gradient=f"{HERE}:push_momentum",
    with_state=f"{HERE}:look_up_known",
)
def look_up_momentum(table: str, keys: torch.Tensor) -> torch.Tensor:
    return _rows(table)[keys]


@fxlib.remote(reads="keyed", part="table", keys="keys", concurrent=True)
def look_up_known(table: str, keys: torch.Tensor) -> batch.KnownRows:
    return batch.KnownRows(rows=_rows(table)[keys], state=(_momentum(table)[keys],))


@fxlib.remote(writes="keyed", part="table", keys="keys", update=f"{HERE}:moved")
def push_momentum(table: str, keys: torch.Tensor, gradient: torch.Tensor) -> None:
    named, places = keys.remainder(KEYED_ROWS).unique(return_inverse=True)
    rows, momentum = _rows(table).clone(), _momentum(table).clone()
    rows[named], momentum[named] = _moved(rows[named], momentum[named], places, gradient, MOMENTUM)
    simulation._state()[table], simulation._state()[f"momentum of {table}"] = rows, momentum


@fxlib.remote(pure=True)
def moved(known: batch.KnownRows, table: str, keys: torch.Tensor, gradient: torch.Tensor) -> batch.KnownRows:
    named, places = keys.unique(return_inverse=True)
    first = torch.stack([(keys == key).nonzero()[0, 0] for key in named]) if len(named) else named
    (momentum,) = known.state
    rows, momentum = _moved(known.rows[first], momentum[first], places, gradient, MOMENTUM)
    return replace(known, rows=rows[places], state=(momentum[places],))


MOMENTUM = 0.75


def _momentum(table: str) -> torch.Tensor:
    return simulation._state().get(f"momentum of {table}", torch.zeros(KEYED_ROWS, 4))


def _moved(
    rows: torch.Tensor, momentum: torch.Tensor, places: torch.Tensor, gradient: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    momentum = (momentum * factor).index_add(0, places, gradient)
    return rows - momentum * 0.5, momentum


def forget_rows() -> None:
    """Put the rows of a real server back to the first ones."""
    for row in ("first", "second", "users", "items"):
        simulation._OWN.pop(row, None)
        simulation._OWN.pop(f"momentum of {row}", None)


LOOK_UPS = (look_up_table, look_up_table, look_up_count, look_up_both, look_up_row, look_up_row, look_up_row)
RARE = (look_up_or_fail, look_up_anywhere)
DEVIATIONS = (
    "two backwards",
    "no push",
    "skipped",
    "evaluation before the push",
    "two forwards",
    "backward raises",
    "optimizer raises",
    "interrupted",
    "clipped",
)


IN_THE_LOOP = (
    "batch changed",
    "batch replaced",
    "own write",
    "own write in flight",
    "write of another kind",
    "no forward",
    "forward twice",
)
"""What a loop may do besides, where the next batch's calls may be under way."""


Given = tuple[torch.Tensor, str]


class World(Protocol):
    """Where a training's calls go."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the state of all servers."""


class Root(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(2**31))
        self.weight = nn.Parameter(torch.randn(2, 4))
        self.linear = nn.Linear(4, 4)


@dataclass(kw_only=True)
class Training:
    """A model, and what the program around it does in each step."""

    module: CapturedModule
    seed: int
    steps: int
    deviations: Mapping[int, str]
    """What single steps do besides, by step: some of `DEVIATIONS`."""
    zeroes: bool
    """Whether gradients, those that hooks have seen among them, and inputs are overwritten before the push."""
    by_keys: bool = False
    """Whether most lookups are by keys."""
    in_the_loop: Mapping[int, str] = field(default_factory=dict)
    """What the loop does besides in single steps, by step: some of `IN_THE_LOOP`."""

    def batch(self, step: int) -> Given:
        """Return the arguments of a step's forward."""
        torch.manual_seed(self.seed + step)
        return torch.randn(2, 4), SERVERS[step % 2]


def random_training(
    seed: int, *, rare: bool = True, loop: bool = False, by_keys: bool = False, updated: bool = False
) -> Training:
    """Make the training that belongs to a seed.

    Args:
        seed: decides everything.
        rare: some pushes may fail, or declare nothing.
        loop: most lookups need the batch alone, some fail, and the loop has ways of its own.
        by_keys: most lookups are by keys, of which few or many come again in the next step.
        updated: most of these come with their state, and their pushes say how they update it.
    """
    rng = random.Random(seed)
    found = rng.random()
    deviations: dict[int, str] = {}
    if found < 0.3:
        deviations[rng.randrange(4)] = rng.choice(DEVIATIONS)
    elif found < 0.4:
        deviations = dict.fromkeys(range(6), rng.choice([each for each in DEVIATIONS if each != "no push"]))
    elif found < 0.6:
        deviations = {step: rng.choice(DEVIATIONS) for step in range(6) if rng.random() < 0.5}
    return Training(
        module=CapturedModule(Root(rng), _graph(rng, rare=rare, loop=loop, by_keys=by_keys, updated=updated)),
        seed=seed,
        by_keys=by_keys,
        steps=6,
        deviations=deviations,
        zeroes=rng.random() < 0.7,
        in_the_loop={step: rng.choice(IN_THE_LOOP) for step in range(6) if loop and rng.random() < 0.2},
    )


def _graph(rng: random.Random, *, rare: bool, loop: bool, by_keys: bool = False, updated: bool = False) -> Graph:
    graph = Graph()
    x, to = graph.placeholder("x"), graph.placeholder("to")
    values, gathered = [graph.call_function(torch.mul, (graph.get_attr("weight"), x))], []
    spread, decays = rng.choice((2, 30, 200, KEYED_ROWS)), rng.random() < 0.1
    if updated:
        spread = min(spread, 30)
    for index in range(rng.randrange(2, 7)):
        if by_keys and rng.random() < 0.8:
            gathered.append(_look_up_by_keys(graph, rng, (x, to), index, spread, decays=decays, updated=updated))
            values.append(_work(graph, rng, gathered[-1], rng.choice(values)))
            continue
        function = rng.choice(RARE) if rare and rng.random() < 0.08 else rng.choice(LOOK_UPS)
        sent = rng.choice((x, *values))
        if loop:
            function = look_up_unsteadily if rng.random() < 0.08 else function
            sent = graph.call_function(torch.abs, (x,)) if rng.random() < 0.7 else sent
        gathered.append(_look_up(graph, rng, function, (sent, to), index))
        values.append(_work(graph, rng, gathered[-1], rng.choice(values)))
        if rng.random() < 0.5:
            values.append(graph.call_module("linear", (rng.choice(values),)))
    if len(gathered) > 1 and rng.random() < 0.5:  # gradients that share memory
        joined = graph.call_function(torch.cat, (tuple(gathered), 0))
        values.append(graph.call_method("view", (joined, len(gathered), 2, 4)))
        values.append(graph.call_method("sum", (values.pop(), 0)))
    total = values[0]
    for value in rng.sample(values, rng.randrange(1, len(values) + 1)):
        total = graph.call_function(torch.add, (total, value))
    # What the joined gradients are views of is then what a hook on the output sees.
    shares = len(gathered) > 1 and rng.random() < 0.3
    graph.output(graph.call_function(torch.cat, ((*gathered, total), 0)) if shares else total)
    return graph


def _look_up(
    graph: Graph, rng: random.Random, function: Callable[..., object], given: tuple[Node, Node], index: int
) -> Node:
    value, dynamic = given
    to = rng.choice((*SERVERS, *SERVERS, dynamic))
    contract, named = contract_of(function), {}
    assert contract is not None
    if function is look_up_row:
        named = {"row": rng.choice(("first", "second"))}
    call = graph.call_function(ops.remote_call, (to, functions.name_of(function), (value,), named, None))
    call.meta["contract"] = contract
    tracked = graph.call_function(ops.track_gradient, (call, to, contract.gradient, (value,), named, None, index))
    return graph.call_method("mul_", (tracked, 0.5)) if rng.random() < 0.15 else tracked


def _look_up_by_keys(
    graph: Graph, rng: random.Random, given: tuple[Node, Node], index: int, spread: int, *, decays: bool, updated: bool
) -> Node:
    value, dynamic = given
    to = rng.choice((*SERVERS, *SERVERS, *SERVERS, dynamic))
    function = rng.choice((look_up_rows, look_up_rows, look_up_rows, look_up_rows_or_fail, look_up_bags))
    function = look_up_momentum if updated and rng.random() < 0.95 else function
    function = look_up_decayed if decays and rng.random() < 0.3 else function
    drawn = graph.call_function(torch.mul, (graph.call_function(torch.abs, (value,)), rng.choice((50, 977))))
    keys = graph.call_function(torch.remainder, (graph.call_method("long", (drawn,)), spread))
    if function is not look_up_bags:
        keys = graph.call_method("select", (keys, 1, rng.randrange(4)))
    table = rng.choice(("users", "items"))
    args = (keys, table) if function is look_up_rows_or_fail else (table, keys)
    contract = contract_of(function)
    assert contract is not None
    call = graph.call_function(ops.remote_call, (to, functions.name_of(function), args, {}, None))
    call.meta["contract"] = contract
    tracked = graph.call_function(ops.track_gradient, (call, to, contract.gradient, args, {}, None, index))
    return graph.call_method("mul_", (tracked, 0.5)) if updated and rng.random() < 0.2 else tracked


def _work(graph: Graph, rng: random.Random, one: Node, other: Node) -> Node:
    function = rng.choice((torch.mul, torch.add, torch.sub, torch.maximum))
    return graph.call_function(function, (graph.call_function(torch.tanh, (one,)), other))


Loop = Callable[[list[Given], GraphModule], Iterable[Given]]
"""Yields the batches of a training that it is given."""


def run(
    training: Training,
    module: GraphModule,
    servers: AbstractContextManager[World],
    loop: Loop = lambda batches, _: batches,
    looks: Callable[[int], bool] = lambda _: True,
) -> dict[str, object]:
    """Train from the first state; return every bit of what each step left behind, and the error that ended it.

    Args:
        training: what is trained, and how.
        module: the program of its forward.
        servers: the world.
        loop: what the batches come through.
        looks: whether to look at trainer and servers behind a step.
    """
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    trace: dict[str, object] = {"error": ""}
    try:
        with servers as world:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
            batches = list(map(training.batch, range(training.steps)))
            under_way: Any = None
            try:
                for step, given in enumerate(loop(batches, module)):
                    if under_way is not None:
                        under_way.wait()
                    if training.in_the_loop.get(step) != "no forward":
                        _step(training, module, optimizer, step, given, trace)
                    under_way = None
                    if training.in_the_loop.get(step) == "own write in flight":  # until the next step begins
                        under_way = rpc.rpc_async(given[1], push_count, args=(torch.ones(2, 4), torch.ones(2, 4)))
                        continue  # the servers' state is either
                    if looks(step):
                        state = dict(module.state_dict())
                        trace |= {f"{step} {name}": _bits(each) for name, each in (world.snapshot() | state).items()}
            except FxlibError as error:
                trace["error"] = f"FxlibError: {error}"
            except Exception as error:  # noqa: BLE001 - an error is an outcome; servers add tracebacks to it
                trace["error"] = f"{type(error).__name__}: {error}".partition("Traceback")[0]
            if under_way is not None:  # else it writes to what is no longer this training's
                under_way.wait()
            _state(module).tape = Tape()
    finally:
        with torch.no_grad():
            for name, tensor in module.state_dict(keep_vars=True).items():
                tensor.copy_(before[name])
                tensor.grad = None
    return trace


def _state(module: GraphModule) -> ModuleState:
    assert isinstance(module, CapturedModule)
    return module._fxlib


def _step(  # noqa: PLR0917 - the step of a training loop, with all that such steps do
    training: Training,
    module: GraphModule,
    optimizer: torch.optim.Optimizer,
    step: int,
    given: Given,
    trace: dict[str, object],
) -> None:
    deviation, in_the_loop = training.deviations.get(step, ""), training.in_the_loop.get(step, "")
    optimizer.zero_grad()
    x, server = _in_the_loop(in_the_loop, *given)
    output = module(x, server)
    output = output + module(x, server) * 0.5 if in_the_loop == "forward twice" else output
    kept: list[torch.Tensor] = []
    output.register_hook(kept.append)
    loss = output.square().mean()
    if deviation == "two forwards":
        loss = loss + module(x * 0.5, SERVERS[0]).sum() / 3
    raising = list(module.parameters())[-1].register_hook(_refuse) if deviation == "backward raises" else None
    with nullcontext() if raising is None else suppress(ArithmeticError):
        loss.backward(retain_graph=deviation == "two backwards")
    if raising is not None:
        raising.remove()
        optimizer.zero_grad()  # of which some had come, or not
    if deviation == "two backwards":
        (loss * 0.5).backward()
    trace[f"{step} loss"] = _bits(loss)
    trace |= {f"{step} grad of {name}": _bits(each.grad) for name, each in module.named_parameters() if _has(each)}
    if training.zeroes:
        x.zero_()
    if deviation == "evaluation before the push":
        with torch.no_grad():
            trace[f"{step} evaluation"] = _bits(module(x + 1, SERVERS[1]))
    if deviation == "clipped":
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    if deviation not in {"optimizer raises", "interrupted"}:
        optimizer.step()
    if training.zeroes:
        optimizer.zero_grad(set_to_none=False)
        for gradient in kept:  # which others may share
            gradient.zero_()
    if deviation in {"skipped", "optimizer raises", "interrupted"}:  # as the handler of either does
        fxlib.drop_gradients(module)
    elif deviation != "no push":
        fxlib.push_gradients(module)


def _in_the_loop(what: str, x: torch.Tensor, server: str) -> Given:
    """Do what a loop may do besides, before its forward; return what this is then called with."""
    if what == "batch changed":
        x.mul_(1.5)
    elif what == "batch replaced":
        return x * 2, server
    elif what == "own write":
        rpc.rpc_sync(server, push_table, args=(x, torch.ones(2, 4)))
        rpc.rpc_sync(server, push_rows, args=("users", torch.arange(3), torch.ones(3, 4)))
    elif what == "write of another kind":
        rpc.rpc_sync(server, push_anywhere, args=(x, torch.ones(2, 4)))
    return x, server


def _refuse(gradient: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError(f"no gradient {gradient}")


def _has(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None


def _bits(tensor: torch.Tensor | None) -> bytes:
    assert tensor is not None
    return tensor.detach().contiguous().numpy().tobytes()
