"""The call of the program that calls a remote function, as part of the function's name on the trainers of a trial.

A server sees a function and its arguments, while a profile lists calls. So the graphs of a trial name each function
that is replayed together with the call, `pkg.mod:function#call`, and that name resolves to a stand-in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from fxlib.errors import ContractError
from fxlib.runtime import functions, ops
from fxlib.runtime.ops.batches import IN_ORDER, is_batch, items_of
from fxlib.runtime.ops.record import call_name
from fxlib.runtime.ops.registry import REPEATABLE, TRACKERS
from fxlib.spec.report import Timeline
from fxlib_workers.trial.objects import fetches_of
from fxlib_workers.trial.replay.clients import reached_by
from fxlib_workers.trial.replay.plan import ReplayPlan
from fxlib_workers.trial.replay.server import ReplayedBatch, ReplayedFunction


def stand_in(module: GraphModule, plan: ReplayPlan) -> None:
    """Replace every replayed function in a module's graphs by a stand-in for that very call."""
    for body in [each for each in module.modules() if isinstance(each, GraphModule)]:
        renaming = _Renaming(plan)
        for node in body.graph.nodes:
            renaming.rename(node)
        if renaming.count:
            body.recompile()


def as_captured(timeline: Timeline) -> Timeline:
    """Return a timeline in which remote functions, and what clients reach, have their own names again."""
    spans = (replace(each, name=each.name.partition("#")[0], to=reached_by(each.to)) for each in timeline.spans)
    return replace(timeline, spans=tuple(spans))


class _Renaming:
    """Renames functions node by node, and registers a stand-in for each."""

    def __init__(self, plan: ReplayPlan) -> None:
        self._plan = plan
        self.count = 0

    def rename(self, node: Node) -> None:
        if node.target in REPEATABLE:
            node.args = self._renamed(node.args, 1, call_name(node), to=node.args[0])
        elif node.target is ops.create:
            call = next(iter(fetches_of(node)), "")
            node.args = self._renamed(node.args, 1, call, to=node.args[0])
        elif node.target in TRACKERS:
            result = node.args[0]
            call = call_name(result) if isinstance(result, Node) else ""
            node.args = self._renamed(node.args, 2, call, to=node.args[1])
        elif is_batch(node):
            self._rename_batch(node)
        elif node.target is functions.resolve:
            self._register_argument(str(node.args[0]))

    @staticmethod
    def _register_argument(function: str) -> None:
        """Register a stand-in for a function that no process has, and that the graph sends as an argument."""
        try:
            functions.resolve(function)
        except ContractError:
            functions.register(ReplayedFunction(function), function)

    def _renamed(self, args: tuple[Any, ...], index: int, call: str, *, to: object) -> tuple[Any, ...]:
        name = self._name(str(args[index]), call, to)
        return (*args[:index], name, *args[index + 1 :])

    def _rename_batch(self, batch: Node) -> None:
        to, _, timeout, batched_by = batch.args
        waits = {wait.args[1]: wait for wait in batch.users}
        calls = [call_name(waits[index]) if index in waits else "" for index in range(len(items_of(batch)))]
        items = items_of(batch)
        named = tuple(
            (self._name(item.function, call, to), item.args, item.kwargs)
            for item, call in zip(items, calls, strict=True)
        )
        if (
            isinstance(batched_by, str)
            and batched_by != IN_ORDER
            and any(name != item.function for (name, _, _), item in zip(named, items, strict=True))
        ):
            stand_ins = tuple(ReplayedFunction(item.function, call) for item, call in zip(items, calls, strict=True))
            batched_by = functions.register(ReplayedBatch(stand_ins), f"{batched_by}#{batch.name}")
        batch.args = (to, named, timeout, batched_by)

    def _name(self, function: str, call: str, to: object) -> str:
        if isinstance(to, Node) and function.startswith("."):
            replayed = _rref_name(to) in self._plan.objects
        else:
            replayed = self._plan.replays(to if isinstance(to, str) else None, function, call)
        if not replayed:
            return function
        self.count += 1
        name = f"{function}#{call}"
        if not function.startswith("."):
            functions.register(ReplayedFunction(function, call, self._plan.contract_of(function, call)), name)
        return name


def _rref_name(node: Node) -> str:
    return str(node.target) if node.op in ("placeholder", "get_attr") else ""
