"""The submodules of a model that live in this process, by their paths, and how generated code reaches them.

A graph names what it reads by paths from its root, `self.layers.3.norm`. Each step of such a path is a Python function,
and so are the two through which `nn.Module` reaches `forward`; for tiny modules they take most of a forward's time. So
the generated code gets, in place of its module, an object whose attributes are the modules on the graph's paths. If the
conditions of the capture have just been found to hold, torch's own modules are represented there by their `forward`:
it is one of the conditions that they have no hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.distributed.nn.api.remote_module import _RemoteModule
from torch.fx import Graph, GraphModule
from torch.nn.modules import module as torchs

T = TypeVar("T")
TABLES: Final = ("_parameters", "_modules", "_buffers")
"""The names of the tables in which an `nn.Module` keeps its parts."""
_READING = frozenset({"get_attr", "call_module"})
_TORCHS_CALL = nn.Module.__call__
_TORCHS_IMPLEMENTATION = nn.Module._call_impl
_HARMLESS = ("torch.", "fxlib.runtime.", "_operator.", "operator.", "math.", "builtins.")
_OPERATORS = frozenset({"torch._ops.aten", "torch._ops.prims", "torch._ops.fxlib"})
"""Modules whose functions give no module a hook while a forward runs; other custom operators may run anything."""


def all_have_hooks() -> bool:
    """Return whether hooks are registered that run around each module (`register_module_forward_hook`)."""
    found = torchs._global_forward_hooks or torchs._global_forward_pre_hooks
    return bool(found or torchs._global_backward_hooks or torchs._global_backward_pre_hooks)


def graph_modules(module: nn.Module) -> Iterator[tuple[str, GraphModule]]:
    """Yield the GraphModules in a module tree with their paths, each once, parents first."""
    return ((path, each) for path, each in module.named_modules() if isinstance(each, GraphModule))


def local_modules(root: nn.Module, *, repeated: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of `root` and all below, as `named_modules` does, which fails at a `RemoteModule`.

    A module that stands in several places is yielded at its first, or, if `repeated`, at each.
    """
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if id(module) in seen and not repeated:
            continue
        seen.add(id(module))
        yield path, module
        for name, child in reversed(module._modules.items()):
            if child is not None and not isinstance(child, _RemoteModule):
                stack.append((f"{path}.{name}" if path else name, child))


def local_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `root` and all below, as `named_parameters` does, which fails at a `RemoteModule`."""
    return _each_once((path, part._parameters) for path, part in local_modules(root))


def local_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of `root` and all below, and then the buffers, each once."""
    buffers = _each_once((path, part._buffers) for path, part in local_modules(root))
    return {**local_parameters(root), **buffers}


def _each_once(tables: Iterable[tuple[str, Mapping[str, T | None]]]) -> dict[str, T]:
    found: dict[int, tuple[str, T]] = {}
    for path, table in tables:
        for name, value in table.items():
            if value is not None:
                found.setdefault(id(value), (f"{path}.{name}" if path else name, value))
    return dict(found.values())


def remote_modules(root: nn.Module) -> Iterator[tuple[nn.Module, str, _RemoteModule]]:
    """Yield parent, name and module of each `RemoteModule` below `root`."""
    for _, module in local_modules(root):
        for name, child in module._modules.items():
            if isinstance(child, _RemoteModule):
                yield module, name, child


def submodule(module: nn.Module, path: str) -> nn.Module:
    """Return the result of `get_submodule`, without its checks on the way: passes ask for the module of every call.

    Raises:
        AttributeError: there is no such module.
    """
    found: Any = module
    try:
        for name in path.split("."):
            found = found._modules[name]
    except (KeyError, AttributeError):
        found = None
    return found if isinstance(found, nn.Module) else module.get_submodule(path)


class _Step:
    """A module on the way to others, which are attributes of this object; the module answers for all other names."""

    def __init__(self, module: nn.Module) -> None:
        self._fxlib_module = module

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["_fxlib_module"]
        own = module.__dict__
        for table in ("_parameters", "_buffers"):
            if name in own[table] and name not in own:
                return own[table][name]
        return getattr(module, name)


class SubmoduleCache:
    """The modules that one graph reaches by their paths, for as long as they stay where they are."""

    def __init__(self) -> None:
        """Begin empty: modules are looked up on first use."""
        self._ways: dict[bool, _Ways] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SubmoduleCache:
        return SubmoduleCache()  # the copied module has submodules of its own

    def of(self, module: nn.Module, graph: Graph, watched: Collection[int] = ()) -> Any:
        """Return the object that stands in for `module` in the code generated from `graph`.

        Args:
            module: the module that runs.
            graph: its graph.
            watched: ids of modules that, as was just found, still hold the same modules, are of the same classes, and
                have no hooks.
        """
        plain = not watched or nn.Module.__call__ is not _TORCHS_CALL or torch._C._get_tracing_state() is not None
        ways = self._ways.get(plain)
        if ways is None or not ways.hold(module):
            ways = self._ways[plain] = _Ways(module, graph, () if plain else watched)
        return ways.root

    def forget(self) -> None:
        """Forget all modules, since the graph is another one."""
        self._ways = {}


class _Ways:
    """All paths of a graph, with the modules to which they led when they were looked up."""

    def __init__(self, module: nn.Module, graph: Graph, watched: Collection[int]) -> None:
        self.root = _Step(module)
        steps, found = {"": self.root}, list[tuple[dict[str, Any], str, Any]]()
        for path in dict.fromkeys(_paths(graph)):
            above, _, name = path.rpartition(".")
            if above not in steps:
                continue
            owner = steps[above]._fxlib_module
            child = owner._modules.get(name)
            if child is None or id(getattr(owner, name, None)) != id(child):
                continue  # an attribute of another kind is looked up when the code runs
            if owner is module or id(owner) not in watched:
                found.append((owner._modules, name, child))
            steps[path] = _Step(child)
        read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
        parents = {path.rpartition(".")[0] for path in steps} - read - called  # a called path is the module itself
        entered = {path[:at] for path in read | called for at, letter in enumerate(path) if letter == "."}
        modules = [step._fxlib_module for path, step in steps.items() if path in called]
        is_closed = bool(watched) and _gives_no_hooks(graph) and all(_is_torchs(each, watched) for each in modules)
        direct = called - read - entered if is_closed else set[str]()
        kinds: dict[type, Any] = {}
        for path, step in list(steps.items())[1:]:
            above, _, name = path.rpartition(".")
            child = step._fxlib_module
            stands: Any = step if path in parents else child
            if path in direct:
                stands, kinds[type(child)] = child.forward, type(child).forward
                found.append((child.__dict__, "_compiled_call_impl", None))
            steps[above].__dict__[name] = stands
        self._kinds = [kind for kind in kinds for _ in range(3)]
        self._attributes = ["forward", "__call__", "_call_impl"] * len(kinds)
        functions = ((forward, _TORCHS_CALL, _TORCHS_IMPLEMENTATION) for forward in kinds.values())
        self._functions = list(chain.from_iterable(functions))
        self._tables: Sequence[dict[str, Any]] = [table for table, _, _ in found]
        self._names: Sequence[str] = [name for _, name, _ in found]
        self._values: Sequence[Any] = [value for _, _, value in found]

    def hold(self, module: nn.Module) -> bool:
        """Return whether the paths lead where they led, as far as the conditions have not checked that."""
        return (
            self.root._fxlib_module is module
            and all(map(is_, map(dict.get, self._tables, self._names), self._values))
            and all(map(is_, map(getattr, self._kinds, self._attributes), self._functions))
        )


def _paths(graph: Graph) -> Iterator[str]:
    """Yield the paths of all modules that the graph reaches, each one after those above it."""
    for node in graph.nodes:
        if node.op in _READING:
            parts = str(node.target).split(".")
            ends = len(parts) + (node.op == "call_module")
            yield from (".".join(parts[:end]) for end in range(1, ends))


def _is_torchs(module: nn.Module, watched: Collection[int]) -> bool:
    """Return whether calling a module is the same as calling its `forward`, and runs no code of the user's."""
    kinds = {type(each) for each in module.modules()}
    return (
        all(each.__module__.startswith("torch.nn.modules.") and each.__call__ is _TORCHS_CALL for each in kinds)
        and all(id(each) in watched and each.__dict__.get("_compiled_call_impl") is None for each in module.modules())
        and nn.Module._call_impl is _TORCHS_IMPLEMENTATION
        and all(map(is_torchs_value, (held for each in module.modules() for held in vars(each).values())))
    )


def is_torchs_value(held: Any) -> bool:
    """Return whether a value in a module runs no code of the user's, as an activation handed to a torch module may."""
    return not callable(held) or _is_in_harmless(str(getattr(held, "__module__", None) or ""))


def _gives_no_hooks(graph: Graph) -> bool:
    """Return whether no function that the graph calls could give one of its modules a hook during the forward."""
    return all(is_harmless(node.target) for node in graph.nodes if node.op == "call_function")


def is_harmless(function: Any) -> bool:
    """Return whether a function is torch's, Python's or ours, and runs no code of the program's own."""
    module = str(getattr(function, "__module__", None) or "")
    return module in _OPERATORS if module.startswith("torch._ops") else _is_in_harmless(module)


def _is_in_harmless(module: str) -> bool:
    """Return whether a Python module is torch's, Python's or ours; `math_utils` and `torchrec` are the program's."""
    return f"{module}.".startswith(_HARMLESS)
