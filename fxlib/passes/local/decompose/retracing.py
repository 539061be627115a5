"""A call, traced anew through a function of the user's that says what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node, Proxy, Tracer
from torch.fx.node import map_aggregate, map_arg
from typing_extensions import override

from fxlib.analysis.operators.access import frozen
from fxlib.errors import PassError
from fxlib.rules.snippet import Snippet


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraced:
    """What one call is made of. The inputs are nodes of the program, or paths of parameters and buffers, by name."""

    snippet: Snippet
    inputs: Mapping[str, Node | str]
    several: bool
    """Whether it gives a tuple."""

    @property
    def values(self) -> list[Node]:
        """The inputs that the program computes."""
        return [each for each in self.inputs.values() if isinstance(each, Node)]


class Retracing:
    """Traces calls of one program; those that differ in nothing but their nodes are made of the same: traced once."""

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
            args: of the call: nodes and literals, and a module, if the function takes one.
            kwargs: of the call.
            where: how errors call the place.

        Raises:
            PassError: it raises, holds a tensor of its own, or does more than plain work.
        """
        places: dict[Node, Any] = {}
        given = map_arg((tuple(args), dict(kwargs)), lambda node: places.setdefault(node, _Place(len(places))))
        key = (id(function), tuple(map(_told_apart, given[0])), frozen(given[1]))
        if key not in self._known:
            self._known[key] = _trace(function, given, self._state, where)
        traced = self._known[key]
        if traced is None:
            return None
        nodes = list(places)
        inputs = {name: each if isinstance(each, str) else nodes[each.index] for name, each in traced.inputs.items()}
        return Retraced(snippet=traced.snippet, inputs=inputs, several=traced.several)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a node among those of a call."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """What calls of one kind are made of, whatever their nodes."""

    snippet: Snippet
    inputs: Mapping[str, _Place | str]
    several: bool


def _told_apart(value: Any) -> Hashable:
    return id(value) if isinstance(value, nn.Module) else frozen(value)


def _trace(function: Callable[..., Any], given: Any, state: Mapping[int, str], where: str) -> _Traced | None:
    tracer = _Retracer(state)
    args, kwargs = map_aggregate(given, tracer.given)
    try:
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


class _Retracer(Tracer):
    """Records into a graph whose inputs are the nodes, parameters and buffers that are used."""

    def __init__(self, state: Mapping[int, str]) -> None:
        super().__init__()
        self.graph = Graph()
        self.root = nn.Module()
        self.inputs: dict[str, _Place | str] = {}
        self._state = state
        self._entered: dict[_Place | str, Node] = {}

    def given(self, value: Any) -> Any:
        """Return what the function gets for an argument of the call."""
        return self.enter(value) if isinstance(value, _Place) else value

    def enter(self, value: _Place | str) -> Any:
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
