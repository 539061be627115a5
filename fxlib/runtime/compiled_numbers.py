"""Refuse, or put right, what OpenVINO and ONNX Runtime would compute otherwise than torch does.

OpenVINO computes integers in 32 bits, divides them towards zero, saturates those of 8 bits, computes float64 in
float32, and gives plausible numbers for NaN; ONNX Runtime divides integers with a rounding mode in float32. Torch's
attention gives 0 for a row of which the mask leaves nothing, as padding has it, where both give something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.runtime.lookups import lookup_of

_LARGEST_INTEGER: Final = 1 << 24
"""The largest absolute value of integers that a part of OpenVINO's takes: sums of many stay below 32 bits."""
_ATTENTION: Final = frozenset(
    {functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default}
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVING: Final = _words(
    """
    size dim view reshape flatten unflatten squeeze unsqueeze expand expand_as transpose permute t contiguous clone
    detach getitem select slice narrow chunk split unbind cat stack to type _to_copy float double half bfloat16 long int
    bool arange zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full embedding index_select gather
    """
)
"""Operators that move numbers or round them to another dtype."""
_EXACT: Final = _MOVING | _words(
    """
    eq ne lt le gt ge where masked_fill and_ or_ xor not_ invert bitwise_and bitwise_or bitwise_not logical_and
    logical_or logical_not maximum minimum clamp add sub rsub neg abs any all
    """
)
"""Operators that are exact on integers of 32 bits as long as these are small."""
_WIDE: Final = frozenset({torch.int32, torch.int64})
_NARROW: Final = frozenset({torch.uint8, torch.int8, torch.int16})


def refuse(part: GraphModule, values: Sequence[Any], backend: str) -> None:
    """Run a part as it is, to see what it computes.

    Args:
        part: the part.
        values: its inputs.
        backend: the name of the compiler.

    Raises:
        ValueError: the compiler would compute other numbers; the message names the node.
    """
    if (check := _CHECKS.get(backend)) is None:
        return
    run = _Checked(part, check)
    run.run(*values)
    if run.problem:
        raise ValueError(run.problem)


class _Checked(Interpreter):
    """Notes the first node that a check finds something to say about."""

    def __init__(self, part: GraphModule, check: Callable[[GraphModule, Node, Sequence[torch.Tensor]], str]) -> None:
        super().__init__(part, garbage_collect_values=False)
        self._part, self._check = part, check
        self.problem = ""

    @override
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if not self.problem and n.op not in ("placeholder", "get_attr", "output"):
            given = [result, *(self.env[each] for each in n.all_input_nodes)]
            tensors = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
            problem = self._check(self._part, n, tensors)
            self.problem = f"{n.name} {problem}" if problem else ""
        return result


def _of_openvino(part: GraphModule, node: Node, tensors: Sequence[torch.Tensor]) -> str:
    name, dtypes = _name(node), {each.dtype for each in tensors}
    if not all(map(torch.Tensor.numel, tensors)):
        return "computes a tensor without elements"
    if lookup_of(part, node) is not None or name in _MOVING:
        return ""
    if torch.float64 in dtypes or torch.complex128 in dtypes:
        return "computes float64, and OpenVINO does so in float32"
    if dtypes & _NARROW or (dtypes & _WIDE and name not in _EXACT):
        return "computes integers, and OpenVINO has other results"
    literals = [each for each in pytree.tree_leaves((node.args, node.kwargs)) if type(each) is int]
    if dtypes & _WIDE and any(abs(each) > _LARGEST_INTEGER for each in literals):
        return "computes with an integer that may be too large for OpenVINO"
    return ""


def _of_onnxruntime(_: GraphModule, node: Node, tensors: Sequence[torch.Tensor]) -> str:
    divides = _name(node) in ("div", "divide") and node.kwargs.get("rounding_mode") is not None
    if divides and not all(map(torch.Tensor.is_floating_point, tensors)):
        return "divides integers, and ONNX Runtime does so in float32"
    return ""


_CHECKS: Final = {"openvino": _of_openvino, "onnxruntime": _of_onnxruntime}


def _name(node: Node) -> str:
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
        elif each.dtype in _WIDE:
            least, most = torch.aminmax(each)
            if int(least) < -_LARGEST_INTEGER or int(most) > _LARGEST_INTEGER:
                return False
    return True
