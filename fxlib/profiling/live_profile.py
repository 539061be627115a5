"""Profiles a model in the user's own live RPC world, and leaves everything unchanged."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import autograd as dist_autograd
from torch.fx import GraphModule

from fxlib.capture.coerce import Model, as_graph
from fxlib.config import DISABLE, disabled
from fxlib.errors import CaptureError, FxlibWarning, WorkloadError
from fxlib.profiling.measure import contract_of, measure
from fxlib.profiling.step_runs import STEPS, WARMUPS, batches_of
from fxlib.runtime import CapturedModule, is_call, is_issue, ops
from fxlib.runtime.ops.registry import CREATIONS
from fxlib.runtime.ops.timeline import span
from fxlib.runtime.preserve_state import copied, state_kept
from fxlib.runtime.push_gradients import push_gradients
from fxlib.runtime.submodules import local_modules
from fxlib.spec.inputs import Batch, draw
from fxlib.spec.profile import Profile
from fxlib.spec.training import build_optimizer, scalar_loss
from fxlib.spec.workload import Optimizer, Workload

_LOG = logging.getLogger(__name__)

_STEPS_THAT_WRITE = 1


def profile(
    model: Model, batches: Sequence[object] | Workload, *, steps: int | None = None, pushes: bool = False
) -> Profile:
    """Run a few steps of a model in this process's live RPC world, and return its profile.

    Nothing changes, except by `pushes`: no gradient is pushed, the optimizer takes its steps on copies, and
    parameters, buffers, gradients, training flags and random generators are restored. Remote calls of the model that
    write do so once for each step, as in the program; such a model runs for two steps, the first of which warms up,
    and the profile's notes say so. Then calls that are declared to change nothing are repeated, many at once, to
    measure how their servers answer. Profiling takes memory for one copy of the parameters, and seconds rather than
    minutes.

    A model that cannot be captured, and that `Client.optimize` would leave unchanged, gives a warning and an empty
    profile, so that the launcher trains on; FXLIB_DISABLE gives an empty profile without a warning or a step.

    Args:
        model: a module, captured or not, a graph of torch.fx, or an exported program. A model that cannot be
            traced is exported with the batches.
        batches: batches as for `Workload`, to measure the forward alone; or the workload itself, to measure loss,
            backward and optimizer, too. Batches that it describes are drawn from its seed.
        steps: number of steps to measure, after the warm-up steps.
        pushes: whether to push the gradients of remote results after each backward, as `fxlib.push_gradients` does, to
            measure the pushes. The servers apply them; the notes say in how many steps. Otherwise a push is assumed to
            take as long as its call.

    Raises:
        FxlibError: the graph holds batches of calls, or the original's own forward runs instead of it.
        WorkloadError: the batches are not valid, `steps` is not positive, or `pushes` is set without a workload of
            local autograd.
        Exception: whatever the model or a push raises.
    """
    if disabled():
        return Profile(notes=(f"{DISABLE} is set",))
    try:
        return measured(model, batches, steps=steps, pushes=pushes)
    except CaptureError as error:
        problem = f"nothing was profiled, since the model cannot be captured: {error}"
        warnings.warn(problem, FxlibWarning, stacklevel=2)
        return Profile(notes=(problem,))


def measured(
    model: Model, batches: Sequence[object] | Workload, *, steps: int | None = None, pushes: bool = False
) -> Profile:
    """Do what `profile` does, for those who want the profile itself and no launcher to go on.

    Raises:
        CaptureError: the module holds something that cannot be recorded.
        Exception: what `profile` raises.
    """
    workload = batches if isinstance(batches, Workload) else None
    described = workload if workload is not None else Workload(batches=_sequence(batches))
    if steps is not None and steps < 1:
        raise WorkloadError("must be at least 1", where="profile(steps=)")
    if pushes and (workload is None or workload.mode != "local"):
        raise WorkloadError(
            "only steps of local autograd have gradients to push",
            where="profile(pushes=)",
            hint='Pass a Workload whose mode is "local", or leave pushes= out.',
        )
    captured = as_graph(model, described.samples, contracts=described.contracts)
    writing = calls_that_may_write(captured, described)
    count = steps if steps is not None else (_STEPS_THAT_WRITE if writing else STEPS)
    warmups = 1 if writing else WARMUPS
    module = _sibling(captured)
    trains = workload is not None and workload.mode != "forward"
    parts = modules_of_step(captured, described) if trains else []
    parameters = [each for part in parts for each in parameters_in(part)]
    with step_state_kept(captured, described), _hooks_left_out(parameters) as hooked:
        # Calls that write are made no more often than the notes say.
        inputs = _inputs(described, batches_of(count, warmups, calibrates=not writing))
        step = _Step(module, parameters, inputs, workload, pushes=pushes)
        found = measure(
            module,
            step,
            steps=count,
            warmups=warmups,
            contracts=described.contracts,
            calibrates=not writing,
            recorded=workload is not None and workload.mode == "distributed",
        )
        local = workload is not None and workload.mode == "local"
        own_s = optimizer_s(captured, described.trainer_optimizer) if local else 0.0
    notes = list(_notes(found, workload, writing, count + warmups))
    if hooked:
        notes.append(f"hooks of {hooked} parameters were left out, and what they take is not in the figures")
    if elsewhere := accelerators_of(captured):
        times = "times of local work are for launching it, not for running it"
        notes.append(f"weights are on {', '.join(elsewhere)}: {times}")
    if pushes:
        notes.append(f"gradients were pushed, in each of {step.pushed} steps")
    elif any(call.push is not None for call in found.calls):
        notes.append("no gradient was pushed; a push is taken to need what its call needs")
    whole_s = found.step_s and found.step_s + own_s
    made = replace(found, rest_s=found.rest_s + own_s, step_s=whole_s, notes=tuple(notes))
    _LOG.info("profiled %d calls to %d servers in %d steps", len(made.calls), len(made.servers), count)
    for note in notes:
        _LOG.info("profile: %s", note)
    return made


class _Step:
    """Runs one step: forward, loss and backward, as far as the workload has them, and pushes on request.

    Only pushes outlast a step. `pushed` counts the steps that had gradients to push.
    """

    def __init__(
        self,
        module: CapturedModule,
        parameters: Sequence[nn.Parameter],
        inputs: Iterator[Batch],
        workload: Workload | None,
        *,
        pushes: bool,
    ) -> None:
        self.pushed = 0
        self._pushes = pushes
        self._module = module
        self._parameters = parameters
        self._inputs = inputs
        self._workload = workload if workload is not None and workload.mode != "forward" else None
        self._grad_enabled = module._fxlib.conditions.grad_enabled

    def __call__(self) -> None:
        batch = next(self._inputs)
        if self._workload is None:
            with torch.set_grad_enabled(self._grad_enabled):
                self._module(*batch.inputs, **batch.kwargs)
            return
        for parameter in self._parameters:
            parameter.grad = None
        with step_context(self._workload) as context, torch.enable_grad():
            output = self._module(*batch.inputs, **batch.kwargs)
            with span("loss"):
                loss = scalar_loss(self._workload.loss, output, batch.target)
            with span("backward"):
                if context is None:
                    loss.backward()
                else:
                    dist_autograd.backward(context, [loss])
        if self._pushes:
            self.pushed += len(self._module._fxlib.tape) > 0
            push_gradients(self._module)


def _sequence(batches: object) -> Sequence[object]:
    if isinstance(batches, Sequence):
        return batches
    raise WorkloadError(
        f"{type(batches).__name__} is not a sequence of batches", where="profile(batches=)", hint="Pass [batch, ...]."
    )


def _sibling(captured: GraphModule) -> CapturedModule:
    """Return a module over the same state with a tape of its own, whose tracked gradients are never pushed."""
    graph = torch.fx.Graph(tracer_cls=captured.graph._tracer_cls)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in captured.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph._codegen = captured.graph._codegen
    return CapturedModule(captured, graph, class_name=type(captured).__name__)


def _inputs(workload: Workload, numbers: Sequence[int]) -> Iterator[Batch]:
    """Return copies of batches, since a model may write its inputs; all are made now, so that no step has to."""
    spec = workload.spec
    batches = cycle(workload.real_batches if spec is None else draw(spec, workload.seed))
    drawn = list(islice(batches, max(numbers) + 1))
    return iter([copy_of(drawn[number]) for number in numbers])


def copy_of(batch: Batch) -> Batch:
    """Return a copy of a batch, which a model may write."""
    inputs, kwargs, target = copied((batch.inputs, dict(batch.kwargs), batch.target))
    return Batch(inputs=inputs, kwargs=kwargs, target=target)


def accelerators_of(module: GraphModule) -> list[str]:
    """Return the types of devices, other than the CPU, that hold weights."""
    held = {each.device.type for each in (*module.parameters(), *module.buffers())}
    return sorted(held - {"cpu", "meta"})


def calls_that_may_write(module: GraphModule, workload: Workload) -> list[str]:
    """Return the calls that may change something on a server: those whose contract does not rule it out."""
    found = []
    for node in module.graph.nodes:
        if not (is_call(node) or is_issue(node) or node.target in CREATIONS):
            continue
        contract = contract_of(node, workload.contracts)
        assumed = contract is None and workload.assume
        fetches = node.target in {ops.fetch, ops.issue_fetch}
        if not (fetches or assumed or (contract is not None and contract.is_read)):
            found.append(node.name)
    return found


def _notes(found: Profile, workload: Workload | None, writing: list[str], runs: int) -> Iterator[str]:
    yield from found.notes
    if writing:
        names = f"{', '.join(writing[:3])}{', ...' if len(writing) > 3 else ''}"
        note = f"{names} may write, and did so in each of {runs} steps, the first of which is not in the figures"
        yield f"{note}; the figures of a single step are rough, steps=10 measures more" if found.steps == 1 else note
    if workload is None:
        yield "loss, backward and optimizer are missing: the profile was made from batches, not from a workload"
    if workload is not None and workload.mode == "distributed":
        yield "the servers' optimizers took no step"
    if workload is not None and workload.accumulation > 1:
        yield f"of {workload.accumulation} backwards for each optimizer step, one is in the figures"


def modules_of_step(module: nn.Module, workload: Workload) -> list[nn.Module]:
    """Return the modules that run in a step: the model, and the loss if it is a graph."""
    return [module, *([workload.loss] if isinstance(workload.loss, nn.Module) else [])]


@contextmanager
def step_state_kept(module: nn.Module, workload: Workload) -> Iterator[None]:
    """Let a block run steps from the state of the model and the loss, without gradients, and put everything back."""
    with ExitStack() as kept:
        for each in modules_of_step(module, workload):
            kept.enter_context(state_kept(each))
        yield


@contextmanager
def _hooks_left_out(parameters: Sequence[nn.Parameter]) -> Iterator[int]:
    """Let a block run backwards without the hooks of parameters, and yield how many parameters have some.

    Hooks may do what cannot be put back: an optimizer that steps inside of backward does so in a hook.
    """
    hooked = [tables for each in parameters if each.requires_grad and (tables := _hooks_of(each))]
    kept = [(table, dict(table)) for tables in hooked for table in tables]
    for table, hooks in kept:
        table.update(dict.fromkeys(hooks, _no_hook))  # a module that runs otherwise where there are hooks still does
    try:
        yield len(hooked)
    finally:
        for table, hooks in kept:
            table.clear()
            table.update(hooks)


def _no_hook(*_: object) -> None:
    pass


def _hooks_of(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """Return the tables of a parameter's hooks, and of those of the node that accumulates its gradient."""
    tables = [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
    if not parameter.is_inference():  # torch shows the node of no tensor that was made in inference mode
        node = get_gradient_edge(parameter).node
        for handle in (node.register_hook(_no_hook), node.register_prehook(_no_hook)):
            tables.append(handle.hooks_dict_ref())  # a handle alone shows them
            handle.remove()
    return [table for table in tables if table]


@contextmanager
def step_context(workload: Workload) -> Iterator[int | None]:
    """Yield the distributed autograd context to run backward in; None for local autograd."""
    opened: Any = dist_autograd.context() if workload.mode == "distributed" else nullcontext()
    with opened as context:
        yield context


_REPEATS = 5


def optimizer_s(module: nn.Module, described: Optimizer) -> float:
    """Return the seconds that one optimizer step takes on copies of the parameters that hold a gradient."""
    copies = []
    for parameter in parameters_in(module):
        if parameter.grad is not None:
            copies.append(nn.Parameter(parameter.detach().clone()))
            copies[-1].grad = parameter.grad.detach().clone()
    optimizer = build_optimizer(described, copies)
    if optimizer is None:
        return 0.0
    optimizer.step()  # the first step creates the optimizer's state
    return median(_step_s(optimizer) for _ in range(_REPEATS))


def parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are in this process, each once."""
    found = [each for _, part in local_modules(module) for each in part._parameters.values() if each is not None]
    return list(dict.fromkeys(found))


def _step_s(optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start
