"""How generated code reaches submodules: through plain objects in place of a walk through `nn.Module.__getattr__`.

A graph names what it reads by paths from its root, `self.layers.3.norm`. Each step of such a path is a function of
Python, and for tiny modules they are the better part of a forward. So the generated code is given, in place of its
module, an object whose attributes are the modules on the graph's paths; all else that it asks for, the module answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

from torch import nn
from torch.fx import Graph

_READING = frozenset({"get_attr", "call_module"})


class _Step:
    """A module on the way to others: these are attributes of its own, and the module answers for the rest."""

    def __init__(self, module: nn.Module) -> None:
        self._fxlib_module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fxlib_module"], name)


class Shortcuts:
    """The modules that one graph reaches by their paths, for as long as they stay where they are."""

    def __init__(self) -> None:
        """Know none: they are looked up when they are asked for first."""
        self._root: _Step | None = None
        self._tables: Sequence[dict[str, Any]] = ()
        self._names: Sequence[str] = ()
        self._modules: Sequence[nn.Module] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Shortcuts:
        return Shortcuts()  # the copied module has submodules of its own

    def of(self, module: nn.Module, graph: Graph) -> Any:
        """Return what stands in for `module` in the code generated from `graph`."""
        root = self._root
        held = map(dict.get, self._tables, self._names)
        if root is None or root._fxlib_module is not module or not all(map(is_, held, self._modules)):
            root = self._found(module, graph)
        return root

    def forget(self) -> None:
        """Look all of them up again: the graph is another one."""
        self._root = None

    def _found(self, module: nn.Module, graph: Graph) -> _Step:
        steps, found = {"": _Step(module)}, list[tuple[Any, str, nn.Module]]()
        for path in dict.fromkeys(_paths(graph)):
            above, _, name = path.rpartition(".")
            if above not in steps:
                continue
            owner = steps[above]._fxlib_module
            child = owner._modules.get(name)
            if child is None or id(getattr(owner, name, None)) != id(child):
                continue  # an attribute of another kind is looked up in the run
            found.append((owner._modules, name, child))
            steps[path] = _Step(child)
        whole = {str(node.target) for node in graph.nodes if node.op in _READING}
        parents = {path.rpartition(".")[0] for path in steps} - whole  # what is read or called is the module itself
        for path, step in list(steps.items())[1:]:
            above, _, name = path.rpartition(".")
            steps[above].__dict__[name] = step if path in parents else step._fxlib_module
        self._tables = [table for table, _, _ in found]
        self._names = [name for _, name, _ in found]
        self._modules = [child for _, _, child in found]
        self._root = steps[""]
        return self._root


def _paths(graph: Graph) -> Iterator[str]:
    """Yield the paths of all modules that the graph reaches, each after those above it."""
    for node in graph.nodes:
        if node.op in _READING:
            parts = str(node.target).split(".")
            ends = len(parts) + (node.op == "call_module")
            yield from (".".join(parts[:end]) for end in range(1, ends))
