"""Replace operators by what they are made of.

A function of the user's gives the decomposition of a call: the call is traced again through it. Some decompositions are
available by name, for users who cannot send functions. They take the operator's own arguments.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_aggregate, map_arg
from torch.nn import functional as F
from typing_extensions import override

from fxlib.analysis.effects.gradients import may_record_gradients
from fxlib.analysis.effects.local_work import Motion, Sharing
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.layers import under_autocast
from fxlib.analysis.operators.arguments import frozen
from fxlib.analysis.operators.canonical import as_function
from fxlib.errors import PassError
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import Replacements, model_position, splice
from fxlib.passes.infra.introduced import ANY_PLAIN_WORK, Introduced
from fxlib.reasons import Declined, Reason
from fxlib.rules.snippet import Snippet, SnippetTracer
from fxlib.utils.text import location_of

Decomposition: TypeAlias = Callable[..., Any]


def decompose(rules: Mapping[Any, Decomposition]) -> Decompose:
    """Return the pass that decomposes operators.

    >>> decompose({F.gelu: lambda x, approximate="none": 0.5 * x * (1 + torch.erf(x * 0.5**0.5))})

    Args:
        rules: for each operator, a function that is called with the call's own arguments and traced. An operator is a
            function (then the module that does nothing else counts, too), a method of `torch.Tensor` or its name, an
            ATen operator or one overload of it, or a class of modules; its function gets the module first. A function
            that returns `NotImplemented` leaves the call as it is.
    """
    return Decompose(rules=rules)


_PARTS = Introduced.of(
    *(operator.add, operator.mul, operator.truediv, operator.gt),
    *(torch.erf, torch.sigmoid, torch.tanh, torch.where, F.relu6, F.softplus),
)
"""The operators that the decompositions known by name consist of."""


@register_pass("decompose", preserves="tolerance", introduces=_PARTS, version="3")
class Decompose(GraphPass):
    """Replace operators by their decompositions, traced into the program.

    The inserted nodes are at the call's position, with its module and its source line. They are plain work: a call that
    writes, draws random numbers or may do anything is declined, since none of that may be lost, and a decomposition
    that does any of it is an error. So is a call in a block of autocast, which may give the parts another dtype.
    """

    rules: Mapping[Any, Decomposition] | None = None
    """The function that decomposes each operator; functions cannot be sent."""
    operators: tuple[str, ...] = ()
    """Names of operators that the library can decompose itself: gelu, hardswish, leaky_relu, mish, silu."""

    def __post_init__(self) -> None:
        """Accept names in any sequence.

        Raises:
            ValueError: a name is unknown.
            TypeError: a value is not a function, a sequence of names, or a mapping.
        """
        if not isinstance(self.operators, (tuple, list)):
            raise TypeError(f"operators is {self.operators!r}, which is not a tuple of names")
        if self.rules is not None and not isinstance(self.rules, Mapping):
            raise TypeError(f"rules is {self.rules!r}, which is not a mapping")
        object.__setattr__(self, "operators", tuple(self.operators))
        for name in self.operators:
            if name not in DECOMPOSITIONS:
                raise ValueError(f"no decomposition is called {name!r}; there are: {', '.join(sorted(DECOMPOSITIONS))}")
        for target, function in (self.rules or {}).items():
            if not callable(function):
                raise TypeError(f"the decomposition of {target!r} is {function!r}, which is not a function")

    @property
    @override
    def may_introduce(self) -> Introduced:
        return ANY_PLAIN_WORK if self.rules else self.introduces

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        known = {target: each for name in self.operators for target, each in DECOMPOSITIONS[name].items()}
        work = _Work(module, known | dict(self.rules or {}))
        return PassResult(module, changes=work.run(), declined=tuple(work.declined))


class _Work:
    """One program, and the operators to decompose in it."""

    def __init__(self, module: GraphModule, rules: Mapping[Any, Decomposition]) -> None:
        self._module, self._rules = module, rules
        effects = Effects.of(module)
        self._effects, self._sharing, self._records = effects, Sharing(effects), may_record_gradients(module)
        self._motion = Motion(module, effects, keep_gradients=False)
        self._autocast = set(under_autocast(effects.nodes))
        held = (*module.named_parameters(), *module.named_buffers())
        self._retracing = Retracing({id(tensor): name for name, tensor in held})
        self._replacements = Replacements(module.graph)
        self._gone: set[Node] = set()
        self.declined: list[Declined] = []

    def run(self) -> int:
        changes = 0
        for node in self._effects.nodes:
            call = None if node in self._gone else self._call(node)
            if call is None:
                continue
            reason = Reason.AUTOCAST if node in self._autocast else self._motion.unfit(node)
            retraced = None if reason is not None else self._retracing.of(*call, location_of(node))
            if retraced is not None:
                reason = self._refusal(node, retraced)
                if reason is None:
                    self._replace(node, retraced)
                    changes += 1
            if reason is not None:
                self.declined.append(Declined(node=node.name, reason=reason))
        self._replacements.settle()
        return changes

    def _call(self, node: Node) -> tuple[Decomposition, tuple[Any, ...], dict[str, Any]] | None:
        """Return what to trace in place of a node; None if there is no rule for it."""
        args, kwargs = tuple(node.args), dict(node.kwargs)
        if node.op == "call_module":
            called = self._module.get_submodule(str(node.target))
            if type(called) in self._rules:
                return self._rules[type(called)], (called, *args), kwargs
            written = as_function(self._module, node)
            if written is None or written[0] not in self._rules:
                return None
            return self._rules[written[0]], *written[1:]
        if node.op == "call_function":
            packet = getattr(node.target, "overloadpacket", None)
            keys: tuple[Any, ...] = (node.target, packet)
        elif node.op == "call_method":
            keys = (node.target, getattr(torch.Tensor, str(node.target), None))
        else:
            return None
        function = next((self._rules[key] for key in keys if key is not None and key in self._rules), None)
        return None if function is None else (function, args, kwargs)

    def _refusal(self, node: Node, made: Retraced) -> Reason | None:
        operator = self._effects.behaviours[self._effects.index[node]].operator
        shares = operator is not None and operator.shares
        if made.several and any(_item(user, made) is None for user in node.users):
            return Reason.USED_WHOLE
        results = [node, *(node.users if made.several else ())]
        if self._records and made.snippet.saves:
            at, values = self._effects.index[node], map(self._sharing.original, (*results, *made.values))
            if any(self._motion.written_from(each, at) for each in values):
                return Reason.MAY_BE_SAVED
        return self._sharing.refusal(results, made.values, did=shares, will=made.snippet.shares)

    def _replace(self, node: Node, made: Retraced) -> None:
        graph, snippet = self._module.graph, made.snippet
        inputs = {each: self._input(node, made.inputs[str(each.target)]) for each in snippet.inputs}
        outputs, _ = splice(graph, snippet, inputs, before=node, like=node)
        if snippet.shares:
            self._sharing.join([node], made.values)
        positions = {user: _item(user, made) for user in node.users} if made.several else {node: 0}
        for old, index in positions.items():
            new = outputs[index or 0]
            if new not in made.values:
                self._sharing.stand_in(new, old)
            self._replacements.replace(old, new)
            self._replacements.erase(old)
            self._gone.add(old)
        if made.several:
            self._replacements.erase(node)

    def _input(self, node: Node, value: Node | str) -> Node:
        """Return a value of the program, or read a parameter or buffer at the position of a node."""
        if isinstance(value, Node):
            return value
        with self._module.graph.inserting_before(node):
            made = self._module.graph.get_attr(value)
        made.meta.update(model_position(node))
        return made


def _item(user: Node, made: Retraced) -> int | None:
    """Return which of several results a node takes; None if it does not take a single one."""
    index = user.args[1] if user.target is operator.getitem else None
    return index if isinstance(index, int) and 0 <= index < len(made.snippet.outputs) else None


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + torch.tanh(inner))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _silu(x: Tensor, inplace: bool = False) -> Any:
    return NotImplemented if inplace else x * torch.sigmoid(x)


def _mish(x: Tensor, inplace: bool = False) -> Any:
    return NotImplemented if inplace else x * torch.tanh(F.softplus(x))


def _hardswish(x: Tensor, inplace: bool = False) -> Any:
    return NotImplemented if inplace else x * (F.relu6(x + 3) / 6)


def _leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return NotImplemented if inplace else torch.where(x > 0, x, x * negative_slope)


DECOMPOSITIONS: Mapping[str, Mapping[Any, Callable[..., Any]]] = {
    "gelu": {F.gelu: _gelu, torch.ops.aten.gelu: _gelu},
    "silu": {F.silu: _silu, torch.ops.aten.silu: _silu},
    "mish": {F.mish: _mish, torch.ops.aten.mish: _mish},
    "hardswish": {F.hardswish: _hardswish, torch.ops.aten.hardswish: _hardswish},
    "leaky_relu": {F.leaky_relu: _leaky_relu, torch.ops.aten.leaky_relu: _leaky_relu},
}
"""The operators that each name decomposes, in all their forms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraced:
    """The decomposition of one call; its inputs are nodes of the program, or paths of parameters and buffers."""

    snippet: Snippet
    inputs: Mapping[str, Node | str]
    several: bool
    """Whether it returns a tuple."""

    @property
    def values(self) -> list[Node]:
        """The inputs that the program computes."""
        return [each for each in self.inputs.values() if isinstance(each, Node)]


class Retracing:
    """Traces calls of one program; calls that differ only in their nodes are traced once."""

    def __init__(self, state: Mapping[int, str]) -> None:
        """Trace nothing yet; `state` has the paths of parameters and buffers that functions may read, by identity."""
        self._state = state
        self._known: dict[Hashable, _Traced | None] = {}

    def of(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], where: str
    ) -> Retraced | None:
        """Run a function on proxies of the nodes among its arguments; None if it returns `NotImplemented`.

        Args:
            function: what to run.
            args: positional arguments of the call: nodes and literals, and a module, if the function takes one.
            kwargs: keyword arguments of the call.
            where: the location to name in errors.

        Raises:
            PassError: the function raises, holds a tensor of its own, or does more than plain work.
        """
        positions: dict[Node, Any] = {}
        given = map_arg(
            (tuple(args), dict(kwargs)), lambda node: positions.setdefault(node, _NodePosition(len(positions)))
        )
        key = (id(function), tuple(map(_key, given[0])), frozen(given[1]))
        if key not in self._known:
            self._known[key] = _trace(function, given, self._state, where)
        traced = self._known[key]
        if traced is None:
            return None
        nodes = list(positions)
        inputs = {name: each if isinstance(each, str) else nodes[each.index] for name, each in traced.inputs.items()}
        return Retraced(snippet=traced.snippet, inputs=inputs, several=traced.several)


@dataclass(frozen=True, slots=True)
class _NodePosition:
    """Stands for a node, by its position among the nodes of a call."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """The decomposition of calls of one kind, whatever their nodes."""

    snippet: Snippet
    inputs: Mapping[str, _NodePosition | str]
    several: bool


def _key(value: Any) -> Hashable:
    return id(value) if isinstance(value, nn.Module) else frozen(value)


def _trace(function: Callable[..., Any], given: Any, state: Mapping[int, str], where: str) -> _Traced | None:
    tracer = _Retracer(state)
    args, kwargs = map_aggregate(given, tracer.given)
    try:
        with tracer.recording():
            result = function(*args, **kwargs)
    except PassError as error:
        raise PassError(str(error), where=where) from error
    except Exception as error:  # the user's own code, run with proxies
        problem = f"the decomposition raises {type(error).__name__} while it is traced: {error}"
        raise PassError(problem, where=where) from error
    if result is NotImplemented:
        return None
    tracer.graph.output(tracer.create_arg(result))
    snippet = Snippet.of(GraphModule(nn.Module(), tracer.graph), f"{where}, its decomposition")
    return _Traced(snippet=snippet, inputs=tracer.inputs, several=isinstance(result, (tuple, list)))


class _Retracer(SnippetTracer):
    """Records into a graph whose inputs are the nodes, parameters and buffers that are used."""

    def __init__(self, state: Mapping[int, str]) -> None:
        super().__init__()
        self.graph = Graph()
        self.root = nn.Module()
        self.inputs: dict[str, _NodePosition | str] = {}
        self._state = state
        self._entered: dict[_NodePosition | str, Node] = {}

    def given(self, value: Any) -> Any:
        """Return what the function gets for an argument of the call."""
        return self.enter(value) if isinstance(value, _NodePosition) else value

    def enter(self, value: _NodePosition | str) -> Any:
        """Return a proxy for a value of the program."""
        if value not in self._entered:
            first = next(iter(self.graph.nodes), self.graph._root)
            with self.graph.inserting_before(first):
                self._entered[value] = node = self.graph.placeholder(f"input_{len(self.inputs)}")
            self.inputs[str(node.target)] = value
        return Proxy(self._entered[value], self)

    @override
    def create_arg(self, a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return super().create_arg(a)
        if id(a) not in self._state:
            hint = "Write numbers, or use the module's parameters and buffers as they are."
            raise PassError("the decomposition holds a tensor of its own", hint=hint)
        return self.enter(self._state[id(a)]).node
