"""The program that runs in place of a graph with int8 layers, on quantized tensors and packed weights.

The operators of `fxlib.runtime.int8` take plain integers, and look at each call whether their weights are what they
were; for a small layer, that takes longer than to compute it. In this program, layers hand quantized tensors on to one
another, and one look at all weights is enough for a forward. The bits are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from fxlib.errors import FxlibError
from fxlib.runtime import int8
from fxlib.runtime.int8 import kernels, operators, quint8
from fxlib.runtime.int8.kernels import Function, Kernel, Point, Sum, integers_of, levels_of
from fxlib.runtime.lowering import over

_OPERATORS: Final[Mapping[object, Function]] = {
    getattr(torch.ops.fxlib, name).default: getattr(operators, name.removeprefix("int8_"))
    for name in (*int8.LAYERS, "quantize", "int8_max_pool2d", "int8_avg_pool2d", "int8_norm", "dequantize")
}
"""The function that computes each operator, which is called at once where the dispatcher has nothing to decide."""
_VIEWS: Final = frozenset({"contiguous", "view", "reshape", "flatten"})
"""The methods that quantized tensors have as others do."""
_NEW: Final = frozenset(
    {torch.ops.fxlib.int8_linear.default, torch.ops.fxlib.int8_conv2d.default, torch.ops.fxlib.dequantize.default}
)
"""Operators whose result is in memory that nothing else has."""
_WITHIN: Final = frozenset(
    {functional.selu, functional.elu, functional.celu, functional.leaky_relu, functional.silu, functional.mish}
    | {functional.hardtanh, functional.hardswish, functional.hardsigmoid, functional.relu, functional.relu6}
)
"""Activations that compute in the memory of their input, with the same bits, if `inplace` says so."""
_RESHAPING: Final = frozenset(
    {"resize_", "resize_as_", "set_", "as_strided_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_"}
    | {"swapdims_", "__setattr__", "setattr"}
)
"""Calls that give a tensor itself another shape; a quantized tensor in the same memory would keep its own."""
_TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "Tensor": lambda value: isinstance(value, Node),
    "Optional[Tensor]": lambda value: value is None or isinstance(value, Node),
    "float": lambda value: type(value) is float,
    "Optional[float]": lambda value: value is None or type(value) is float,
    "int": lambda value: type(value) is int,
    "bool": lambda value: type(value) is bool,
    "str": lambda value: type(value) is str,
    "List[int]": lambda value: isinstance(value, (list, tuple)) and all(type(each) is int for each in value),
}
"""Whether an argument is one of each type in a schema, without torch's dispatcher, which converts some others."""
_CHANGES: Final = 8
"""The number of times that a program is made for other weights; if they change more often, the graph itself runs."""


class QuantizedProgram:
    """The program of one module's graph; it is made on first use, and anew for another graph or other weights.

    Threads may share it: each of them takes a program that is whole, or makes one.
    """

    def __init__(self) -> None:
        """Begin without a program."""
        self._graph: Graph | None = None
        self._made: _Made | None = None
        self._left = 0
        """How often the program may still be made."""

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedProgram:
        return QuantizedProgram()  # the copied module has weights of its own

    def of(self, module: GraphModule) -> GraphModule | None:
        """Return the program over the state of a module; None if the graph itself is to run."""
        graph = module._graph
        if self._graph is not graph:
            has_layers = any(node.target in _OPERATORS for node in graph.nodes)
            is_fit = has_layers and not any(map(_reshapes, graph.nodes))
            self._left = _CHANGES if is_fit and quint8.computes_here() else 0
            self._graph = graph
        if not self._left or torch.is_grad_enabled() or _is_watched():
            return None
        made = self._made
        if made is None or made.graph is not graph or not all(map(_Weight.holds, made.weights)):
            self._left -= 1
            rewriting = _Rewriting(module)
            made = self._made = _Made(graph, rewriting.program, list(rewriting.weights.values()))
        return made.program

    def forget(self) -> None:
        """Forget the program, since the graph was edited."""
        self._graph = self._made = None


def _is_watched() -> bool:
    """Return whether a mode, a transform or a trace sees each call of an operator."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    transform, trace = torch._C._functorch.peek_interpreter_stack(), torch._C._get_tracing_state()
    return bool(modes) or transform is not None or trace is not None


def _reshapes(node: Node) -> bool:
    """Return whether a node may give a tensor itself another shape."""
    target = node.target
    name = target if isinstance(target, str) else getattr(getattr(target, "overloadpacket", target), "__name__", "")
    return node.op in ("call_method", "call_function") and (name in _RESHAPING or "out" in node.kwargs)


class _Weight:
    """A tensor among a module's attributes, as it was when it was packed."""

    __slots__ = ("_facts", "_name", "_own", "tensor", "version")

    def __init__(self, module: GraphModule, name: str) -> None:
        self._own, self._name = module.__dict__, name
        tensor = self._held()
        if not isinstance(tensor, torch.Tensor) or not quint8.is_plain(tensor) or tensor.is_inference():
            raise LookupError("nobody counts its writes")
        self.tensor: torch.Tensor = tensor
        self.version = tensor._version
        self._facts = self._now()

    def holds(self) -> bool:
        """Return whether the attribute is still this tensor, and nobody has written to it or given it other data."""
        return self._held() is self.tensor and self._facts == self._now()

    def _held(self) -> object:
        """Return what the module has by this name; its tables may be other ones by now, too."""
        own, name = self._own, self._name
        if name in own:
            return own[name]
        found = own["_parameters"].get(name)
        return own["_buffers"].get(name) if found is None else found

    def _now(self) -> tuple[object, ...]:
        # The storage is kept, so that no other data comes to lie at its address.
        tensor = self.tensor
        data = tensor.untyped_storage(), tensor.data_ptr(), tensor.dtype, tensor.is_neg()
        return tensor._version, *data, tensor.shape, tensor.stride()


@dataclass(frozen=True, slots=True)
class _Made:
    """A program, the graph that it was made of, and the weights that it takes for granted."""

    graph: Graph
    program: GraphModule
    weights: Sequence[_Weight]


class _Rewriting:
    """A graph in which layers hand on quantized tensors, while it is made of a module's graph.

    Attributes:
        weights: the tensors that the graph takes for granted, by their names.
        program: the graph over the module's state.
    """

    def __init__(self, module: GraphModule) -> None:
        self.weights: dict[str, _Weight] = {}
        self._module = module
        self._graph = Graph(tracer_cls=module.graph._tracer_cls)
        self._graph.set_codegen(copy.copy(module.graph._codegen))
        self._values: dict[Node, Node] = {}
        self._points: dict[Node, Point] = {}
        """The points of those values that are quantized tensors in the new graph."""
        self._converted: dict[tuple[Node, Point | None], Node] = {}
        """Values in another form than their own: quantized with a point, or as integers."""
        for node in module.graph.nodes:
            self._add(node)
        for node in self._graph.find_nodes(op="get_attr"):
            if not node.users:
                self._graph.erase_node(node)
        self.program = over(module, self._graph)

    def _add(self, node: Node) -> None:
        args: Any = node.args
        computes = _OPERATORS.get(node.target) if _is_exact(node) else None
        inputs, others = kernels.divided(computes, args)
        if computes is not None and (kernel := self._kernel(computes, inputs, others)) is not None:
            points = (kernel.takes, kernel.adds) if isinstance(kernel, Sum) else (kernel.takes,)
            given = [
                self._integers(each) if point is None else self._quantized(each, point)
                for each, point in zip(inputs, points, strict=True)
            ]
            weights = [self.weights[str(each.target)] for each in others if isinstance(each, Node)]
            versions = [(each.tensor, each.version) for each in weights]
            operator: Any = node.target
            self._call(node, kernel.function(operator, self._attributes(others), versions), given, kernel.returns)
        elif node.target is torch.cat and (point := self._common_point(node)) is not None:
            dim: Any = args[1] if len(args) > 1 else node.kwargs.get("dim", 0)
            self._call(node, kernels.join(dim, point), [[self._values[each] for each in args[0]]], point)
        elif self._is_view(node):
            self._values[node] = self._graph.node_copy(node, self._values.__getitem__)
            self._points[node] = self._points[args[0]]
        else:
            self._values[node] = copied = self._graph.node_copy(node, self._integers)
            if computes is not None:
                copied.target = _named(node.name, _direct(computes, copied.target))
            elif _may_overwrite(node):
                copied.update_kwarg("inplace", True)

    def _kernel(self, computes: Function, inputs: Sequence[Any], others: Sequence[Any]) -> Kernel | Sum | None:
        """Return what computes an operator on quantized tensors; None if nothing does, or the operator would raise."""
        try:
            if (pooling := kernels.POOLINGS.get(computes)) is not None:
                return pooling(self._points[inputs[0]], *others)
            return kernels.KERNELS[computes](*self._attributes(others))
        except (FxlibError, LookupError, TypeError, AttributeError):  # the last one of a missing weight
            return None

    def _attributes(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments with the tensors that nodes among them read, and take these for granted.

        Raises:
            LookupError: a node reads none that can be looked at before a forward.
        """
        return [self._attribute(each) if isinstance(each, Node) else each for each in args]

    def _attribute(self, node: Node) -> torch.Tensor:
        name = str(node.target)
        if node.op != "get_attr":
            raise LookupError(name)
        if name not in self.weights:
            self.weights[name] = _Weight(self._module, name)
        return self.weights[name].tensor

    def _call(self, node: Node, function: Function, given: Sequence[Any], point: Point | None) -> None:
        self._values[node] = made = self._graph.call_function(_named(node.name, function), tuple(given))
        made.meta.update(node.meta)
        if point is not None:
            self._points[node] = point

    def _common_point(self, node: Node) -> Point | None:
        """Return the point that the quantized tensors have in common that a node joins; None if it is another call."""
        args: Any = node.args
        given = (*args[1:], *node.kwargs.values())
        if not 1 <= len(args) <= 2 or len(given) > 1 or not set(node.kwargs) <= {"dim"}:
            return None
        if not isinstance(args[0], (tuple, list)) or not all(type(each) is int for each in given):
            return None
        points = {self._points.get(each) if isinstance(each, Node) else None for each in args[0]}
        return points.pop() if len(points) == 1 else None

    def _is_view(self, node: Node) -> bool:
        """Return whether a node only gives a quantized tensor another shape; `view` gives another dtype, too."""
        args: Any = node.args
        if node.op != "call_method" or node.target not in _VIEWS or not args or not isinstance(args[0], Node):
            return False
        is_shape = node.target != "view" or (len(args) > 1 and not node.kwargs)
        if is_shape and node.target == "view" and len(args) == 2:
            is_shape = isinstance(args[1], (int, tuple, list))
        return is_shape and args[0] in self._points

    def _integers(self, node: Node) -> Node:
        """Return the node of a value that is not quantized."""
        if node not in self._points:
            return self._values[node]
        if (key := (node, None)) not in self._converted:
            self._converted[key] = self._graph.call_function(integers_of, (self._values[node],))
        return self._converted[key]

    def _quantized(self, node: Node, point: Point) -> Node:
        """Return the node of a value that is quantized with this point."""
        if self._points.get(node) == point:
            return self._values[node]
        if (key := (node, point)) not in self._converted:
            self._converted[key] = self._graph.call_function(levels_of, (self._integers(node), *point))
        return self._converted[key]


def _may_overwrite(node: Node) -> bool:
    """Return whether a node is an activation of a layer's new result, which no other node uses."""
    given = node.args[0] if node.args else None
    if node.target not in _WITHIN or node.kwargs.get("inplace") is not False or not isinstance(given, Node):
        return False
    return given.target in _NEW and len(given.users) == 1


def _is_exact(node: Node) -> bool:
    """Return whether a call of an operator is one that the dispatcher hands on as it is."""
    if node.kwargs or node.target not in _OPERATORS:
        return False
    target: Any = node.target
    given = target._schema.arguments
    return len(given) == len(node.args) and all(
        _TYPES[str(argument.type)](each) for argument, each in zip(given, node.args, strict=True)
    )


def _direct(computes: Function, operator: Any) -> Function:
    """Return a function that computes an operator without the dispatcher where that has nothing to decide."""

    def run(*args: Any) -> Any:
        for each in args:
            if isinstance(each, torch.Tensor) and not quint8.is_plain(each):
                return operator(*args)
        return computes(*args) if isinstance(args[0], torch.Tensor) else operator(*args)

    return run


def _named(name: str, function: Function) -> Function:
    """Return a function with a name of its own, as those have that generated code calls."""
    function.__name__ = function.__qualname__ = name
    return function
