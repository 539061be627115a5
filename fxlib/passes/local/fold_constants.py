"""Compute once what every forward would compute alike: values that depend only on parameters, buffers and literals."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.analysis.effects.gradients import respects_no_grad
from fxlib.analysis.effects.local_work import Escapes
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Behaviour, Behaviours, Part
from fxlib.analysis.layers import Steadiness, Weight, under_autocast
from fxlib.analysis.operators.arguments import arguments_of
from fxlib.analysis.operators.schemas import OperatorFacts
from fxlib.passes.infra.base import Context, GraphPass, PassResult, Preserves, register_pass
from fxlib.passes.infra.edit import VALUE_KEYS
from fxlib.passes.infra.folded_values import hold, read, sweep
from fxlib.passes.infra.introduced import NOTHING
from fxlib.reasons import Declined, Reason
from fxlib.runtime.submodules import submodule
from fxlib.utils.pytree import tensors_in


@register_pass(
    "fold_constants",
    preserves="bitwise",
    needs=frozenset({"weights", "eval_mode"}),
    introduces=NOTHING,
    version="4",
)
class FoldConstants(GraphPass):
    """Store values that are computed from parameters, buffers and literals alone, instead of recomputing them.

    Values that are written to or returned are computed as before, and so are views of the module's own tensors, which
    cost nothing.
    """

    max_bytes: int = 64 << 20
    """Maximum bytes of all computed values together."""
    bitwise: bool = True
    """Whether only values are stored that have the same bits on all machines, with any number of threads. Functions
    such as exponentials do not: what several numbers at once give is rounded otherwise than what one gives."""

    def __post_init__(self) -> None:
        """Reject limits that nothing could meet."""
        self.require_at_least(max_bytes=0)

    @property
    @override
    def promise(self) -> Preserves:
        return self.preserves if self.bitwise else "tolerance"

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        if not respects_no_grad(module):
            return PassResult(module, changes=0, declined=(Declined(node="graph", reason=Reason.MODE_BLOCKS),))
        effects = context.get(Effects)
        found, escapes = constants(module, effects, max_bytes=self.max_bytes, bitwise=self.bitwise), Escapes(effects)
        declined, changes, recorded = list(found.declined), 0, frozenset[str]()
        for node, constant in found.of.items():
            if node.op == "get_attr" or all(user in found.of for user in node.users):
                continue
            if isinstance(constant.value, (bool, int, float)) and math.isfinite(constant.value):
                # In place of a weight's size, nothing would show that a weight of another size has replaced it.
                changes += not constant.sources and _write_out(node, constant.value)
            elif isinstance(constant.value, torch.Tensor) and not constant.held:
                reason = escapes.refusal(node)
                if reason is None:
                    _hold(module, node, constant)
                    changes, recorded = changes + 1, recorded | constant.sources
                else:
                    declined.append(Declined(node=node.name, reason=reason))
        if changes:
            _erase_unused(module, found, recorded)
            sweep(module)
        return PassResult(module, changes=changes, declined=tuple(declined))


def _hold(module: GraphModule, node: Node, constant: Constant) -> None:
    name = hold(module, f"{node.name}.folded", constant.value)
    value = read(module, name, constant.sources, node)
    value.meta |= {key: node.meta[key] for key in VALUE_KEYS if key in node.meta}
    node.replace_all_uses_with(value)


def _write_out(node: Node, number: float) -> int:
    """Let users take the number itself; users that call a method of it need the node."""
    users = [user for user in node.users if user.op != "call_method" or user.args[0] is not node]
    for user in users:
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda each: number if each is node else each)
    return bool(users)


def _erase_unused(module: GraphModule, found: Constants, recorded: frozenset[str]) -> None:
    """Remove nodes that only served to compute the stored values. They have no effects, or were not constant.

    Work that may raise stays, as it may be there as a check, unless the module runs its original whenever one of the
    weights behind it changes, which are then among those `recorded` with stored values.
    """
    for node, constant in reversed(found.of.items()):
        if not node.users and not (node in found.raising and not constant.sources <= recorded):
            module.graph.erase_node(node)


_MOVING = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "t", "T", "mT"),
        *("movedim", "swapaxes", "select", "slice", "narrow", "getitem", "chunk", "split", "tensor_split", "unbind"),
        *("expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "cat", "concat", "stack"),
        *("gather", "index", "index_select", "take", "take_along_dim", "embedding", "tril", "triu", "flip", "roll"),
        *("diagonal", "diag", "pad", "constant_pad_nd", "clone", "contiguous", "detach", "to", "type", "_to_copy"),
        *("float", "double", "half", "bfloat16", "lift_fresh_copy", "alias", "view_as", "zeros", "ones", "full"),
        *("arange", "eye", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
        *("scalar_tensor", "masked_fill", "slice_scatter", "select_scatter", "copy"),
    }
)
"""Operators whose result holds numbers from their arguments, at most rounded to another dtype."""
_ROUNDED_ONCE = frozenset(
    {
        *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "truediv", "true_divide", "neg"),
        *("negative", "positive", "abs", "absolute", "sign", "clamp", "clamp_min", "clamp_max"),
        *("clip", "relu", "relu6", "hardtanh", "leaky_relu", "threshold", "where", "floor", "ceil", "trunc", "round"),
        *("sqrt", "square", "reciprocal", "copysign", "nan_to_num"),
    }
)
"""Pointwise operators whose result is the exact one, rounded as IEEE 754 says, or a number from their arguments."""
_IN_STEPS = frozenset({"alpha", "rounding_mode", "decimals"})
"""Arguments with which some of these round more than once."""
_CASTS = frozenset({"to", "type", "_to_copy", "float", "double", "half", "bfloat16"})
_ELSEWHERE = frozenset({"cuda", "cpu", "pin_memory", "xpu", "ipu"})


_MODULES = (nn.Embedding, nn.Identity)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constant:
    """The constant value of a node, and the weights behind it."""

    value: Any
    sources: frozenset[str]
    held: bool = False
    """Whether the value is, or is a view of, memory of the module's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The facts about a value before it is computed."""

    nbytes: int
    floating: bool
    real: bool


@dataclass(slots=True, kw_only=True)
class Constants:
    """The known values by node, in program order, and the nodes whose values might have been known."""

    of: dict[Node, Constant] = field(default_factory=dict)
    raising: set[Node] = field(default_factory=set)
    """The nodes among them that raise for other values of the weights."""
    declined: list[Declined] = field(default_factory=list)


def constants(module: GraphModule, effects: Effects, *, max_bytes: int, bitwise: bool) -> Constants:
    """Compute values that are the same in every forward, `max_bytes` of them at most, all together.

    Fake tensors give the sizes before anything is computed. Operators that sum floating-point numbers are left out, as
    their rounding depends on the machine and its threads, and so are moves between devices and operators that depend on
    torch's defaults; if `bitwise`, so are functions whose kernels round in several ways.
    """
    return _Evaluation(module, effects, max_bytes, bitwise=bitwise).run()


class _Evaluation:
    """One walk over the program, in which nodes whose inputs are constants become constants."""

    def __init__(self, module: GraphModule, effects: Effects, max_bytes: int, *, bitwise: bool) -> None:
        self._module, self._effects, self._bitwise = module, effects, bitwise
        self._behaviours, self._steadiness = Behaviours(module), Steadiness(module, effects)
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._results: dict[Hashable, _Result | None] = {}
        self._max_bytes = self._left = max_bytes
        self._own: set[int] = set()
        self._found = Constants()

    def run(self) -> Constants:
        autocast = set(under_autocast(self._effects.nodes))
        with torch.no_grad():
            for node, behaviour in zip(self._effects.nodes, self._effects.behaviours, strict=True):
                if behaviour.part is Part.STATE:
                    self._read(node)
                elif behaviour.operator is not None and node not in autocast and self._is_candidate(node, behaviour):
                    self._compute(node, behaviour.operator)
        return self._found

    def _read(self, node: Node) -> None:
        weight = Weight.read(self._module, node)
        if weight is None or weight.tensor.is_meta or weight.tensor.is_inference():
            return
        if self._steadiness.refusal(node, [weight.tensor]) is None:
            self._found.of[node] = Constant(value=weight.tensor, sources=weight.sources, held=True)
            self._own |= _storages(weight.tensor)

    def _is_candidate(self, node: Node, behaviour: Behaviour) -> bool:
        operator = behaviour.operator
        if behaviour.part is not Part.LOCAL or operator is None or operator.random or self._effects[node].writes:
            return False
        if operator.name == "tolist":  # numbers carry no sources, and fake tensors do not stop it
            return False
        constant = all(value in self._found.of for value in node.all_input_nodes)
        return constant and not self._behaviours.may_act(node) and self._has_steady_state(node, operator)

    def _has_steady_state(self, node: Node, operator: OperatorFacts) -> bool:
        if node.op != "call_module":
            return True
        known = isinstance(submodule(self._module, str(node.target)), _MODULES)
        return known and self._steadiness.refusal(node, operator.state) is None

    def _compute(self, node: Node, operator: OperatorFacts) -> None:
        reason = self._refusal(node, operator)
        if reason is not None:
            if node.all_input_nodes or reason is not Reason.AMBIENT_DEFAULT:
                detail = f"at most {self._max_bytes:,} bytes" if reason is Reason.TOO_LARGE else operator.name
                self._found.declined.append(Declined(node=node.name, reason=reason, detail=detail))
            return
        try:
            value = self._call(node, {each: self._found.of[each].value for each in node.all_input_nodes})
        except Exception:  # noqa: BLE001 - it will raise when the module runs, as it does in the original
            return
        sources = frozenset[str]().union(*(self._found.of[each].sources for each in node.all_input_nodes))
        if node.op == "call_module":
            layer = submodule(self._module, str(node.target))
            sources |= {f"{node.target}.{name}" for name, _ in layer.named_parameters()}
        held = not self._own.isdisjoint(_storages(value))
        self._found.of[node] = Constant(value=value, sources=sources, held=held)
        if operator.raises:
            self._found.raising.add(node)
        self._left -= 0 if held else _bytes(value)

    def _refusal(self, node: Node, operator: OperatorFacts) -> Reason | None:
        """Return why the value may differ elsewhere, or is too large to be computed; None if neither."""
        given = arguments_of(node) if node.op == "call_function" else dict(node.kwargs)
        arguments = [*node.args, *node.kwargs.values(), *given.values()]
        if operator.name in _ELSEWHERE or (
            operator.name in _CASTS and any(isinstance(each, (torch.device, str)) for each in arguments)
        ):
            return Reason.AMBIENT_DEFAULT
        pointwise = node.op != "call_module" and _is_pointwise(node.target, operator.name)
        result = self._result(node, pointwise=pointwise)
        if result is None:
            return Reason.AMBIENT_DEFAULT
        if result.nbytes > self._left:
            return Reason.TOO_LARGE
        typed = any(isinstance(each, torch.dtype) for each in arguments) or operator.name in _CASTS
        if not node.all_input_nodes and given.get("device") is None:
            return Reason.AMBIENT_DEFAULT
        inputs = [self._found.of[each].value for each in node.all_input_nodes]
        if result.floating and not typed and not any(map(_is_floating, inputs)) and node.op != "call_module":
            return Reason.AMBIENT_DEFAULT
        if not result.floating or operator.name in _MOVING or node.op == "call_module":
            return None
        if not pointwise:
            return Reason.SUM_ORDER
        rounds_once = operator.name.rstrip("_") in _ROUNDED_ONCE and _IN_STEPS.isdisjoint(given) and result.real
        if operator.name.startswith(("clamp", "clip")) and len(node.all_input_nodes) > 1:
            rounds_once = False  # of two zeros, kernels choose one or the other
        return None if rounds_once or not self._bitwise else Reason.ROUNDED_OTHERWISE

    def _result(self, node: Node, *, pointwise: bool) -> _Result | None:
        """Return the facts about a node's value; None if they depend on values, or there is no value.

        A pointwise operator gives results of the same shape and dtype for any literals of one type, and fake tensors
        take fifty times as long as the work itself on small tensors, so each kind of call is tried once.
        """
        given = map_arg((node.args, node.kwargs), lambda each: self._found.of[each].value)
        leaves, structure = pytree.tree_flatten(given)
        kind = (node.op, node.target, structure, *(_likeness(each, literal=not pointwise) for each in leaves))
        try:
            known = kind in self._results
        except TypeError:  # not hashable
            return self._faked(node)
        if not known:
            self._results[kind] = self._faked(node)
        return self._results[kind]

    def _faked(self, node: Node) -> _Result | None:
        try:
            with self._fake_mode:
                value = self._call(node, {each: self._found.of[each].value for each in node.all_input_nodes})
        except Exception:  # noqa: BLE001 - whatever cannot be known without values, or cannot be computed at all
            return None
        given = [self._found.of[each].value for each in node.all_input_nodes]
        real = not any(torch.is_complex(each) for one in (value, *given) for each in tensors_in(one))
        return _Result(nbytes=_bytes(value), floating=_is_floating(value), real=real)

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "call_module":
            return submodule(self._module, str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _likeness(value: Any, *, literal: bool) -> Hashable:
    """Return what decides the shape and dtype of results: those of a tensor, the type of a literal, or the literal."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return "tensor", type(value), value.dtype, value.device, value.layout, tuple(value.shape), strides
    exact = literal or not isinstance(value, (bool, int, float))
    return type(value), repr(value) if exact and isinstance(value, float) else value if exact else None


def _storages(value: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors_in(value) if each.layout is torch.strided} - {0}


def _bytes(value: Any) -> int:
    return sum(each.nbytes for each in tensors_in(value) if each.layout is torch.strided)


def _is_floating(value: Any) -> bool:
    return any(each.is_floating_point() or each.is_complex() for each in tensors_in(value))


@functools.cache
def _is_pointwise(target: Any, name: str) -> bool:
    """Return whether each number of the result is computed independently."""
    overloads = [target] if isinstance(target, torch._ops.OpOverload) else _overloads(name.rstrip("_"))
    return bool(overloads) and all(torch.Tag.pointwise in each.tags for each in overloads)


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, {"truediv": "div"}.get(name, name), None)
    found = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    return [each for each in found if torch.Tag.out not in each.tags and _takes_a_tensor_first(each)]


def _takes_a_tensor_first(overload: Any) -> bool:
    """Return whether it is not an overload for numbers, lists or strings, which have the same names."""
    arguments = overload._schema.arguments
    return bool(arguments) and arguments[0].type.kind() == "TensorType"
