"""Tell whether this process trains alone: others' pushes change the servers in an order that it does not see."""

from __future__ import annotations

import warnings
from typing import Any

from torch import distributed
from torch.distributed import rpc
from torch.distributed.rpc import PyRRef
from torch.fx import GraphModule

from fxlib.analysis.effects.resources import destination
from fxlib.analysis.operators.schemas import attribute
from fxlib.errors import FxlibWarning
from fxlib.reasons import Reason
from fxlib.runtime.ops.calls import is_call, is_issue
from fxlib.wire import OpaqueRRef


def servers_of(module: GraphModule) -> frozenset[str]:
    """Return the names of the workers that a graph calls, as far as constants and RRefs of the module tell them."""
    calls = (node for node in module.graph.nodes if is_call(node) or is_issue(node))
    named = {name for node in calls if (name := destination(node)) is not None}
    held = (attribute(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr"))
    return frozenset(named | {each.owner_name() for each in held if isinstance(each, (PyRRef, OpaqueRRef))})


class Trainers:
    """Tells whether there are several trainers, by the loop's statement, the process group, and the RPC workers.

    A worker of RPC that the module does not call may be another trainer, or a server that others write to through it.
    So it counts as one until the loop says how many trainers there are; workers may join a group that may grow at any
    time.
    """

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._stated: list[int | None] = []
        """The numbers of trainers that open loops state; None for one that states none."""
        self._agent: object = None
        """The RPC agent whose workers were examined, if its group cannot grow; else None."""
        self._others: list[str] = []
        """The names of its workers that are neither this process nor servers of the module."""
        self._names: set[str] | None = None
        """The names of its workers besides this process; None before they were looked at."""
        self._were_several = True
        """Whether there were several trainers when this was last asked; nobody has joined before the first time."""
        self._has_warned = False

    def loop_began(self, stated: int | None) -> None:
        """Note the number of trainers that a loop states; None if it states none."""
        self._stated.append(stated)
        self._agent = self._names = None
        self._were_several = self.are_several

    def loop_ended(self, stated: int | None) -> None:
        """Forget the statement of a loop."""
        self._stated.remove(stated)

    @property
    def are_several(self) -> bool:
        """Whether any other process may write to the servers; what any open loop states holds for all."""
        if (most := self._most_stated) is not None:
            return most > 1
        return _in_group() or bool(self._other_workers())

    @property
    def _most_stated(self) -> int | None:
        return max((each for each in self._stated if each is not None), default=None)

    def warn(self) -> None:
        """Warn, once, about workers that count as trainers although the program has not said so."""
        others = [] if self._most_stated is not None or _in_group() else self._other_workers()
        if others and not self._has_warned:
            warnings.warn(
                f"{Reason.AHEAD_SEVERAL_TRAINERS.sentence()}. The module does not call {', '.join(others)}, which may "
                "train, too: fxlib.pipeline(..., trainers=1) says that no other process writes to its servers",
                FxlibWarning,
                stacklevel=4,
            )
            self._has_warned = True

    def have_joined(self) -> bool:
        """Return whether trainers were found since this was last asked, where there were none before."""
        before, self._were_several = self._were_several, self._agent is None and self.are_several
        return self._were_several and not before

    def _other_workers(self) -> list[str]:
        if not rpc.api._is_current_rpc_agent_set():
            return []
        agent: Any = rpc.api._get_current_rpc_agent()
        if agent is not self._agent:
            self._agent = agent if agent.is_static_group else None
            names = {each.name for each in agent.get_worker_infos()} - {agent.get_worker_info().name}
            if names != self._names:
                self._names, self._others = names, sorted(names - servers_of(self._module))
        return self._others


def _in_group() -> bool:
    """Return whether the process group has other ranks."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
