"""What runs in the server processes of a trial, called by its trainer: state set up, compared, and updated.

A server's state is that of the reference server `fxlib.ps`, that of an operator's module (`setup`), and that of the
objects behind RRefs. All of it is brought back to one seed before each arm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import autograd as dist_autograd

from fxlib import ps
from fxlib.errors import ContractError, WorkloadError
from fxlib.runtime import functions
from fxlib.spec.optimizers import build
from fxlib.spec.workload import Optimizer, RemoteObject, Server
from fxlib_workers.trial.digests import digest, digest_all, leaves
from fxlib_workers.trial.replay import server as stage
from fxlib_workers.trial.replay.server import ReplayedObject
from fxlib_workers.trial.state import State

UNKNOWN = "not told by its setup"
"""Digest of a server whose state is its operator's secret."""


class _Held:
    """A module behind an RRef, its first state, and its optimizer under distributed autograd."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.module = module
        self._described = optimizer
        self._state = State(module)
        self.optimizer = build(optimizer, module.parameters())

    def reset(self) -> None:
        self._state.restore()
        self.optimizer = build(self._described, self.module.parameters())

    def digest(self) -> str:
        return self._state.digest()


@dataclass(slots=True, kw_only=True)
class _Serving:
    """This process's state. `told`: what the operator's setup returned."""

    server: Server
    optimizer: Optimizer
    seed: int
    told: object = None
    objects: dict[str, _Held] = field(default_factory=dict)


_serving: _Serving | None = None


def serve(server: Server, optimizer: Optimizer, seed: int) -> None:
    """Make this process the server; `optimizer` is that of modules behind RRefs, under distributed autograd.

    Raises:
        WorkloadError: the server names a setup that no allowed module has.
    """
    global _serving  # noqa: PLW0603 - remote functions find a process's state by its module
    _serving = _Serving(server=server, optimizer=optimizer, seed=seed)
    reset()


def reset() -> None:
    """Bring all state back to what the seed says, and forget optimizer state."""
    serving = _present()
    ps.setup(serving.server, serving.seed)
    if serving.server.setup is not None:
        setup = _setup_of(serving.server.setup, serving.server.name)
        serving.told = setup(serving.server.name, serving.seed)
    for held in serving.objects.values():
        held.reset()
    if (replaying := stage.current()) is not None:
        replaying.reset()
    torch.manual_seed(serving.seed)


def create(name: str, described: RemoteObject) -> nn.Module | ReplayedObject:
    """Make the object behind an RRef, weights drawn from the seed; to be called with `rpc.remote`.

    Raises:
        WorkloadError: its class is neither torch.nn's nor of an allowed module, or it is no module.
    """
    serving, replaying = _present(), stage.current()
    if replaying is not None and name in replaying.objects:
        return ReplayedObject(name)
    torch.manual_seed(serving.seed)
    made = _class(described.cls)(*described.args, **described.kwargs)
    if not isinstance(made, nn.Module):
        raise WorkloadError(
            f"{described.cls!r} is no torch.nn.Module, so its state cannot be compared or brought back",
            where=f"Workload.rrefs[{name!r}]",
        )
    serving.objects[name] = _Held(made, serving.optimizer)
    return made


def state_digests() -> dict[str, str]:
    """Return digests of all state, by what it is of."""
    serving = _present()
    found = {"tables and dense parameters": ps.state_digest()}
    if serving.server.setup is not None:
        found["state of its setup"] = _told_digest(serving.told)
    if (replaying := stage.current()) is not None:
        found["writes that were replayed"] = replaying.digest()
    return found | {f"object {name!r}": each.digest() for name, each in serving.objects.items()}


def gradients(context: int) -> str:
    """Return the digest of all that a distributed autograd context holds for this server."""
    held = dist_autograd.get_gradients(context)
    found = {f"table {name}": gradient for name, gradient in ps.gradients(context).items()}
    for name, each in _present().objects.items():
        named = each.module.named_parameters()
        found |= {f"{name}.{key}": held[parameter] for key, parameter in named if parameter in held}
    if (replaying := stage.current()) is not None:
        found |= replaying.gradients(context)
    return digest_all(found)


def step(context: int) -> None:
    """Apply the gradients of a distributed autograd context to all that this server holds."""
    held = dist_autograd.get_gradients(context)
    ps.step(context)
    for each in _present().objects.values():
        if each.optimizer is not None:
            for parameter in each.module.parameters():
                parameter.grad = held.get(parameter)
            each.optimizer.step()
    if (replaying := stage.current()) is not None:
        replaying.step(context)


def not_served(names: list[str]) -> list[str]:
    """Return which of these remote functions this process cannot run."""
    return [name for name in names if not name.startswith(".") and not _resolves(name)]


def not_made(rrefs: Mapping[str, RemoteObject]) -> list[str]:
    """Return which of these RRefs' objects this process cannot make."""
    return [name for name, described in rrefs.items() if not _is_class(described.cls)]


def _present() -> _Serving:
    if _serving is None:
        raise WorkloadError("this process is no server", where="trial")
    return _serving


def _resolves(name: str) -> bool:
    try:
        functions.resolve(name)
    except ContractError:
        return False
    return True


def _setup_of(name: str, server: str) -> Callable[[str, int], object]:
    if not _resolves(name):
        raise WorkloadError(
            f"{name!r} is in no module that the operator allowed",
            where=f"Server({server!r}).setup",
            hint="Start the worker with --allow-module.",
        )
    return functions.resolve(name)


def _is_class(name: str) -> bool:
    try:
        _class(name)
    except WorkloadError:
        return False
    return True


def _class(name: str) -> Callable[..., object]:
    module, _, qualname = name.partition(":")
    found: Callable[..., object] | None = None
    if module == "torch.nn" or module.startswith("torch.nn.modules."):
        found = _NN_CLASSES.get(qualname)
    elif _resolves(name):
        found = functions.resolve(name)
    if found is None:
        raise WorkloadError(
            f"{name!r} is neither a class of torch.nn nor of a module that the operator allowed",
            where="Workload.rrefs",
            hint="Start the worker with --allow-module.",
        )
    return found


def _told_digest(told: object) -> str:
    if isinstance(told, nn.Module):
        return State(told).digest()
    if isinstance(told, (Mapping, list, tuple, torch.Tensor)):
        return digest([digest(leaf) for leaf in leaves("", told).values()])
    return UNKNOWN


_NN_CLASSES: Mapping[str, type[Any]] = {
    name: value for name, value in vars(nn).items() if isinstance(value, type) and issubclass(value, nn.Module)
}
