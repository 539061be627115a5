"""The program that runs in place of a graph with int8 layers, on quantized tensors and packed weights.

The operators of `fxlib.runtime.int8` take plain integers, and look at each call whether their weights are what they
were; for a small layer, that takes longer than to compute it. In this program, layers hand quantized tensors on to one
another, and one look at all weights is enough for a forward. The bits are the same.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from fxlib.errors import FxlibError
from fxlib.runtime import int8
from fxlib.runtime.int8 import operators, quint8
from fxlib.runtime.int8.layers import FEW_ROWS, Layer, Result, Window, check, check_levels
from fxlib.runtime.int8.quint8 import as_integers, as_levels
from fxlib.runtime.lowering import over

Function: TypeAlias = Callable[..., Any]
Point: TypeAlias = tuple[float, int]
"""The scale and the zero point of a quantized tensor."""

_OPERATORS: Final[Mapping[object, Function]] = {
    getattr(torch.ops.fxlib, name).default: getattr(operators, name.removeprefix("int8_"))
    for name in (*int8.LAYERS, "quantize", "int8_max_pool2d", "int8_norm", "dequantize")
}
"""The function that computes each operator, which is called at once where the dispatcher has nothing to decide."""
_VIEWS: Final = frozenset({"contiguous", "view", "reshape", "flatten"})
"""The methods that quantized tensors have as others do."""
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
_KINDS: Final = 64
"""The number of kinds of inputs that a kernel remembers."""
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


@dataclass(frozen=True, slots=True)
class _Kernel:
    """An operator on quantized tensors."""

    takes: Point | None
    """The point of its input; None if that is not quantized yet."""
    returns: Point | None
    """The point of its result; None if that is float32."""
    packed: Function
    """The operator with all of its arguments but the first."""
    fits: Callable[[torch.Tensor], bool]
    """Whether an input is one for which `packed` computes what the operator on integers computes."""

    def function(self, operator: Function, others: Sequence[Any], weights: Sequence[_Weight]) -> Function:
        """Return a function of the input: `packed` if that fits, or else the operator on integers.

        Args:
            operator: the operator that the dispatcher knows.
            others: all of its arguments but the first.
            weights: the tensors among these; the graph itself may write to them before it gets here.
        """
        kinds: dict[tuple[object, ...], bool] = {}
        is_here = quint8.is_plain if self.takes is None else _is_quantized
        versions = [(each.tensor, each.version) for each in weights]

        def fits(x: torch.Tensor) -> bool:
            if not is_here(x):
                return False
            for tensor, version in versions:
                if tensor._version != version:
                    return False
            kind = x.shape, x.stride(), x.dtype
            if (found := kinds.get(kind)) is None:
                if len(kinds) >= _KINDS:
                    kinds.clear()
                found = kinds[kind] = x.numel() > 0 and self.fits(x)
            return found

        def run(x: torch.Tensor) -> torch.Tensor:
            if fits(x):
                return self.packed(x)
            found = operator(x if self.takes is None else _integers(x), *others)
            return found if self.returns is None else _levels(found, *self.returns)

        return run


def _quantize(*point: Any) -> _Kernel:
    returns = _point(*point)
    return _Kernel(None, returns, lambda x: quint8.quantized(x, *returns), lambda x: x.dtype is torch.float32)


def _linear(scale: Any, zero_point: Any, weight: Any, scales: Any, bias: Any, *result: Any) -> _Kernel:
    layer, made, takes = Layer(weight, scales, bias), Result(*result), _point(scale, zero_point)
    _check_layer(layer, made, "linear", dimensions=2)
    returns = None if made.scale is None else (made.scale, made.zero_point)
    outputs, inputs = weight.shape
    relu = made.relu if 1e-30 < scale < 1e30 else None
    few, many = functools.cache(layer.for_linear), functools.cache(lambda: operators.many_rows(layer, made))

    def multiply(levels: torch.Tensor) -> torch.Tensor:
        if relu is None or levels.numel() > FEW_ROWS * inputs:
            found = operators.MANY_ROWS(as_integers(levels).reshape(-1, inputs), *takes, *many())
            found = found.reshape(*levels.shape[:-1], outputs)
            return found if returns is None else as_levels(found, *returns)
        if returns is None:
            return quint8.LINEAR_TO_FLOAT[relu](levels.dequantize(), *takes, few())
        return quint8.LINEAR[relu](levels, few(), *returns)

    return _Kernel(takes, returns, multiply, lambda levels: levels.dim() > 1 and levels.shape[-1] == inputs)


def _convolution(scale: Any, zero_point: Any, weight: Any, scales: Any, bias: Any, *others: Any) -> _Kernel | None:
    layer, window, made = Layer(weight, scales, bias), Window(*others[:4]), Result(*others[4:])
    takes = _point(scale, zero_point)
    if made.scale is None or made.relu is None:
        return None
    _check_layer(layer, made, "convolution", dimensions=4)
    window.check(weight)
    convolve, returns = quint8.CONVOLUTION[made.relu], (made.scale, made.zero_point)
    packed = layer.for_convolution(window)

    def fits(levels: torch.Tensor) -> bool:
        try:
            return bool(window.shape_of_result(levels, weight))
        except FxlibError:  # the operator on integers raises it
            return False

    return _Kernel(takes, returns, lambda levels: convolve(levels, packed, *returns), fits)


def _norm(scale: Any, zero_point: Any, weight: Any, bias: Any, *point: Any) -> _Kernel:
    returns = _point(*point)
    for each in (weight, bias):
        check(each.dtype is torch.float32 and each.is_contiguous(), "a norm's weight and bias are float32")

    def fits(levels: torch.Tensor) -> bool:
        return _is_of_images(levels) and weight.shape == bias.shape == levels.shape[1:2]

    return _Kernel(_point(scale, zero_point), returns, lambda levels: quint8.norm(levels, weight, bias, *returns), fits)


def _max_pool(point: Point, *options: Any) -> _Kernel:
    sizes, ceil_mode = [list(each) for each in options[:4]], options[4]

    def fits(levels: torch.Tensor) -> bool:
        return _is_of_images(levels) and operators.max_pool2d(as_integers(levels), *options) is not None

    return _Kernel(point, point, lambda levels: torch.ops.quantized.max_pool2d(levels, *sizes, ceil_mode), fits)


def _check_layer(layer: Layer, result: Result, kind: str, *, dimensions: int) -> None:
    layer.check(torch.empty(0, dtype=torch.uint8), dimensions=dimensions)
    result.options(kind)


def _is_of_images(levels: torch.Tensor) -> bool:
    """Return whether levels are images, channels last; memory may be in both orders, and torch then takes either."""
    is_last = levels.dim() == 4 and levels.is_contiguous(memory_format=torch.channels_last)
    return is_last and not levels.is_contiguous()


def _point(scale: Any, zero_point: Any) -> Point:
    check(scale is not None, "levels have a scale")
    check_levels(scale, zero_point)
    return scale, zero_point


_KERNELS: Final[Mapping[Function, Callable[..., _Kernel | None]]] = {
    operators.quantize: _quantize,
    operators.linear: _linear,
    operators.conv2d: _convolution,
    operators.norm: _norm,
}
"""The function that makes the kernel of an operator, of all of its arguments but the first."""


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
        if computes is not None and (kernel := self._kernel(computes, args)) is not None:
            x = self._quantized(args[0], kernel.takes) if kernel.takes else self._integers(args[0])
            weights = [self.weights[str(each.target)] for each in args[1:] if isinstance(each, Node)]
            operator: Any = node.target
            self._call(node, kernel.function(operator, self._attributes(args[1:]), weights), x, kernel.returns)
        elif node.target is torch.cat and (point := self._common_point(node)) is not None:
            dim: Any = args[1] if len(args) > 1 else node.kwargs.get("dim", 0)
            self._call(node, _join(dim, point), [self._values[each] for each in args[0]], point)
        elif self._is_view(node):
            self._values[node] = self._graph.node_copy(node, self._values.__getitem__)
            self._points[node] = self._points[args[0]]
        else:
            self._values[node] = copied = self._graph.node_copy(node, self._integers)
            if computes is not None:
                copied.target = _named(node.name, _direct(computes, copied.target))

    def _kernel(self, computes: Function, args: tuple[Any, ...]) -> _Kernel | None:
        """Return what computes an operator on quantized tensors; None if nothing does, or the operator would raise."""
        try:
            if computes is operators.max_pool2d:
                return _max_pool(self._points[args[0]], *args[1:])
            return _KERNELS[computes](*self._attributes(args[1:]))
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

    def _call(self, node: Node, function: Function, given: Any, point: Point | None) -> None:
        self._values[node] = made = self._graph.call_function(_named(node.name, function), (given,))
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
            self._converted[key] = self._graph.call_function(_integers, (self._values[node],))
        return self._converted[key]

    def _quantized(self, node: Node, point: Point) -> Node:
        """Return the node of a value that is quantized with this point."""
        if self._points.get(node) == point:
            return self._values[node]
        if (key := (node, point)) not in self._converted:
            self._converted[key] = self._graph.call_function(_levels, (self._integers(node), *point))
        return self._converted[key]


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


def _join(dim: int, point: Point) -> Function:
    """Return a function that joins quantized tensors of one point.

    Torch's own copies only images, channels last, along their channels; it computes with the numbers of others, which
    extreme scales do not survive. Where memory may be seen as of either order, it would choose another one.
    """

    def run(given: list[torch.Tensor]) -> torch.Tensor:
        for each in given:
            if dim not in (1, -3) or not _is_quantized(each) or not _is_of_images(each):
                return _levels(torch.cat([_integers(value) for value in given], dim), *point)
        return torch.ops.quantized.cat(given, dim, *point)

    return run


def _is_quantized(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is torch.quint8


def _levels(x: Any, scale: float, zero_point: int) -> Any:
    """Return the quantized tensor of integers; a value that is none of these stays what it is, for the operators."""
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.uint8 or not quint8.is_plain(x):
        check(not _is_quantized(x), "an input of known scale is uint8")
        return x
    return as_levels(x, scale, zero_point)


def _integers(x: Any) -> Any:
    """Return the integers of a quantized tensor; a value that was none stays what it is."""
    return as_integers(x) if _is_quantized(x) else x


def _named(name: str, function: Function) -> Function:
    """Return a function with a name of its own, as those have that generated code calls."""
    function.__name__ = function.__qualname__ = name
    return function
