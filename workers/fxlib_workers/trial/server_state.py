"""The functions that a trainer calls on a trial's server processes to set up, compare and update their state.

A server's state consists of the states of the reference server `fxlib.ps`, of an operator's module (`setup`), and of
the objects behind RRefs. All of it is reset to one seed before each arm.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
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
from fxlib_workers.trial.attributes import AttributeSnapshot, attributes_of
from fxlib_workers.trial.digests import ModuleSnapshot, digest, digest_all, tensors_of
from fxlib_workers.trial.replay import server as replay_server
from fxlib_workers.trial.replay.server import ReplayedObject

UNKNOWN = "not told by its setup"
"""The digest of a server whose setup does not return its state, and of what is of no known class."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OF_SETUP = "state of its setup"
_DIGESTED = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
"""The classes whose values `digest` tells apart: a tensor by its bits, others by their text."""


class _OwnedModule:
    """A module behind an RRef, with its first state, and its optimizer under distributed autograd.

    Its state is in its tensors and other attributes.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.module = module
        self._described = optimizer
        self._snapshots = ModuleSnapshot(module), AttributeSnapshot(module)
        self.optimizer = build_optimizer(optimizer, module.parameters())

    def reset(self) -> None:
        for each in self._snapshots:
            each.restore()
        self.optimizer = build_optimizer(self._described, self.module.parameters())


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
        is_known = isinstance(state.returned, (nn.Module, Mapping, list, tuple, torch.Tensor))
        found |= _digests_of(state.returned, _OF_SETUP) if is_known else {_OF_SETUP: UNKNOWN}
    if (replaying := replay_server.current()) is not None:
        found["writes that were replayed"] = replaying.digest()
    for name, each in state.objects.items():
        found |= _digests_of(each.module, f"state of object {name!r}")
    return found


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


def _digests_of(state: object, name: str) -> dict[str, str]:
    """Return one digest of all tensors, modules, arrays and values in a server's state, in the order of their paths.

    What is of another class is a part of its own, which is unknown.
    """
    found = list(_digested(state, "", set()))
    known = sorted(each for each in found if each[1] != UNKNOWN)
    return {name: digest(known), **({f"other {name}": UNKNOWN} if len(known) < len(found) else {})}


def _digested(state: object, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield path and digest of each leaf of nested containers, and of the attributes of modules among them.

    Args:
        state: the containers.
        path: their path.
        seen: the ids of the modules so far, which is added to.
    """
    try:
        found = list(leaves(state, path, is_leaf=_is_module))
    except RecursionError:  # it holds itself
        yield path, UNKNOWN
        return
    for at, leaf in found:
        # A key that is an object of the setup's is told by its class: its address is another one after each setup.
        where = _ADDRESS.sub("", at)
        if not isinstance(leaf, nn.Module):
            yield where, _digest_of_leaf(leaf)
            continue
        yield where, digest_all(tensors_of(leaf))
        for name, each in leaf.named_modules():
            attributes = {} if id(each) in seen else attributes_of(each)
            seen.add(id(each))
            for key, value in attributes.items():
                yield from _digested(value, f"{where}.{name}.{key}", seen)


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module)


def _digest_of_leaf(leaf: object) -> str:
    if isinstance(leaf, weakref.ref):
        return _digest_of_leaf(leaf())
    if isinstance(leaf, (type, BuiltinFunctionType)) or (isinstance(leaf, FunctionType) and not leaf.__closure__):
        return digest(f"{leaf.__module__}:{leaf.__qualname__}")
    if isinstance(leaf, (np.ndarray, np.generic)) and not leaf.dtype.hasobject:
        bits = torch.from_numpy(np.frombuffer(leaf.tobytes(), dtype=np.uint8).copy())
        return digest_all({f"{leaf.dtype.descr} {leaf.shape}": bits})
    return digest(leaf) if isinstance(leaf, _DIGESTED) else UNKNOWN


_NN_CLASSES: Mapping[str, type[Any]] = {
    name: value for name, value in vars(nn).items() if isinstance(value, type) and issubclass(value, nn.Module)
}
