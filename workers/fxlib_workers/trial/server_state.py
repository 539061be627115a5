"""The functions that a trainer calls on a trial's server processes to set up, compare and update their state.

A server's state consists of the states of the reference server `fxlib.ps`, of an operator's module (`setup`), and of
the objects behind RRefs. All of it is reset to one seed before each arm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd

from fxlib import ps
from fxlib.errors import ContractError, WorkloadError
from fxlib.runtime import functions
from fxlib.spec.contract import Contract
from fxlib.spec.training import build_optimizer
from fxlib.spec.workload import Optimizer, RemoteObject, Server
from fxlib.utils.pytree import leaves
from fxlib_workers.trial.digests import ModuleSnapshot, digest, digest_all
from fxlib_workers.trial.replay import server as replay_server
from fxlib_workers.trial.replay.server import ReplayedObject

UNKNOWN = "not told by its setup"
"""The digest of a server whose setup does not return its state, and of what is returned in no known class."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_SETUP = "state of its setup"
_DIGESTED = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
"""The classes whose values `digest` tells apart: a tensor by its bits, others by their text."""


class _OwnedModule:
    """A module behind an RRef, with its first state, and its optimizer under distributed autograd."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.module = module
        self._described = optimizer
        self._snapshot = ModuleSnapshot(module)
        self.optimizer = build_optimizer(optimizer, module.parameters())

    def reset(self) -> None:
        self._snapshot.restore()
        self.optimizer = build_optimizer(self._described, self.module.parameters())

    def digest(self) -> str:
        return self._snapshot.digest()


@dataclass(slots=True, kw_only=True)
class _ServerState:
    """The state of this process as a server.

    Attributes:
        server: the server's description.
        optimizer: the optimizer of modules behind RRefs, under distributed autograd.
        seed: the seed of all state.
        returned: the value that the operator's setup returned.
        objects: the modules behind RRefs, by name.
    """

    server: Server
    optimizer: Optimizer
    seed: int
    returned: object = None
    objects: dict[str, _OwnedModule] = field(default_factory=dict)


_state: _ServerState | None = None


def serve(server: Server, optimizer: Optimizer, seed: int) -> None:
    """Make this process the server. `optimizer` is for modules behind RRefs, under distributed autograd.

    Raises:
        WorkloadError: the server names a setup that no allowed module has.
    """
    global _state  # noqa: PLW0603 - remote functions find a process's state by its module
    _state = _ServerState(server=server, optimizer=optimizer, seed=seed)
    reset()


def reset() -> None:
    """Reset all state to that of the seed, and forget the optimizers' state."""
    state = _active()
    ps.setup(state.server, state.seed)
    if state.server.setup is not None:
        setup = _setup_of(state.server.setup, state.server.name)
        state.returned = setup(state.server.name, state.seed)
    for each in state.objects.values():
        each.reset()
    if (replaying := replay_server.current()) is not None:
        replaying.reset()
    torch.manual_seed(state.seed)


def create(name: str, described: RemoteObject) -> nn.Module | ReplayedObject:
    """Make the object behind an RRef, with weights drawn from the seed; `rpc.remote` calls this.

    Raises:
        WorkloadError: its class is in neither torch.nn nor an allowed module, or is not a torch.nn.Module.
    """
    state, replaying = _active(), replay_server.current()
    if replaying is not None and name in replaying.plan.objects:
        return ReplayedObject(name)
    torch.manual_seed(state.seed)
    made = _class(described.cls)(*described.args, **described.kwargs)
    if not isinstance(made, nn.Module):
        raise WorkloadError(
            f"{described.cls!r} is not a torch.nn.Module, so its state cannot be compared or reset",
            where=f"Workload.rrefs[{name!r}]",
        )
    state.objects[name] = _OwnedModule(made, state.optimizer)
    return made


def state_digests() -> dict[str, str]:
    """Return digests of all state, by part."""
    state = _active()
    found = {"tables and dense parameters": ps.state_digest()}
    if state.server.setup is not None:
        found |= _digests_of_setup(state.returned)
    if (replaying := replay_server.current()) is not None:
        found["writes that were replayed"] = replaying.digest()
    return found | {f"object {name!r}": each.digest() for name, each in state.objects.items()}


vars(state_digests)["__fxlib_contract__"] = Contract(reads=frozenset({"*"}))  # no write: values read ahead stay


def gradients(context: int) -> str:
    """Return the digest of the gradients that a distributed autograd context holds for this server."""
    by_tensor = dist_autograd.get_gradients(context)
    found = {f"table {name}": gradient for name, gradient in ps.gradients(context).items()}
    for name, each in _active().objects.items():
        named = each.module.named_parameters()
        found |= {f"{name}.{key}": by_tensor[parameter] for key, parameter in named if parameter in by_tensor}
    if (replaying := replay_server.current()) is not None:
        found |= replaying.gradients(context)
    return digest_all(found)


def step(context: int) -> None:
    """Apply the gradients of a distributed autograd context to the whole state of this server."""
    by_tensor = dist_autograd.get_gradients(context)
    ps.step(context)
    for each in _active().objects.values():
        if each.optimizer is not None:
            for parameter in each.module.parameters():
                parameter.grad = by_tensor.get(parameter)
            each.optimizer.step()
    if (replaying := replay_server.current()) is not None:
        replaying.step(context)


def not_served(names: list[str]) -> list[str]:
    """Return which of these remote functions this process cannot run."""
    return [name for name in names if not name.startswith(".") and not _resolves(name)]


def not_made(rrefs: Mapping[str, RemoteObject]) -> list[str]:
    """Return the RRefs whose objects this process cannot make."""
    return [name for name, described in rrefs.items() if not _is_class(described.cls)]


def _active() -> _ServerState:
    if _state is None:
        raise WorkloadError("this process is not a server of a trial", where="trial")
    return _state


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


def _digests_of_setup(returned: object) -> dict[str, str]:
    """Return one digest of all tensors, modules, arrays and values that a setup returned, in the order of their paths.

    What is of another class is a part of its own, which is unknown.
    """
    if not isinstance(returned, (nn.Module, Mapping, list, tuple, torch.Tensor)):
        return {_OF_SETUP: UNKNOWN}
    # A key that is an object of the setup's is told by its class: its address is another one after each setup.
    found = [(_ADDRESS.sub("", path), _digest_of_leaf(leaf)) for path, leaf in leaves(returned, is_leaf=_is_module)]
    known = sorted(each for each in found if each[1] != UNKNOWN)
    return {_OF_SETUP: digest(known), **({f"other {_OF_SETUP}": UNKNOWN} if len(known) < len(found) else {})}


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module)


def _digest_of_leaf(leaf: object) -> str:
    if isinstance(leaf, nn.Module):
        return ModuleSnapshot(leaf).digest()
    if isinstance(leaf, (np.ndarray, np.generic)) and not leaf.dtype.hasobject:
        bits = torch.from_numpy(np.frombuffer(leaf.tobytes(), dtype=np.uint8).copy())
        return digest_all({f"{leaf.dtype.descr} {leaf.shape}": bits})
    return digest(leaf) if isinstance(leaf, _DIGESTED) else UNKNOWN


_NN_CLASSES: Mapping[str, type[Any]] = {
    name: value for name, value in vars(nn).items() if isinstance(value, type) and issubclass(value, nn.Module)
}
