"""The programs of a cell, all over the same weights and the same batch; and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed.rpc import rpc_async, rpc_sync
from torch.futures import wait_all

import fxlib
from benchmarks.grid import paper
from benchmarks.grid.cells import BLOCKING, BOUND, COMPUTE, FXLIB, PAPER, PIPELINE, PIPELINE_BOUND, Cell
from benchmarks.grid.expert import Expert, ExpertAcross, Way, ways
from benchmarks.grid.recommender import BATCH, DENSE, LOCAL_PARTS, ROWS, Blocking, Towers, server_name
from fxlib import ps
from fxlib.analysis.cost.bound import bound, bound_pipelined
from fxlib.analysis.cost.costs import Loop
from fxlib.analysis.cost.pipelined import predict_pipelined
from fxlib.analysis.cost.simulate import predict
from fxlib.pipeline.by_keys import conflicts
from fxlib.pipeline.choice import MOST_DEPTH
from fxlib.recipes import recipes
from fxlib.runtime import CapturedModule
from fxlib.spec.contract import contract_of
from fxlib.spec.workload import Batch, Optimizer, Workload

CHECKED_STEPS = 6
BATCHES = 6
"""Batches with keys of their own, where a cell has such."""
LR = 1e-4

Step = Callable[[], Tensor]
"""One whole step; returns the loss."""
Steps = Callable[[int], Iterable[Tensor]]
"""So many steps of a loop that knows its next batch; yields the loss of each."""
Predict = Callable[[], Tensor]
Send = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The step of a cell: weights, optimizer and batch, and what is around the model in each mode."""

    cell: Cell
    towers: Towers
    optimizer: torch.optim.Optimizer
    dense: Tensor
    batches: list[Tensor]
    """The keys of the steps, [BATCH, lookups] each, in turn."""

    @property
    def sparse(self) -> Tensor:
        """The keys of this step."""
        return self.batches[0]

    def steps(self, step: Step, count: int) -> Iterator[Tensor]:
        """Make so many steps, each with its own keys."""
        for _ in range(count):
            yield step()
            self.turn()

    def turn(self) -> None:
        """Go on to the keys of the next step."""
        self.batches.append(self.batches.pop(0))

    def upcoming(self, count: int) -> list[Tensor]:
        """Return the keys of so many steps from this one on."""
        return [self.batches[place % len(self.batches)] for place in range(count)]

    @classmethod
    def of(cls, cell: Cell) -> Job:
        """Draw weights and batch."""
        torch.manual_seed(0)
        towers = LOCAL_PARTS[cell.local_part](cell.lookups, cell.hidden)
        return cls(
            cell=cell,
            towers=towers,
            optimizer=torch.optim.SGD(towers.parameters(), lr=LR),
            dense=torch.randn(BATCH, DENSE),
            batches=keys(cell),
        )

    @property
    def servers(self) -> list[str]:
        """Names of the servers."""
        return [server_name(rank, self.cell.servers) for rank in range(self.cell.servers)]

    def reset_servers(self) -> None:
        """Have every server draw its first state again, and be as slow as the cell has it."""
        for server in self.servers:
            rpc_sync(server, ps.reset, args=(0,))
            rpc_sync(server, ps.set_service_time, args=(self.cell.service_ms / 1e3, self.cell.per))

    def loop(self, graph: CapturedModule, depth: int) -> Loop:
        """Return what the cost model is to know of a pipeline: how many of each lookup's rows earlier pushes change."""
        batches = [Batch(inputs=(self.dense, each)) for each in self.batches]
        return Loop(depth=depth, conflicts=conflicts(graph, batches, depth=depth))

    @property
    def workload(self) -> Workload:
        """What the step is, for the profile."""
        mode = "local" if self.cell.mode == "push" else self.cell.mode
        return Workload(batches=[(self.dense, self.sparse)], optimizer=Optimizer(name="sgd", lr=LR), mode=mode)

    def local(self, predict: Predict, send: Send) -> Step:
        """Forward, backward and SGD; `send` is done with the gradients that servers are to have."""

        def step() -> Tensor:
            self.optimizer.zero_grad()
            loss = predict().mean()
            loss.backward()
            self.optimizer.step()
            send()
            return loss

        return step

    def distributed(self, predict: Predict) -> Step:
        """Do the same under distributed autograd."""

        def step() -> Tensor:
            with dist_autograd.context() as context:
                loss = predict().mean()
                dist_autograd.backward(context, [loss])
                for parameter, gradient in dist_autograd.get_gradients(context).items():
                    parameter.grad = gradient
                self.optimizer.step()
                self.apply(context)
            return loss

        return step

    def forward(self, predict: Predict) -> Step:
        """Inference."""

        def step() -> Tensor:
            with torch.no_grad():
                return predict().mean()

        return step

    def step(self, predict: Predict, send: Send = lambda: None) -> Step:
        """Return the step of the cell's mode around a program."""
        match self.cell.mode:
            case "forward":
                return self.forward(predict)
            case "distributed":
                return self.distributed(predict)
            case _:
                return self.local(predict, send)

    def apply(self, context: int) -> None:
        """Have all servers apply a context's gradients at once, as `torch.distributed.optim.DistributedOptimizer` does.

        It is part of every program's loop, and no part of the model that is rewritten.
        """
        wait_all([rpc_async(server, ps.step, args=(context,)) for server in self.servers])


def keys(cell: Cell) -> list[Tensor]:
    """Draw the keys of the steps, which come in turn: each shares as many with the one before as the cell says."""
    if cell.zipf:
        weights = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -cell.zipf
        drawn = torch.multinomial(weights, BATCHES * BATCH * cell.lookups, replacement=True)
        return list(drawn.view(BATCHES, BATCH, cell.lookups).unbind())
    if cell.conflicts == 1.0:
        return [torch.randint(0, ROWS, (BATCH, cell.lookups))]
    shared = round(cell.conflicts * BATCH)
    rows = torch.stack([torch.randperm(ROWS) for _ in range(cell.lookups)], dim=1)
    own = rows[shared:].split(BATCH - shared)[:BATCHES]
    return [torch.cat([rows[:shared], each])[torch.randperm(BATCH)] for each in own]


@dataclass(frozen=True, kw_only=True)
class Arms:
    """The programs of a cell, and what is known of them before they run."""

    steps: Mapping[str, Step]
    """The steps of all arms but the expert's, by arm."""
    tried: Mapping[Way, Step]
    """The steps that the expert tries, by the way in which they ask."""
    across: Mapping[str, Steps]
    """The loops that read for the next step during this one, by arm, but the expert's."""
    tried_across: Mapping[Way, Steps]
    """Those that the expert tries."""
    ahead: CapturedModule
    """The module of the arm `pipeline`."""
    predicted_s: Mapping[str, float]
    """Seconds per step, by the cost model."""
    bound_s: Mapping[str, float]
    """Seconds per step that no schedule can beat, and of a loop that knows its next batch, by the cost model."""
    limits: Mapping[str, str]
    """What makes these steps no shorter, by bound."""


def arms(job: Job) -> Arms:
    """Write all programs of a cell; the graph is measured first, as a trial does."""
    graph = captured(job)
    profile = fxlib.profile(graph, job.workload)
    schedule, ahead = (
        recipes.apply(graph, "schedule", profile=profile, workload=job.workload).module for _ in range(2)
    )
    assert isinstance(ahead, CapturedModule)
    knows_next = job.cell.mode != "distributed"
    predicted = {arm: predict(each, profile).step_s for arm, each in ((BLOCKING, graph), (FXLIB, schedule))}
    bounds = {BOUND: bound(graph, profile)}
    if knows_next:
        loops = [job.loop(graph, depth) for depth in ((job.cell.depth,) if job.cell.depth else (1, 2, 4, MOST_DEPTH))]
        predicted[PIPELINE] = min(predict_pipelined(schedule, profile, each).step_s for each in loops)
        bounds[PIPELINE_BOUND] = bound_pipelined(graph, profile, loops[-1])
    return Arms(
        steps={
            BLOCKING: blocking(job),
            PAPER: rewritten(job, fxlib.optimize(graph, recipe=paper.RECIPE)),
            FXLIB: rewritten(job, schedule),
            COMPUTE: compute(job),
        },
        tried={way: by_hand(job, way) for way in ways(job.cell)},
        across={PIPELINE: pipelined(job, ahead)} if knows_next else {},
        tried_across={way: by_hand_across(job, way) for way in ways(job.cell)} if knows_next else {},
        ahead=ahead,
        predicted_s=predicted,
        bound_s={arm: each.step_s for arm, each in bounds.items()},
        limits={arm: each.limiting for arm, each in bounds.items()},
    )


def captured(job: Job) -> CapturedModule:
    """Return the graph of the blocking program. Gradients of lookups are known of only where they are pushed."""
    lookup = contract_of(ps.lookup)
    assert lookup is not None
    plain = job.cell.mode in {"local", "forward"}
    contracts = {"fxlib.ps:lookup": replace(lookup, gradient=None)} if plain else {}
    with torch.set_grad_enabled(job.cell.mode != "forward"):
        return fxlib.capture(Blocking(job.towers, job.cell), contracts=contracts)


def blocking(job: Job) -> Step:
    """The program as written, pushes included."""
    model, vectors = Blocking(job.towers, job.cell), list[Tensor]()

    def predict() -> Tensor:
        vectors[:] = model.vectors(job.sparse)
        if job.cell.mode == "push":
            for each in vectors:
                each.requires_grad_()
        return job.towers.interact(job.towers.bottom(job.dense), vectors)

    def send() -> None:
        if job.cell.mode == "push":
            for i, each in enumerate(vectors):
                to = server_name(i, job.cell.servers)
                rpc_sync(to, ps.push, args=(f"table{i}", job.sparse[:, i], each.grad))

    return job.step(predict, send)


def rewritten(job: Job, module: nn.Module) -> Step:
    """The captured program, rewritten."""

    def send() -> None:
        if job.cell.mode == "push":
            fxlib.push_gradients(module)

    return job.step(lambda: module(job.dense, job.sparse), send)


def by_hand(job: Job, way: Way) -> Step:
    """The program of an expert."""
    expert = Expert(job.towers, job.cell, way)
    return job.step(lambda: expert.predict(job.dense, job.sparse), expert.send)


def pipelined(job: Job, module: nn.Module) -> Steps:
    """The rewritten program under `fxlib.pipeline`."""
    step = rewritten(job, module)

    def steps(count: int) -> Iterator[Tensor]:
        batches = [(job.dense, each) for each in job.upcoming(count)]
        for _ in fxlib.pipeline(batches, module, depth=job.cell.depth or None):
            yield step()
            job.turn()

    return steps


def by_hand_across(job: Job, way: Way) -> Steps:
    """The program of an expert who knows the next batch."""
    return knowing_next(job, ExpertAcross(job.towers, job.cell, way))


def knowing_next(job: Job, expert: ExpertAcross) -> Steps:
    """The loop of an expert who knows the next batch."""
    step = job.step(lambda: expert.predict(job.dense, job.sparse), expert.send)

    def steps(count: int) -> Iterator[Tensor]:
        for place in range(count):
            expert.following = job.batches[1 % len(job.batches)] if place + 1 < count else None
            yield step()
            job.turn()

    return steps


def one_by_one(job: Job, step: Step) -> Steps:
    """Return the loop over a step that knows nothing of the next."""
    return lambda count: job.steps(step, count)


def compute(job: Job) -> Step:
    """The local work alone: remote results are there already, and their gradients go nowhere."""
    local = replace(job, cell=replace(job.cell, mode="forward" if job.cell.mode == "forward" else "local"))
    with torch.no_grad():
        vectors = [each.detach() for each in Blocking(job.towers, job.cell).vectors(job.sparse)]
    if job.cell.mode in {"push", "distributed"}:
        for each in vectors:
            each.requires_grad_()
    return local.step(lambda: job.towers.interact(job.towers.bottom(job.dense), vectors))


def check(job: Job, programs: Mapping[str, Steps]) -> None:
    """Run each program from the same first state, and compare each bit that it leaves with the blocking program's.

    Compute alone has the same loss in the first step, before servers have taken any gradient.
    """
    expected = outcome(job, programs[BLOCKING])
    for name, steps in programs.items():
        found = outcome(job, steps)
        if name == COMPUTE:
            assert found[0] == expected[0], name
        else:
            assert found == expected, f"{name} does not compute what {BLOCKING} does in {job.cell}"


def outcome(job: Job, steps: Steps) -> list[object]:
    """Losses of some steps from the first state of trainer and servers, and the last state."""
    first = {name: each.clone() for name, each in job.towers.state_dict().items()}
    batches = list(job.batches)
    job.reset_servers()
    losses: list[object] = [loss.item() for loss in steps(CHECKED_STEPS)]
    job.batches[:] = batches
    weights = [each.numpy().tobytes() for each in job.towers.state_dict().values()]
    job.towers.load_state_dict(first)
    return [*losses, *weights, *(rpc_sync(server, ps.state_digest) for server in job.servers)]
