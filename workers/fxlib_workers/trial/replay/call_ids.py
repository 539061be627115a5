"""Which call of the program a remote function is called by: told in the function's name, on the trainers of a trial.

A server sees a function and its arguments, and a profile speaks of calls. So the graphs of a trial name each function
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
from fxlib_workers.trial.replay.plan import Script
from fxlib_workers.trial.replay.server import Replayed, ReplayedTogether


def stand_in(module: GraphModule, script: Script) -> None:
    """Have every replayed function of a module, and of the modules in it, called by a stand-in for that very call."""
    for body in [each for each in module.modules() if isinstance(each, GraphModule)]:
        cast = _Cast(script)
        for node in body.graph.nodes:
            cast.rename(node)
        if cast.renamed:
            body.recompile()


def as_captured(timeline: Timeline) -> Timeline:
    """Return a timeline that calls remote functions, and what clients reach, by their own names again."""
    spans = (replace(each, name=each.name.partition("#")[0], to=reached_by(each.to)) for each in timeline.spans)
    return replace(timeline, spans=tuple(spans))


class _Cast:
    """Renames functions node by node, and registers what stands for them."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.renamed = 0

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
            self._name_sent(str(node.args[0]))

    @staticmethod
    def _name_sent(function: str) -> None:
        """Let a function be sent that nobody here has, as a method for a helper of the job's own to call."""
        try:
            functions.resolve(function)
        except ContractError:
            functions.register(Replayed(function), function)

    def _renamed(self, args: tuple[Any, ...], place: int, call: str, *, to: object) -> tuple[Any, ...]:
        name = self._name(str(args[place]), call, to)
        return (*args[:place], name, *args[place + 1 :])

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
            stand_ins = tuple(Replayed(item.function, call) for item, call in zip(items, calls, strict=True))
            batched_by = functions.register(ReplayedTogether(stand_ins), f"{batched_by}#{batch.name}")
        batch.args = (to, named, timeout, batched_by)

    def _name(self, function: str, call: str, to: object) -> str:
        if isinstance(to, Node) and function.startswith("."):
            plays = _rref_name(to) in self._script.objects
        else:
            plays = self._script.plays(to if isinstance(to, str) else None, function, call)
        if not plays:
            return function
        self.renamed += 1
        name = f"{function}#{call}"
        if not function.startswith("."):
            functions.register(Replayed(function, call, self._script.contract_of(function, call)), name)
        return name


def _rref_name(node: Node) -> str:
    return str(node.target) if node.op in ("placeholder", "get_attr") else ""
