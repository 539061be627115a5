"""Running a random program, and all that it leaves behind."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.fx import GraphModule

import fxlib
from fxlib.errors import FxlibWarning
from tests.random_programs import programs, simulation
from tests.random_programs.programs import Program

Outcome = Mapping[str, object]


class Servers(Protocol):
    """Where a program's calls go."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the state of all servers."""


class RealServers:
    """Processes at the other end of `torch.distributed.rpc`."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        states = {name: rpc.rpc_sync(name, simulation.own_state) for name in simulation.SERVERS}
        return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


@contextmanager
def real_servers() -> Iterator[RealServers]:
    """Let a program run against real servers, from their first state."""
    for name in simulation.SERVERS:
        rpc.rpc_sync(name, simulation.reset, (name,))
    yield RealServers()


def outcome(program: Program, module: GraphModule, servers: AbstractContextManager[Servers]) -> Outcome:
    """Run forward, backward and push from the program's first state; return every bit of what became of it."""
    with _state_kept(module), servers as world, warnings.catch_warnings():
        warnings.simplefilter("ignore", FxlibWarning)  # of an earlier run of the module that failed before its push
        torch.manual_seed(program.seed)
        leaves = [torch.randn(2, 4).requires_grad_() for _ in range(2)]
        x, y = (leaf.clone() for leaf in leaves)
        error, outputs = "", ()
        try:
            outputs = module(x, _second(program, module, x, y), "ps1")
            takers = [each for each in outputs if each.requires_grad]
            if takers:
                torch.autograd.backward(takers, [torch.linspace(1, 2, 8).view(2, 4) / 3 for _ in takers])
            fxlib.push_gradients(module)
        except Exception as raised:  # noqa: BLE001 - an error is an outcome
            error = _message(raised)
        state = world.snapshot()
        if error:
            return {"error": error, **_bits(state)}  # after an exception, local state is unspecified
        tensors = state | {"x": x, "y": y, "noise": programs.NOISE, "random": torch.get_rng_state()}
        tensors |= {f"grad of leaf {place}": leaf.grad for place, leaf in enumerate(leaves) if leaf.grad is not None}
        tensors |= {f"grad of {name}": each.grad for name, each in module.named_parameters() if each.grad is not None}
        return {"error": "", **_bits(tensors | _results(module, outputs))}


def distributed_outcome(program: Program, module: GraphModule) -> Outcome:
    """Run forward and backward under distributed autograd, on real servers."""
    with _state_kept(module), real_servers(), dist_autograd.context() as context:
        torch.manual_seed(program.seed)
        leaves = [torch.randn(2, 4).requires_grad_() for _ in range(2)]
        outputs = module(*(leaf.clone() for leaf in leaves), "ps1")
        dist_autograd.backward(context, [torch.stack([each.sum() for each in outputs if each.requires_grad]).sum()])
        local = dist_autograd.get_gradients(context)
        tensors = {f"grad of leaf {place}": local[leaf] for place, leaf in enumerate(leaves) if leaf in local}
        tensors |= {f"grad of {name}": local[each] for name, each in module.named_parameters() if each in local}
        for server in simulation.SERVERS:
            gradients = rpc.rpc_sync(server, simulation.own_gradients, (context,))
            tensors |= {f"{server}'s gradient of {name}": each for name, each in gradients.items()}
        return _bits(tensors | _results(module, outputs))


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Name what differs."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _second(program: Program, module: GraphModule, x: torch.Tensor, y: torch.Tensor) -> object:
    return {"own": y, "view of the first": x.view(2, 4), "the buffer": module.buffer}[program.second_input]


@contextmanager
def _state_kept(module: GraphModule) -> Iterator[None]:
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in module.state_dict(keep_vars=True).items():
                tensor.detach_().requires_grad_(isinstance(tensor, torch.nn.Parameter)).copy_(before[name])
                tensor.grad = None
        programs.NOISE.zero_()


def _results(module: GraphModule, outputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    found = {f"output {place}": each for place, each in enumerate(outputs)}
    return found | {f"state {name}": each for name, each in module.state_dict().items()}


def _bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def _message(error: Exception) -> str:
    """Versions count every write since a tensor was made, those of earlier runs among them; servers add tracebacks."""
    lines = str(error).splitlines()
    told = lines[1] if lines and "On WorkerInfo" in lines[0] else repr(error).partition("\\n")[0]
    return re.sub(r"version \d+", "version", f"{type(error).__name__}: {told}")
