"""What a captured module and the original have in common, and how what is replaced on one reaches the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import nn
from torch.fx import Graph

from fxlib.runtime.guards.folded_weights import sources_of

_NEVER = object()
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class FunctionModel(nn.Module):
    """A captured function in the place of the original model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionModel:
        return FunctionModel(self.forward)


class Mirror:
    """The root of an original, as a captured module last saw it.

    Modules below the root are the same objects for both. Of the root itself each has tables of its own, because a
    rewritten graph may need state that the original must not be given.
    """

    def __init__(self, original: nn.Module) -> None:
        self._original = original
        self._seen = {table: dict(original.__dict__[table]) for table in _TABLES}

    def follow(self, module: nn.Module, constants: Iterable[str]) -> None:
        """Take over the parameters, buffers, modules and `constants` that were replaced on the original since."""
        held = self._original.__dict__
        for table, seen in self._seen.items():
            now = held[table]
            if not (now or seen) or (list(now) == list(seen) and all(map(is_, now.values(), seen.values()))):
                continue  # as nearly always
            changed = {name: part for name, part in now.items() if part is not seen.get(name, _NEVER)}
            if changed:
                module.__dict__[table].update(changed)
                seen.update(changed)
        own = module.__dict__
        for name in constants:
            if name in held and name in own:
                own[name] = held[name]

    def replace(self, name: str, value: object) -> None:
        """Replace a part or an attribute of the original, as was done on the captured module."""
        setattr(self._original, name, value)
        self.note()

    def note(self) -> None:
        """Take all that the original holds for seen."""
        self._seen = {table: dict(self._original.__dict__[table]) for table in _TABLES}


def constants_of(graph: Graph) -> tuple[str, ...]:
    """Return the names of the root's attributes that a graph reads, or holds values computed from."""
    names = {name for node in graph.nodes if node.op == "get_attr" for name in (str(node.target), *sources_of(node))}
    return tuple(name for name in names if "." not in name)


def share_state(root: nn.Module, module: nn.Module, constants: Iterable[str]) -> None:
    """Give `module` the state of `root` as `root` has it: same objects, order, persistence, `constants` and hooks."""
    for table in _TABLES:
        own, theirs = module.__dict__[table], root.__dict__[table]
        plain = {name: value for name, value in own.items() if name not in theirs and name in root.__dict__}
        extra = {name: value for name, value in own.items() if name not in theirs and name not in plain}
        own.clear()
        own.update({**theirs, **extra})
        module.__dict__.update(plain)
    module.__dict__.update({name: root.__dict__[name] for name in constants if name in root.__dict__})
    module._non_persistent_buffers_set = set(root._non_persistent_buffers_set)
    module.__dict__.update({name: root.__dict__[name] for name in _HOOKS})  # one table: hooks added later run for both
    module._is_full_backward_hook = root._is_full_backward_hook


def lend_state(source: nn.Module, target: nn.Module) -> None:
    """Let `target` see the parameters and buffers that `source` holds now: `to()` and others replace the objects."""
    for table in ("_parameters", "_buffers"):
        own, theirs = target.__dict__[table], source.__dict__[table]
        own.update({name: theirs[name] for name in own if name in theirs})


@contextmanager
def lent(source: nn.Module, target: nn.Module) -> Iterator[None]:
    """Let `target` have what `source` holds during the block; what the block replaces on it, both have afterwards."""
    before = {table: dict(target.__dict__[table]) for table in ("_parameters", "_buffers")}
    lend_state(source, target)
    given = {table: dict(target.__dict__[table]) for table in before}
    try:
        yield
    finally:
        for table, kept in before.items():
            theirs, own = target.__dict__[table], source.__dict__[table]
            for name in theirs.keys() & kept.keys():
                if theirs[name] is given[table][name]:
                    theirs[name] = kept[name]
                elif name in own:
                    own[name] = theirs[name]
