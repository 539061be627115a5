"""The state that a captured module keeps besides its graph and weights, and the checks of whether the graph may run.

The module and the original have their state in common: a part that is replaced on one of them is replaced on the other.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from types import CodeType
from typing import Any, TypeAlias

from torch import nn
from torch._C._dynamo.guards import dict_version
from torch.fx import Graph, GraphModule

from fxlib.errors import FxlibWarning
from fxlib.runtime.ahead import Ahead
from fxlib.runtime.gradients.tape import Tape
from fxlib.runtime.graph_set import GraphSet
from fxlib.runtime.guards.conditions import Conditions, Parameter
from fxlib.runtime.guards.export_guards import GuardedCodeGen
from fxlib.runtime.guards.folded_weights import WeightAssumptions, sources_of
from fxlib.runtime.lowering import BACKEND, LoweredProgram
from fxlib.runtime.own_code import CheckedProgram
from fxlib.runtime.quantized_program import QuantizedProgram
from fxlib.runtime.submodules import TABLES, SubmoduleCache, local_modules, submodule

_NEVER = object()
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
Expected: TypeAlias = Sequence[Parameter] | GuardedCodeGen
"""The parameters of a forward, or the guards on its arguments."""


class FunctionModel(nn.Module):
    """A captured function that stands in for an original model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionModel:
        return FunctionModel(self.forward)


class Mirror:
    """The roots of a captured module and its original, as they were when what either of them got was last handed on.

    Modules below the root are the same objects for both. For the root itself, each has tables of its own, because a
    rewritten graph may need state that the original must not be given. What is new in the tables of the module since,
    or gone, the program has put there or taken away: `register_buffer` and others set no attribute.

    Attributes:
        original: the original.
        shared: the names of what was replaced on both.
        loans: how many blocks let the original have the module's tensors at the moment.
    """

    def __init__(self, original: nn.Module, module: nn.Module) -> None:
        self.original = original
        self._own: dict[str, dict[str, Any]] = {}
        """The tables of the module at that time."""
        self._own_versions: list[int] = []
        self._seen: dict[str, dict[str, Any]] = {}
        self._tables: list[dict[str, Any]] = []
        """The tables of the original's root when the module last saw them."""
        self._versions: list[int] = []
        """The versions of the tables at that time; each write to a dict replaces its version."""
        self._training: bool | None = None
        """The training flag of the original's root at that time."""
        self.shared: set[str] = set()
        self.loans = 0
        self.note(module)

    def follow(self, module: nn.Module, constants: Iterable[str], *, is_linked: bool) -> None:
        """Take over parts, `constants` and the training flag that are others on the original's root than last seen.

        Args:
            module: the captured module, or a copy of it on which a pass works.
            constants: the names of the root's attributes that the graph reads.
            is_linked: whether it is the module itself, whose own new parts are first handed on to the original.
        """
        held, own = self.original.__dict__, module.__dict__
        if is_linked and self._own_versions != [dict_version(own[table]) for table in TABLES]:  # this is rare
            self._hand_on(module)
        tables = [held[table] for table in TABLES]
        versions = list(map(dict_version, tables))
        if versions != self._versions or not all(map(is_, tables, self._tables)):  # so is this
            self._take_over(module, tables)
            self._tables, self._versions = tables, versions
            if is_linked:
                self.note_own(module)
        if (training := held.get("training")) is not self._training:
            own["training"] = self._training = training
        for name in constants:
            if name in held and name in own:
                own[name] = held[name]

    def _hand_on(self, module: nn.Module) -> None:
        for table, before in self._own.items():
            now, theirs, seen = module.__dict__[table], self.original.__dict__[table], self._seen[table]
            for name in dict.fromkeys((*now, *before)):
                part, was = now.get(name, _NEVER), before.get(name, _NEVER)
                is_its_own = was is not _NEVER and name not in theirs  # a value that the graph needs, and no other
                if part is was or is_its_own or theirs.get(name, _NEVER) is not seen.get(name, _NEVER):
                    continue
                if table != "_modules" and _NEVER not in (part, was):
                    continue  # a tensor may stand in for a while, as in `torch.func.functional_call`
                if part is _NEVER:
                    del theirs[name]
                    continue
                theirs[name] = part
                if table == "_buffers":
                    kept = self.original._non_persistent_buffers_set
                    (kept.add if name in module._non_persistent_buffers_set else kept.discard)(name)
        self.note_own(module)

    def _take_over(self, module: nn.Module, tables: Iterable[Mapping[str, Any]]) -> None:
        for (table, seen), now in zip(self._seen.items(), tables, strict=True):
            own = module.__dict__[table]
            changed = {name: part for name, part in now.items() if part is not seen.get(name, _NEVER)}
            own.update(changed)
            seen.update(changed)
            for name in seen.keys() - now.keys():
                if own.get(name, _NEVER) is seen.pop(name):
                    del own[name]

    def replace(self, name: str, value: object) -> None:
        """Replace a part or an attribute of the original, as was done on the captured module.

        A setter of the original's may replace others, which `follow` takes over.
        """
        self.shared.add(name)
        setattr(self.original, name, value)

    def delete(self, name: str) -> None:
        """Delete a part or an attribute of the original, as was done on the captured module."""
        self.shared.discard(name)
        delattr(self.original, name)

    def note_own(self, module: nn.Module) -> None:
        """Note the module's present tables, so that nothing in them is handed on."""
        self._own = {table: dict(module.__dict__[table]) for table in TABLES}
        self._own_versions = [dict_version(module.__dict__[table]) for table in TABLES]

    def note(self, module: nn.Module) -> None:
        """Note the present tables of both, and the original's flag, as seen."""
        self.note_own(module)
        self._training = self.original.__dict__.get("training")
        self._tables = [self.original.__dict__[table] for table in TABLES]
        self._versions = list(map(dict_version, self._tables))
        self._seen = {table: dict(now) for table, now in zip(TABLES, self._tables, strict=True)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Mirror:
        copied = Mirror.__new__(Mirror)
        memo[id(self)] = copied
        copied.original, copied._seen, copied._own = copy.deepcopy((self.original, self._seen, self._own), memo)
        copied._training, copied.shared, copied.loans = self._training, set(self.shared), 0
        copied._tables, copied._versions = [], []  # the copied original may not have all of its tables yet
        copied._own_versions = []
        return copied


def constants_of(graph: Graph) -> tuple[str, ...]:
    """Return the names of the root's attributes that a graph reads, or from which it holds computed values."""
    names = {name for node in graph.nodes if node.op == "get_attr" for name in (str(node.target), *sources_of(node))}
    return tuple(name for name in names if "." not in name)


def _called_modules(module: GraphModule, graph: Graph) -> Iterator[nn.Module]:
    """Yield the modules that run where a graph calls them, with all below them; a backend runs none."""
    for node in graph.find_nodes(op="call_module"):
        if BACKEND not in node.meta:
            yield from (each for _, each in local_modules(submodule(module, str(node.target))))


def share_state(root: nn.Module, module: nn.Module, constants: Iterable[str]) -> None:
    """Give `module` the state of `root` as `root` has it: same objects, order, persistence, `constants` and hooks."""
    for table in TABLES:
        own, theirs = module.__dict__[table], root.__dict__[table]
        plain = {name: value for name, value in own.items() if name not in theirs and name in root.__dict__}
        extra = {name: value for name, value in own.items() if name not in theirs and name not in plain}
        own.clear()
        own.update({**theirs, **extra})
        module.__dict__.update(plain)
    module.__dict__.update({name: root.__dict__[name] for name in constants if name in root.__dict__})
    module._non_persistent_buffers_set = set(root._non_persistent_buffers_set)
    module.__dict__.update({name: root.__dict__[name] for name in _HOOKS})  # shared: hooks added later run for both
    module._is_full_backward_hook = root._is_full_backward_hook


def lend_state(source: nn.Module, target: nn.Module) -> None:
    """Let `target` see the parameters and buffers that `source` holds now: `to()` and others replace the objects."""
    for table in ("_parameters", "_buffers"):
        own, theirs = target.__dict__[table], source.__dict__[table]
        own.update({name: theirs[name] for name in own if name in theirs})


def holds_the_same(source: nn.Module, target: nn.Module) -> bool:
    """Return whether `target` already has the state that `source` would lend it."""
    for table in ("_parameters", "_buffers"):
        own, theirs = target.__dict__[table], source.__dict__[table]
        if own and not all(map(is_, own.values(), map(theirs.get, own, own.values()))):
            return False
    return True


@contextmanager
def lent(source: nn.Module, target: nn.Module) -> Iterator[None]:
    """Let `target` have the state of `source` during the block; both keep what the block replaces on `target`.

    Meanwhile, a captured module does not follow its original for those who read its parts.
    """
    state = source.__dict__.get("_fxlib")
    mirror = None if state is None else state.mirror
    before = {table: dict(target.__dict__[table]) for table in ("_parameters", "_buffers")}
    if mirror is not None:
        mirror.loans += 1
    lend_state(source, target)
    given = {table: dict(target.__dict__[table]) for table in before}
    try:
        yield
    finally:
        if mirror is not None:
            mirror.loans -= 1
        for table, kept in before.items():
            theirs, own = target.__dict__[table], source.__dict__[table]
            for name in theirs.keys() & kept.keys():
                if theirs[name] is given[table][name]:
                    theirs[name] = kept[name]
                elif name in own:
                    own[name] = theirs[name]


@dataclass(slots=True)
class ModuleState:
    """Everything that a captured module keeps in its attribute `_fxlib`; models have no attribute of that name.

    The methods answer in words; an empty string means that nothing is wrong.
    """

    conditions: Conditions
    original: nn.Module | None
    """The user's own model; None in a trial."""
    tape: Tape = field(default_factory=Tape)
    """The gradients that `fxlib.push_gradients` will push."""
    mirror: Mirror | None = None
    """The original's root as the module last saw it."""
    constants: tuple[str, ...] = ()
    """The attributes of the root that the graph reads."""
    weight_assumptions: WeightAssumptions = field(default_factory=WeightAssumptions)
    """The assumptions of the graph about weights and inputs."""
    graphs: GraphSet[Any] = field(default_factory=GraphSet)
    """The graphs for calls that this one does not fit, and how often each ran."""
    submodule_cache: SubmoduleCache = field(default_factory=SubmoduleCache)
    """The object that the generated code gets in place of the module."""
    lowered: LoweredProgram = field(default_factory=LoweredProgram)
    """The program that runs in place of a graph with parts that a backend compiles."""
    quantized: QuantizedProgram = field(default_factory=QuantizedProgram)
    """The program that runs in place of a graph with int8 layers."""
    checked: CheckedProgram = field(default_factory=CheckedProgram)
    """The program that runs in place of a graph that runs code of the program's own."""
    changed_in_step: str = ""
    """The state that such code has changed in mid-step though the forward reads it, in words; empty if it never has."""
    writes_out: bool = False
    """Whether the forward prints or logs, as far as the capture knows; the graph does not."""
    captured_with: Any = None
    """The options of the capture; None if the graph was received, or made in another way."""
    captured_code: CodeType | None = None
    """The code of the graph as it was captured; None if the graph was made in another way."""
    kept_code: CodeType | None = None
    """The code of the graph in whose place the original runs, since nothing was adopted; None if graphs run."""
    ahead: Ahead | None = None
    """The calls that `fxlib.pipeline` has made ahead of later forwards; None if there never were any."""
    warned: bool = False
    """Whether the user has been warned that the original runs."""

    def read(self, module: GraphModule, graph: Graph) -> None:
        """Take from a module's graph what it assumes."""
        self.constants = constants_of(graph)
        self.weight_assumptions.read(module, graph)
        exported = isinstance(graph._codegen, GuardedCodeGen)
        self.conditions.fix_options(_called_modules(module, graph), exported=exported)

    def broken(self, *, grad_enabled: bool) -> str:
        """Return which condition of the capture does not hold any more; empty if all hold."""
        if self.changed_in_step:
            return self.changed_in_step
        conditions = self.conditions
        if self.weight_assumptions.on_weights and not grad_enabled and not conditions.asks_grad_mode:
            # The graph was made for inference: it needs no gradients, whatever was recorded at capture.
            return conditions.broken(grad_enabled=conditions.grad_enabled)
        return conditions.broken(grad_enabled=grad_enabled)

    def stale(self, module: nn.Module, *, grad_enabled: bool) -> str:
        """Return what has become of the weights behind the graph's constants; empty if nothing has."""
        assumed = self.weight_assumptions
        return assumed.broken(module, grad_enabled=grad_enabled) if assumed.on_weights else ""

    def tell_of_original(self, name: str, reason: str) -> None:
        """Tell the user, once, why the original runs in place of the module of this name."""
        self.warn_once(f"the original forward of {name} runs, not the captured one: {reason}")

    def warn_once(self, text: str) -> None:
        """Warn the user, unless that has happened before."""
        if not self.warned:
            self.warned = True
            warnings.warn(text, FxlibWarning, stacklevel=4)

    def _misfit_of_export(self, expected: GuardedCodeGen, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return which argument has got an attribute for which an exported forward asked; empty if none has."""
        python = self.conditions.python
        if not python.arguments:
            return ""
        return python.misfit({**dict(zip(expected.pytree_info.orig_args, args, strict=False)), **kwargs})

    def misfit(self, expected: Expected, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return for which argument the graph is not made; empty if it is made for all."""
        if refused := self.conditions.refuses(args, kwargs):
            return refused
        if isinstance(expected, GuardedCodeGen):
            return expected.misfit(tuple(args), kwargs) or self._misfit_of_export(expected, args, kwargs)
        broken = self.conditions.misfit(expected, args, kwargs)
        if broken or not self.weight_assumptions.has_ranks:
            return broken
        given = dict(zip([each.name for each in expected], args, strict=False)) | dict(kwargs)
        return self.weight_assumptions.misfit(given)
