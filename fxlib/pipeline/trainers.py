"""Tell whether this process trains alone: others' pushes change the servers in an order that it does not see."""

from __future__ import annotations

import warnings

from torch import distributed
from torch.distributed import rpc
from torch.fx import GraphModule

from fxlib.analysis.effects.resources import destination
from fxlib.errors import FxlibWarning
from fxlib.reasons import Reason
from fxlib.runtime.ops.calls import is_call, is_issue


def servers_of(module: GraphModule) -> frozenset[str]:
    """Return the names of the workers that a graph calls, as far as the names are constants."""
    calls = (node for node in module.graph.nodes if is_call(node) or is_issue(node))
    return frozenset(name for node in calls if (name := destination(node)) is not None)


class Trainers:
    """Tells whether there are several trainers, by the loop's statement, the process group, and the RPC workers.

    A worker of RPC that the module does not call may be another trainer, or a server that others write to through it.
    So it counts as one until the loop says how many trainers there are.
    """

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._stated: list[int | None] = []
        """The numbers of trainers that open loops state; None for one that states none."""
        self._agent: object = None
        """The RPC agent whose workers were examined; None before the first."""
        self._others: list[str] = []
        """The names of its workers that are neither this process nor servers of the module."""
        self._has_warned = False

    def loop_began(self, stated: int | None) -> None:
        """Note the number of trainers that a loop states; None if it states none."""
        self._stated.append(stated)
        self._agent = None

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

    def _other_workers(self) -> list[str]:
        if not rpc.api._is_current_rpc_agent_set():
            return []
        agent = rpc.api._get_current_rpc_agent()
        if agent is not self._agent:
            names = {each.name for each in agent.get_worker_infos()} - {agent.get_worker_info().name}
            self._agent, self._others = agent, sorted(names - servers_of(self._module))
        return self._others


def _in_group() -> bool:
    """Return whether the process group has other ranks."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
