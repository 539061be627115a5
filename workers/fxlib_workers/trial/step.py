"""The user's step, as described by the workload: forward, loss, backward, optimizer step, gradient push."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from fxlib.runtime.ops.timeline import span
from fxlib.runtime.push_gradients import push_gradients
from fxlib.runtime.tracking.flow_control import DEADLINES
from fxlib.spec.training import build_optimizer, scalar_loss
from fxlib.spec.workload import Batch, Workload
from fxlib.utils.pytree import mapped
from fxlib_workers.trial import server_state
from fxlib_workers.trial.requirements import BoundModule

_DRAIN_PAUSE_S: Final = 50e-6


def copy_of(batch: Batch) -> Batch:
    """Return a copy of a batch, so that a model that writes its inputs does not change those of the next step.

    A tensor that occurs several times still does so in the copy.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: object) -> object:
        return copies.setdefault(id(leaf), leaf.clone()) if isinstance(leaf, torch.Tensor) else leaf

    inputs, kwargs = mapped(copy, (batch.inputs, dict(batch.kwargs)))
    return replace(batch, inputs=inputs, kwargs=kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The values that a step leaves behind.

    Attributes:
        output: the result of the forward.
        loss: the loss, if there is one.
        gradients: the gradients of parameters, by name.
        server_gradients: digests of the gradients that servers hold under distributed autograd, by server.
    """

    output: object
    loss: torch.Tensor | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    server_gradients: Mapping[str, str] = field(default_factory=dict)


class Step:
    """Runs the steps of one arm.

    Args:
        bound: the captured module, original or rewritten, with the objects behind its RRefs.
        workload: how the step runs.
        optimizer: the optimizer of the module's parameters; None if they are not updated.
    """

    def __init__(self, bound: BoundModule, workload: Workload, optimizer: torch.optim.Optimizer | None) -> None:
        self._forward_of = bound
        self._module = bound.module
        self._workload = workload
        self._optimizer = optimizer
        self._servers = [server.name for server in workload.servers]
        self._backwards = 0
        """The number of backward passes since the optimizer's last step."""
        self._run = {"forward": self._forward, "local": self._local, "distributed": self._distributed}[workload.mode]

    def __call__(self, batch: Batch, *, inspect: bool = False) -> StepResult:
        """Run one step. Of several steps that accumulate gradients, the last one updates.

        Args:
            batch: the inputs, which the model may write.
            inspect: whether to digest the gradients that servers hold before they are applied.

        Raises:
            Exception: the model raised.
        """
        return self._run(batch, inspect)

    def _forward(self, batch: Batch, _: bool) -> StepResult:
        with torch.no_grad(), span("forward"):
            return StepResult(output=self._forward_of(batch))

    def _local(self, batch: Batch, _: bool) -> StepResult:
        if not self._backwards:
            self._module.zero_grad(set_to_none=True)
        output, loss = self._forward_and_loss(batch)
        scale = self._workload.loss_scale
        with span("backward"):
            (loss if scale is None else loss * scale).backward()
        self._backwards += 1
        if self._backwards == self._workload.accumulation:
            self._backwards = 0
            with span("optimizer"):
                self._step_locally()
            push_gradients(self._module)
        gradients = {name: each.grad for name, each in self._module.named_parameters() if each.grad is not None}
        return StepResult(output=output, loss=loss, gradients=gradients)

    def _step_locally(self) -> None:
        workload, parameters = self._workload, list(self._module.parameters())
        if workload.loss_scale is not None:
            for each in parameters:
                if each.grad is not None:
                    each.grad.div_(workload.loss_scale)
        if workload.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, workload.clip_norm)
        if self._optimizer is not None:
            self._optimizer.step()

    def _distributed(self, batch: Batch, inspect: bool) -> StepResult:
        with dist_autograd.context() as context:
            output, loss = self._forward_and_loss(batch)
            with span("backward"):
                dist_autograd.backward(context, [loss])
            push_gradients(self._module)
            found = dist_autograd.get_gradients(context)
            gradients = {name: found[each] for name, each in self._module.named_parameters() if each in found}
            on_servers = self._server_gradients(context) if inspect else {}
            with span("optimizer"):
                self._update(context, gradients)
        return StepResult(output=output, loss=loss, gradients=gradients, server_gradients=on_servers)

    def _forward_and_loss(self, batch: Batch) -> tuple[object, torch.Tensor]:
        with span("forward"):
            output = self._forward_of(batch)
        with span("loss"):
            return output, scalar_loss(self._workload.loss, output, batch.target)

    def _server_gradients(self, context: int) -> dict[str, str]:
        return {name: rpc.rpc_sync(name, server_state.gradients, (context,)) for name in self._servers}

    def _update(self, context: int, gradients: Mapping[str, torch.Tensor]) -> None:
        pending = [rpc.rpc_async(name, server_state.step, (context,)) for name in self._servers]
        if self._optimizer is not None:
            for name, parameter in self._module.named_parameters():
                parameter.grad = gradients.get(name)
            self._optimizer.step()
        torch.futures.wait_all(pending)


def optimizer_of(module: nn.Module, workload: Workload) -> torch.optim.Optimizer | None:
    """Return the optimizer of a module's parameters; None if the workload updates nothing."""
    if workload.mode == "forward":
        return None
    return build_optimizer(workload.trainer_optimizer, module.parameters())


def drain() -> None:
    """Wait until no call of this process is in flight and no remote object is being made."""
    while DEADLINES.in_flight or _pending_objects():
        time.sleep(_DRAIN_PAUSE_S)


def _pending_objects() -> int:
    return int(rpc._rref_context_get_debug_info()["num_pending_users"])
