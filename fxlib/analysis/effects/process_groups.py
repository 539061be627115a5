"""The ranks that a graph communicates with besides its servers, and whether a trial's trainers can take their part.

The launcher checks this before it sends a graph, and so does the trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.resources import COLLECTIVES, collective_arguments, function_name
from fxlib.runtime.data_parallel import ALL_RANKS, DataParallel, described
from fxlib.runtime.submodules import submodule
from fxlib.wire import OpaqueModule

GroupSizes = Mapping[str, tuple[int, ...]]
"""Sizes of process groups by name: those that the graph states, which may be none, one or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of functional collectives, and those over which backward reduces gradients."""

    collectives: GroupSizes
    reducing: GroupSizes

    def __bool__(self) -> bool:
        """Return whether there are any groups."""
        return bool(self.collectives or self.reducing)

    def misfit(self, trainers: int) -> str:
        """Return why so many trainers, in one group, cannot stand in for these groups; empty if they can."""
        names = {*self.collectives, *self.reducing}
        if not names:
            return ""
        sizes = [size for of in (self.collectives, self.reducing) for each in of.values() for size in each]
        if name := next((each for each in self.collectives if each != ALL_RANKS), None):
            return f"the graph does not say who is in process group {name!r}: only all ranks together can be tried"
        if len(names) > 1:
            listed = ", ".join(map(repr, sorted(names)))
            return f"there are several process groups ({listed}), and the trainers of a trial form one"
        if trainers < 2:
            return "there is one trainer, and it has no peers (set Workload.trainers to the job's number of ranks)"
        if others := [size for size in sizes if size != trainers]:
            return f"the graph is for {others[0]} ranks, and Workload.trainers is {trainers}"
        return ""


def groups_of(bodies: Iterable[GraphModule]) -> Groups:
    """Return the process groups that some graphs communicate with."""
    collectives: dict[str, set[int]] = {}
    reducing: dict[str, set[int]] = {}
    for body in bodies:
        for node in body.graph.nodes:
            if node.target in COLLECTIVES:
                *_, group = collective_arguments(node)
                collectives.setdefault(str(group), set()).update(_stated_sizes(node))
        for _, parallel in parallel_calls(body):
            reducing.setdefault(parallel.group, set()).add(parallel.ranks)
    return Groups(collectives=_sorted(collectives), reducing=_sorted(reducing))


def parallel_calls(body: GraphModule) -> Iterator[tuple[str, DataParallel]]:
    """Yield path and description of each `DistributedDataParallel` that a graph calls, once."""
    for path in dict.fromkeys(str(node.target) for node in body.graph.nodes if node.op == "call_module"):
        if (found := described(submodule(body, path))) is not None:
            yield path, found


def own_code_in(body: GraphModule) -> Iterator[str]:
    """Yield descriptions of the parts of a graph's `DistributedDataParallel` modules that only the launcher can run."""
    for path, parallel in parallel_calls(body):
        if parallel.oddity:
            yield f"of DistributedDataParallel {path!r}: {parallel.oddity}"
        if not isinstance(parallel.module, GraphModule):
            for name, module in parallel.module.named_modules():
                if not _is_torchs(module):
                    at = ".".join(filter(None, (path, "module", name)))
                    yield f"module {at!r} of class {_class(module)}"


def _is_torchs(module: nn.Module) -> bool:
    return isinstance(module, GraphModule) or type(module).__module__.startswith("torch.nn.modules.")


def _class(module: nn.Module) -> str:
    return (
        str(module.label)
        if isinstance(module, OpaqueModule)
        else f"{type(module).__module__}.{type(module).__qualname__}"
    )


def _stated_sizes(node: Node) -> Iterator[int]:
    """Yield the size of its group if a collective states it: the argument before the group's name."""
    operation, size = function_name(node), collective_arguments(node)[-2]
    if operation.startswith(("all_gather", "reduce_scatter")) and isinstance(size, int):
        yield size


def _sorted(groups: Mapping[str, set[int]]) -> GroupSizes:
    return {name: tuple(sorted(sizes)) for name, sizes in sorted(groups.items())}
