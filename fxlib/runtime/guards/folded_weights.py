"""The assumptions of a rewritten graph besides the conditions of its capture: weights, and ranks of inputs.

Passes for inference compute values from weights once, and keep them beside the weights. Such a graph is valid for the
model only while those weights are what they were, and gives them no gradient. Nodes record this in their metadata:
`FOLDED` on a `get_attr` of such a value names the weights, and `RANK` on a placeholder is the number of dimensions on
which a pass relied. A captured module checks both before each forward, and runs the original if one does not hold.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import batchnorm
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxlib.errors import FxlibError
from fxlib.runtime import int8
from fxlib.runtime.lowering import backend_of
from fxlib.runtime.submodules import submodule

FOLDED = "folded"
"""Key of a `get_attr` node's `meta`: the sorted names of the weights from which its value was computed."""
RANK = "rank"
"""Key of a node's `meta`: the number of dimensions of its tensor; a placeholder's tensor must have as many."""

_GONE = -1
"""The version of a tensor that has changed for good since it was noted, or of one whose writes torch does not count."""
COUNTER = "num_batches_tracked"
"""The buffer that a norm writes whenever it updates its statistics; torch counts writes to it, but not to those."""
_COUNTING = (batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
"""The forwards that count the updates of their module's statistics in that buffer."""
_fused: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
"""The number of writes of fused optimizers to each of their parameters; torch does not count these."""


_counted: Callable[[torch.Tensor], int] = attrgetter("_version")


def _count_fused_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for each in group["params"] if group.get("fused") else ():
            _fused[each] = _fused.get(each, 0) + 1


register_optimizer_step_post_hook(_count_fused_step)


def _version(tensor: torch.Tensor) -> int:
    return _GONE if tensor.is_inference() else int(tensor._version) + (_fused.get(tensor, 0) if _fused else 0)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the versions of many tensors without a Python step for each, since each forward asks for them."""
    if not _fused:
        with suppress(RuntimeError):  # one of them is an inference tensor, of which torch counts no writes
            return list(map(_counted, tensors))
    return list(map(_version, tensors))


@dataclass(frozen=True, slots=True)
class Mark:
    """The identity of a tensor at one time: the object, torch's count of the writes to it, and its memory.

    An address identifies memory only while that is allocated: `module.half().float()` may get the same address again.
    Torch counts no writes of `batch_norm` to its statistics. So of a tensor that may be one, its values are kept, too.
    """

    tensor: torch.Tensor
    version: int
    address: int
    memory: StorageWeakRef
    values: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, statistic: bool = False) -> Mark:
        """Return the mark of a tensor as it is now; `statistic` says whether its values have to be kept."""
        values = tensor.detach().clone() if statistic and tensor.numel() else None
        return cls(tensor, _version(tensor), tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage()), values)

    def copied(self, memo: dict[int, Any]) -> Mark:
        """Return the mark of the tensor's deep copy."""
        held = (self.version, self.address) == (_version(self.tensor), self.tensor.data_ptr())
        copied = replace(Mark.of(copy.deepcopy(self.tensor, memo)), values=copy.deepcopy(self.values, memo))
        return copied if held and not self.memory.expired() else replace(copied, version=_GONE)


class _Watched(NamedTuple):
    """Marks of weights, and the places of these, in columns that a few loops in C compare."""

    tables: Sequence[dict[str, Any]]
    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    versions: list[int]
    addresses: list[int]
    storages: Sequence[Any]
    statistics: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Tensors of which torch counts no writes, with the values that they had."""


class WeightAssumptions:
    """The assumptions of one module's graph, and marks of the weights from which its values were computed."""

    def __init__(self) -> None:
        """Begin without assumptions."""
        self._noted: dict[str, Mark] = {}
        self._weights: tuple[str, ...] = ()
        self._ranks: dict[str, int] = {}
        self._integer = self._narrow = False
        self._watched: _Watched | None = None

    @property
    def on_weights(self) -> bool:
        """Whether the graph holds values that were computed from weights."""
        return bool(self._weights)

    def since(self, marks: Mapping[str, Mark]) -> None:
        """Replace the marks by earlier ones, noted when the weights were sent away for values to be computed."""
        self._noted |= {name: marks[name] for name in self._weights if name in marks}
        self._watched = None

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of all weights behind these values, and of the buffers that count their updates."""
        return self._weights

    def changed(self, names: Collection[str]) -> None:
        """Declare that some of the weights are no longer those from which the values were computed."""
        self._noted |= {name: replace(self._noted[name], version=_GONE) for name in names if name in self._noted}
        self._watched = None

    def read(self, module: GraphModule, graph: Graph) -> None:
        """Read the assumptions from the graph's metadata; weights without a mark are marked as they are now.

        Raises:
            FxlibError: the module lacks one of the weights.
        """
        weights, ranks = set[str](), dict[str, int]()
        for node in graph.nodes:
            for name in (*node.meta.get(FOLDED, ()), *_kept_by_backend(module, node)):
                weights.update((name, *counter_of(module, name)))
            if node.op == "placeholder" and (rank := node.meta.get(RANK)) is not None:
                ranks[str(node.target)] = rank
        self._weights, self._ranks, self._watched = tuple(sorted(weights)), ranks, None
        new = {name: _mark(module, name) for name in weights - self._noted.keys()}
        self._noted = {name: self._noted.get(name) or new[name] for name in self._weights}
        self._integer = any(int8.is_operator(node.target) for node in graph.nodes)
        self._narrow = any(_is_narrower(module, node) for node in graph.find_nodes(op="get_attr"))

    def broken(self, module: nn.Module, *, grad_enabled: bool) -> str:
        """Return in words what has become of the weights on which the graph relies; empty if nothing has."""
        if not self._weights:
            return ""
        watched = self._watched or self._watch(module)
        now: list[Any] = list(map(dict.get, watched.tables, watched.names))
        if not all(map(is_, now, watched.tensors)):
            return "weights from which it was computed were replaced: optimize the model again"
        expired = any(map(torch.UntypedStorage._expired, watched.storages))
        moved = expired or list(map(torch.Tensor.data_ptr, now)) != watched.addresses
        if moved or _versions(now) != watched.versions or not all(itertools.starmap(_is_still, watched.statistics)):
            return "weights from which it was computed have changed: optimize the model again"
        if (self._integer or self._narrow) and torch.is_autocast_enabled("cpu"):
            return "autocast is on, and layers that run on int8 or bfloat16 weights know no other dtype"
        if self._integer and forward_ad._current_level >= 0:
            return "a forward derivative is taken, and layers that run on int8 weights have none"
        recorded = grad_enabled and (self._integer or any(each.requires_grad for each in watched.tensors))
        return "gradients are recorded" if recorded else ""

    def misfit(self, arguments: Mapping[str, object]) -> str:
        """Return in words which argument lacks the rank on which the graph relies; empty if all have it."""
        for name, rank in self._ranks.items():
            value = arguments.get(name)
            if not isinstance(value, torch.Tensor) or value.dim() != rank:
                return f"the argument {name} is no tensor of {rank} dimensions, for which the graph was rewritten"
        return ""

    @property
    def has_ranks(self) -> bool:
        """Whether the graph relies on the rank of an input."""
        return bool(self._ranks)

    def copied(self, memo: dict[int, Any] | None = None) -> WeightAssumptions:
        """Return the same assumptions for a sibling over the same weights or, with a deep copy's memo, their copies."""
        copied = copy.copy(self)
        marks = self._noted.items()
        copied._noted = dict(marks) if memo is None else {name: mark.copied(memo) for name, mark in marks}
        copied._watched = None
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightAssumptions:
        return self.copied(memo)

    def _watch(self, module: nn.Module) -> _Watched:
        locations = [_location(module, name) for name in self._weights]
        marks = [self._noted[name] for name in self._weights]
        self._watched = watched = _Watched(
            tables=[table for table, _ in locations],
            names=[name for _, name in locations],
            tensors=[mark.tensor for mark in marks],
            versions=[mark.version for mark in marks],
            addresses=[mark.address for mark in marks],
            storages=[mark.memory.cdata for mark in marks],
            statistics=[(mark.tensor, mark.values) for mark in marks if mark.values is not None],
        )
        return watched


def _kept_by_backend(module: GraphModule, node: Node) -> tuple[str, ...]:
    """Return the names of the weights that a backend compiles into the code of a node."""
    if not _keeps_weights(node) or node.op not in ("get_attr", "call_module"):
        return ()
    name = str(node.target)
    if node.op == "get_attr":
        return () if FOLDED in node.meta else (name,)
    held = submodule(module, name)
    return tuple(f"{name}.{each}" for each, _ in (*held.named_parameters(), *held.named_buffers()))


def relies_on_weights(graph: Graph) -> bool:
    """Return whether a graph holds values that were computed from weights, or parts into which weights are compiled."""
    return any(FOLDED in node.meta or _keeps_weights(node) for node in graph.nodes)


def _keeps_weights(node: Node) -> bool:
    backend = backend_of(node)
    return backend is not None and backend.keeps_weights


def sources_of(node: Node) -> frozenset[str]:
    """Return the names of the weights behind a `get_attr` of a tensor: its own, or those from which it was computed."""
    return frozenset(node.meta.get(FOLDED, (str(node.target),)))


def _location(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the table that holds a parameter, a buffer or a plain tensor, and its name there."""
    path, _, leaf = name.rpartition(".")
    owner = submodule(module, path) if path else module
    for table in (owner._parameters, owner._buffers):
        if leaf in table:
            return table, leaf
    return owner.__dict__, leaf


def counter_of(module: nn.Module, name: str) -> tuple[str, ...]:
    """Return the name of the buffer that counts the updates of the statistics beside a weight, if there is one."""
    path, dot, _ = name.rpartition(".")
    held = _location(module, name)[0].get(COUNTER)
    return (f"{path}{dot}{COUNTER}",) if isinstance(held, torch.Tensor) else ()


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    table, leaf = _location(module, name)
    value = table.get(leaf)
    if not isinstance(value, torch.Tensor):
        raise FxlibError("the graph holds values computed from it, and the module has no such tensor", where=name)
    return value


def _is_still(tensor: torch.Tensor, was: torch.Tensor) -> bool:
    """Return whether a tensor has the values that it had; NaN stays NaN."""
    return torch.equal(tensor, was) or torch.allclose(tensor, was, rtol=0.0, atol=0.0, equal_nan=True)


def _mark(module: nn.Module, name: str) -> Mark:
    tensor = _tensor(module, name)
    path = name.rpartition(".")[0]
    return Mark.of(tensor, statistic=_may_be_statistic(submodule(module, path) if path else module, tensor))


def _may_be_statistic(owner: nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a module may be updated by `batch_norm`, and no norm of torch's counts the updates."""
    is_vector = tensor.dim() == 1 and tensor.is_floating_point() and tensor.device.type == "cpu"
    if not is_vector or isinstance(tensor, nn.Parameter):
        return False
    counts = isinstance(owner._buffers.get(COUNTER), torch.Tensor)
    return not (counts and getattr(type(owner), "forward", None) in _COUNTING)


def marks_of(module: nn.Module) -> dict[str, Mark]:
    """Return marks of the parameters, buffers and plain tensors of a module by name, without sparse ones."""
    marks: dict[str, Mark] = {}
    for path, each in module.named_modules():
        for table in (vars(each), each._buffers, each._parameters):
            held = {f"{path}.{name}".lstrip("."): value for name, value in table.items()}
            tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
            marks |= {
                name: Mark.of(value, statistic=_may_be_statistic(each, value))
                for name, value in tensors.items()
                if value.layout is torch.strided
            }
    return marks


def _is_narrower(module: nn.Module, node: Node) -> bool:
    """Return whether a node reads a value in bfloat16 that was computed from weights in another dtype."""
    if not node.meta.get(FOLDED) or _tensor(module, str(node.target)).dtype is not torch.bfloat16:
        return False
    return any(_tensor(module, name).dtype is not torch.bfloat16 for name in node.meta[FOLDED])
