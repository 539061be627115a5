"""Stand-ins for the inputs of a graph, made from given tensors or from the inputs that a graph was exported for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from fxlib.errors import FxlibError
from fxlib.runtime.guards.export_guards import GuardedCodeGen, TensorGuard, ValueGuard

GivenInputs = Sequence[Any] | Mapping[str, Any] | None
_HINT = "Pass them as `inputs`, by position or by name (in a shell: --input)."


class GraphInputs:
    """The arguments of one call of a graph.

    Args:
        graph: the graph.
        given: arguments by position or by name; None: those that a graph of fixed sizes was exported for.
        device: the device to assume for inputs that are given on the "meta" device.
        symbolic: whether all sizes except 0 and 1 are symbols; sizes that an export declared dynamic always are.

    Raises:
        FxlibError: arguments are missing, or the graph does not take them.
    """

    def __init__(self, graph: Graph, given: GivenInputs, device: torch.device, *, symbolic: bool) -> None:
        self._device = device
        self._placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        guarded = graph._codegen if isinstance(graph._codegen, GuardedCodeGen) else None
        self._guards = [] if guarded is None else list(guarded.guards.leaves)
        if isinstance(given, torch.Tensor):
            raise FxlibError("inputs is one tensor", hint="Pass a sequence of the arguments: [x].")
        if given is None:
            self._values = self._as_captured()
        else:
            self._values = self._bound(given) if guarded is None else _leaves(guarded, given)
        self._all = symbolic
        declared = any(isinstance(size, str) for guard in self._guards for size in getattr(guard, "sizes", ()))
        self.symbolic = symbolic or declared

    def stand_ins(self, mode: FakeTensorMode) -> dict[Node, Any]:
        """Return the value of each placeholder, with tensors that have no memory."""
        return {node: self._stand_in(position, mode) for position, node in enumerate(self._placeholders)}

    def _stand_in(self, position: int, mode: FakeTensorMode) -> Any:
        value = self._values[position]
        if isinstance(value, TensorGuard):
            with mode:
                return torch.empty(value.sizes, dtype=value.dtype, device=value.device)  # type: ignore[arg-type]
        return pytree.tree_map_only(torch.Tensor, lambda each: self._tensor(each, position, mode), value)

    def _tensor(self, value: torch.Tensor, position: int, mode: FakeTensorMode) -> torch.Tensor:
        guard = self._guards[position] if position < len(self._guards) else None
        sizes = guard.sizes if isinstance(guard, TensorGuard) else (None,) * value.dim()
        kinds = [DimDynamic.DYNAMIC if self._all or isinstance(size, str) else DimDynamic.STATIC for size in sizes]
        if DimDynamic.DYNAMIC in kinds:
            context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
            made = mode.from_tensor(value, static_shapes=False, symbolic_context=context)
        else:
            made = mode.from_tensor(value, static_shapes=True)
        if not value.is_meta:
            return made
        with mode:
            return torch.empty_like(made, device=self._device)

    def _bound(self, given: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        names = [str(node.target).lstrip("*") for node in self._placeholders]
        named = dict(given) if isinstance(given, Mapping) else self._by_position(given)
        if unknown := named.keys() - set(names):
            raise FxlibError(f"the graph has no input {', '.join(sorted(unknown))}", where="inputs")
        named |= {
            name: node.args[0]
            for name, node in zip(names, self._placeholders, strict=True)
            if name not in named and node.args
        }
        if missing := [name for name in names if name not in named]:
            raise FxlibError(f"no input is given for {', '.join(missing)}", where="inputs", hint=_HINT)
        return [named[name] for name in names]

    def _by_position(self, given: Sequence[Any]) -> dict[str, Any]:
        names = [str(node.target) for node in self._placeholders]
        ends = next((place for place, name in enumerate(names) if name.startswith("*")), len(names))
        named = dict(zip(names[:ends], given, strict=False))
        if ends < len(names) and not names[ends].startswith("**"):
            named[names[ends].lstrip("*")] = tuple(given[ends:])
        elif len(given) > ends:
            raise FxlibError(f"{len(given)} inputs were given, and the graph takes {ends}", where="inputs")
        return named | {name.lstrip("*"): {} for name in names if name.startswith("**")}

    def _as_captured(self) -> list[Any]:
        if not self._placeholders:
            return []
        fixed = [all(isinstance(size, int) for size in getattr(guard, "sizes", ())) for guard in self._guards]
        if not self._guards or not all(fixed):
            raise FxlibError("the graph does not say what its inputs are like", where="inputs", hint=_HINT)
        return [guard.value if isinstance(guard, ValueGuard) else guard for guard in self._guards]


def _leaves(guarded: GuardedCodeGen, given: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    if misfit := guarded.misfit(args, kwargs):
        raise FxlibError(misfit, where="inputs", hint="The graph was exported for other inputs.")
    names = guarded.pytree_info.orig_args
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return pytree.tree_leaves(tuple(values[name] for name in names))
