"""Refuse, or put right, what OpenVINO and ONNX Runtime would compute otherwise than torch does.

OpenVINO computes integers in 32 bits, divides them towards zero, saturates those of 8 bits, computes float64 in
float32, and gives plausible numbers for NaN; ONNX Runtime divides integers with a rounding mode in float32. Torch's
attention gives 0 for a row of which the mask leaves nothing, as padding has it, where both give something else. More
operators are in `compiled_operators`. What nobody knows of yet is seen where first results are compared with torch's.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from fxlib.runtime.compiled_operators import problem_of
from fxlib.runtime.lookups import lookup_of
from fxlib.runtime.submodules import submodule
from fxlib.utils.compare import Tolerance, difference
from fxlib.utils.pytree import tensors_in

_LARGEST_INTEGER: Final = 1 << 20
"""The largest absolute value of integers that a part of OpenVINO's takes: sums of 2,048 of them have 32 bits."""
_MOST_SUMMED: Final = 2048
_ATTENTION: Final = frozenset(
    {functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
)

_TWO_BYTES: Final = frozenset({torch.float16, torch.bfloat16})
_ROUNDING: Final = 1e-2
_ROUNDING_OF_TWO_BYTES: Final = 0.1
_NEXT_TO_ZERO: Final = 1e-3
"""Figures of a result that has none above it are all next to zero: what a difference of equal numbers leaves."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EXACT: Final = _words(
    """
    size dim view reshape flatten unflatten squeeze unsqueeze expand expand_as transpose permute t contiguous clone
    detach getitem select slice narrow chunk split unbind cat stack arange zeros ones full zeros_like ones_like
    full_like new_zeros new_ones new_full index_select gather max min amax amin argmax argmin where masked_fill
    and_ or_ xor not_ invert bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not maximum minimum clamp
    add sub rsub neg abs
    """
)
"""Operators whose integers are exact in 32 bits as long as those that they are given are small."""
_MAGNIFIED: Final = {
    **dict.fromkeys(_words("log log2 log10 reciprocal rsqrt"), 0),
    **dict.fromkeys(_words("div divide truediv true_divide"), 1),
}
"""Operators whose results tell small numbers next to zero apart, with the place of the argument."""
_VIEWS_AND_MULTIPLES: Final = _words(
    """
    view reshape flatten squeeze unsqueeze permute transpose t contiguous clone detach getitem select slice narrow
    expand expand_as to _to_copy float mul multiply neg div truediv
    """
)
_CASTS: Final = _words("to type _to_copy float double half bfloat16 long int bool")
_SUMS: Final = _words("sum cumsum")
_WIDE: Final = frozenset({torch.int32, torch.int64})
_NARROW: Final = frozenset({torch.uint8, torch.int8, torch.int16})
_DOUBLE: Final = frozenset({torch.float64, torch.complex128})


class OtherNumbersError(Exception):
    """A compiler would compute other numbers than torch does for some inputs."""


def refuse(part: GraphModule, values: Sequence[Any], backend: str) -> None:
    """Run a part as it is, to see what it computes.

    Args:
        part: the part.
        values: its inputs.
        backend: the name of the compiler.

    Raises:
        OtherNumbersError: the compiler would compute other numbers; the message names the node.
    """
    if (check := _CHECKS.get(backend)) is None:
        return
    run = _Checked(part, check, backend)
    with torch.inference_mode():  # there operators that consist of others are seen, too
        run.run(*values)
    if run.problem:
        raise OtherNumbersError(run.problem)


class _Checked(Interpreter):
    """Notes the first node of which a check, or a rule for an operator that it runs, has something to say."""

    def __init__(self, part: GraphModule, check: _Check, backend: str) -> None:
        super().__init__(part)
        self._part, self._check, self._backend = part, check, backend
        self.problem = ""

    @override
    def run_node(self, n: Node) -> Any:
        with _Watched(self._backend) as watched:
            result = super().run_node(n)
        if not self.problem and n.op not in ("placeholder", "output"):
            given = tensors_in([self.env[each] for each in n.all_input_nodes])
            problem = self._check(self._part, n, given, tensors_in(_used(n, result))) or watched.problem
            self.problem = f"{n.name} {problem}" if problem else ""
        return result


class _Watched(TorchDispatchMode):
    """Notes the first operator of which a compiler computes something else."""

    def __init__(self, backend: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend, self.problem = backend, ""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.problem and (instead := problem_of(func, args, kwargs or {}, self._backend)):
            self.problem = f"computes {func.overloadpacket.__name__}, and {_NAMES[self._backend]} {instead}"
        with self:  # those that it consists of, if it does
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


_Check: TypeAlias = Callable[[GraphModule, Node, Sequence[torch.Tensor], Sequence[torch.Tensor]], str]


def _used(node: Node, result: Any) -> Any:
    """Return the parts of a result that other nodes take, if only parts of it are taken."""
    if isinstance(result, (tuple, list)) and all(each.target is operator.getitem for each in node.users):
        indices: list[Any] = [each.args[1] for each in node.users if each.users]
        return [result[index] for index in indices]
    return result if node.users else ()


def _of_openvino(part: GraphModule, node: Node, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> str:
    name, before, after = _name(node), {each.dtype for each in given}, {each.dtype for each in made}
    if not all(map(torch.Tensor.numel, (*given, *made))):
        return "computes a tensor without elements"
    if (before & _DOUBLE and name not in _CASTS) or after & _DOUBLE:
        return "computes float64, and OpenVINO does so in float32"
    if lookup_of(part, node) is not None:
        return ""
    if not all(map(_is_small, made)):
        return "computes integers that may be too large for OpenVINO"
    if after & (_WIDE | _NARROW) and node.op != "get_attr":
        return _problem_of_integers(name, before, after, given)
    literals = [each for each in pytree.tree_leaves((node.args, node.kwargs)) if type(each) is int]
    if before & (_WIDE | _NARROW) and any(abs(each) > _LARGEST_INTEGER for each in literals):
        return "computes with an integer that may be too large for OpenVINO"
    return ""


def _problem_of_integers(
    name: str, before: AbstractSet[torch.dtype], after: AbstractSet[torch.dtype], given: Sequence[torch.Tensor]
) -> str:
    """Return what is wrong with an operator that makes integers; empty if nothing is."""
    if name in _CASTS:
        from_floats = any(each.is_floating_point for each in before)
        return "rounds to integers, which may be too large for OpenVINO" if from_floats else ""
    if name in _SUMS and all(max(each.shape, default=1) <= _MOST_SUMMED for each in given):
        return ""
    if name == "mul" and torch.bool in before:
        return ""
    narrow = after & _NARROW and name in ("add", "sub", "rsub", "neg", "abs")
    return "computes integers, and OpenVINO has other results" if narrow or name not in _EXACT else ""


def _is_small(value: torch.Tensor) -> bool:
    if value.dtype not in _WIDE or not value.numel():
        return True
    least, most = torch.aminmax(value)
    return int(least) >= -_LARGEST_INTEGER and int(most) <= _LARGEST_INTEGER


def _of_onnxruntime(part: GraphModule, node: Node, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> str:
    divides = _name(node) in ("div", "divide") and node.kwargs.get("rounding_mode") is not None
    if divides and not all(map(torch.Tensor.is_floating_point, (*given, *made))):
        return "divides integers, and ONNX Runtime does so in float32"
    if _name(node) == "topk" and not all(map(torch.Tensor.is_floating_point, made)):
        return "computes indices, and ONNX Runtime has others for equal values"
    place = _MAGNIFIED.get(_name(node).removesuffix("_"))
    if place is not None and len(node.args) > place and _is_of_sigmoid(part, node.args[place]):
        return "takes the logarithm of a sigmoid or divides by one, which ONNX Runtime rounds to 0 next to it"
    return ""


def _is_of_sigmoid(part: GraphModule, value: Any) -> bool:
    """Return whether a value is a sigmoid, or a view or a multiple of one."""
    while isinstance(value, Node):
        if value.op == "call_module":
            return type(submodule(part, str(value.target))) is nn.Sigmoid
        name = _name(value).removesuffix("_")
        if name == "sigmoid":
            return True
        nodes = value.all_input_nodes
        value = nodes[0] if name in _VIEWS_AND_MULTIPLES and len(nodes) == 1 else None
    return False


_CHECKS: Final = {"openvino": _of_openvino, "onnxruntime": _of_onnxruntime}
_NAMES: Final = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}


def _name(node: Node) -> str:
    """Return the name of an operator; empty for a module, whose path says nothing."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).partition(".")[0]


def mend(part: GraphModule, backend: str) -> None:
    """Have attention give 0 for rows of which its mask leaves nothing, whatever the compiler makes of them."""
    if backend not in _CHECKS:
        return
    for node in [each for each in part.graph.nodes if each.target in _ATTENTION]:
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if isinstance(mask, Node):
            with part.graph.inserting_after(node):
                made = part.graph.call_function(_zero_where_masked, (node, mask))
            node.replace_all_uses_with(made)
            made.args = (node, mask)
    part.recompile()


def _zero_where_masked(result: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    left = mask if mask.dtype is torch.bool else mask > float("-inf")
    return torch.where(left.any(-1, keepdim=True), result, 0.0)


def beyond_rounding(
    part: nn.Module, values: Sequence[Any], found: Sequence[Any], results: Sequence[torch.Tensor], backend: str
) -> str:
    """Return how compiled results differ from torch's by more than rounding explains; empty if they do not.

    A figure may be off by a hundredth of the largest one of its result, and by a tenth where numbers have two bytes:
    the networks of `benchmarks/inference.py` are off by less than 1e-5 of it in float32, and by less than a hundredth
    in bfloat16, where a compiler that takes a wrong argument is off by tenths. That leaves room for a result which is
    the small difference of large numbers. Integers and bools are equal; NaN and infinities stand where torch has them.

    Args:
        part: the part.
        values: its inputs.
        found: the compiled results, whose forms are torch's.
        results: torch's results.
        backend: the name of the compiler.
    """
    if backend == "openvino" and not _are_for_openvino(values):
        return ""  # the part itself computes such inputs
    state = itertools.chain(part.parameters(), part.buffers())
    narrow = torch.is_autocast_enabled("cpu") or any(
        each.dtype in _TWO_BYTES for each in tensors_in((values, list(state), results))
    )
    bound = _ROUNDING_OF_TWO_BYTES if narrow else _ROUNDING
    for index, (one, other) in enumerate(zip(found, results, strict=True)):
        scale = max(_NEXT_TO_ZERO, _largest(other))
        if problem := difference(one, other, Tolerance(atol=bound * scale)):
            return f"of result {index}, {problem}"
    return ""


def _largest(value: torch.Tensor) -> float:
    """Return the largest finite magnitude among figures; 0 for integers, bools and nothing at all."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(value.detach().abs().nan_to_num(0.0, posinf=0.0).max())


def guarded(compiled: Callable[..., Any], part: GraphModule, backend: str) -> Callable[..., Any]:
    """Return compiled code that leaves inputs for which it would compute something else to the part itself."""
    if backend != "openvino":
        return compiled
    return lambda *values: compiled(*values) if _are_for_openvino(values) else part(*values)


def _are_for_openvino(values: Sequence[torch.Tensor]) -> bool:
    """Return whether no input is NaN, and integers are small."""
    for each in values:
        if each.is_floating_point():
            if each.sum().isnan():  # one pass over it; infinities of both signs count, too
                return False
        elif not _is_small(each):
            return False
    return True
