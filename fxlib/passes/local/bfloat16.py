"""Run linear layers and convolutions in bfloat16, on processors that have instructions for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.effects.gradients import respects_no_grad
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.node_kinds import Part
from fxlib.analysis.effects.resources import Storage
from fxlib.analysis.layers import LinearLayer, Steadiness, is_relu, linear_layer_of, only_user, under_autocast
from fxlib.analysis.operators.arguments import arguments_of, replace_arguments
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.edit import forget_value, model_position
from fxlib.passes.infra.folded_values import LAYERS_AS_FUNCTIONS, as_function, become, hold, read, sweep
from fxlib.passes.infra.introduced import Introduced
from fxlib.reasons import Declined, Reason
from fxlib.runtime.lowering import ASSERTION


@register_pass(
    "bfloat16",
    preserves="lossy",
    needs=frozenset({"weights", "eval_mode"}),
    introduces=LAYERS_AS_FUNCTIONS | Introduced.of("bfloat16", "float", ASSERTION),
    version="3",
)
class Bfloat16(GraphPass):
    """Run linear layers and convolutions on weights and inputs in bfloat16, with sums in float32.

    Results are float32 again, unless a ReLU or another such layer takes them. A number keeps its range, and about two
    of its decimal digits. On processors without instructions for it, this is slower than float32.
    """

    least_weights: int = 4096
    """Minimum number of weights in a layer; smaller layers stay in float32, since they take too little time to save
    any."""

    def __post_init__(self) -> None:
        """Reject limits that nothing could meet."""
        self.require_at_least(least_weights=0)

    @override
    @torch.no_grad()
    def run(self, module: GraphModule, context: Context) -> PassResult:
        effects = context.get(Effects)
        steadiness, written = Steadiness(module, effects), _written(effects)
        autocast = set(under_autocast(effects.nodes))
        blocked = None if respects_no_grad(module) else Reason.MODE_BLOCKS
        layers, declined = list[LinearLayer](), list[Declined]()
        for node in module.graph.nodes:
            layer = linear_layer_of(module, node)
            if layer is None or layer.weight.tensor.numel() < self.least_weights:
                continue
            tensors = [each.tensor for each in (layer.weight, layer.bias) if each is not None]
            mode = Reason.AUTOCAST if node in autocast else blocked
            if reason := mode or _misfit(tensors) or steadiness.refusal(node, tensors):
                declined.append(Declined(node=node.name, reason=reason))
            else:
                layers.append(layer)
        writers = {node: written.get(effects.aliases.of(node), set()) for node in effects.nodes}
        ends = [(layer.node, *_rewrite(module, layer)) for layer in layers]
        _hand_on(module, ends, writers)
        _assert_float32(module, ends)
        sweep(module)
        return PassResult(module, changes=len(layers), declined=tuple(declined))


def _written(effects: Effects) -> dict[int, set[Node]]:
    """Return the nodes that write the memory of each alias class, or may."""
    found = dict[int, set[Node]]()
    for node, does in zip(effects.nodes, effects.per_node, strict=True):
        classes = {each.alias_class for each in does.writes if isinstance(each, Storage)}
        if does.part is Part.FENCE:
            classes.update(map(effects.aliases.of, node.all_input_nodes))
        for each in classes:
            found.setdefault(each, set()).add(node)
    return found


def _misfit(tensors: Sequence[torch.Tensor]) -> Reason | None:
    if not all(each.dtype is torch.float32 and each.device.type == "cpu" for each in tensors):
        return Reason.NOT_BFLOAT16
    return Reason.WEIGHT_UNCOUNTED if any(map(torch.Tensor.is_inference, tensors)) else None


def _rewrite(module: GraphModule, layer: LinearLayer) -> tuple[Node, Node]:
    """Compute the layer in bfloat16 at its node; return the nodes that convert its input, and its result back."""
    node, graph, weights = layer.node, module.graph, list[Node | None]()
    for held in (layer.weight, layer.bias):
        if held is None:
            weights.append(None)
            continue
        name = hold(module, f"{held.name.removeprefix('_')}.bfloat16", held.tensor.detach().bfloat16())
        weights.append(read(module, name, held.sources, node))
    weight, bias = weights
    if node.op == "call_module":
        assert weight is not None  # noqa: S101 - a layer has one
        become(node, as_function(module, layer, weight, bias))
    else:
        replace_arguments(node, weight=weight, **({} if bias is None else {"bias": bias}))
    with graph.inserting_before(node):
        narrow = graph.call_method("bfloat16", (arguments_of(node)["input"],))
    replace_arguments(node, input=narrow)
    with graph.inserting_after(node):
        wide = graph.call_method("float", (node,))
    _stand_behind(node, wide)
    for each in (narrow, wide):
        each.meta.update(model_position(node))
    forget_value(node)
    return narrow, wide


def _assert_float32(module: GraphModule, ends: Sequence[tuple[Node, Node, Node]]) -> None:
    """Have each input that is still converted to bfloat16 be float32: with any other dtype, the layer itself raises."""
    made = {wide for _, _, wide in ends}
    narrowing = {narrow for _, narrow, _ in ends}
    for narrow in module.graph.find_nodes(op="call_method", target="bfloat16"):
        (value,) = narrow.all_input_nodes
        if narrow in narrowing and value not in made and getattr(value.meta.get("val"), "dtype", None) != torch.float32:
            with module.graph.inserting_before(narrow):
                check = module.graph.call_function(ASSERTION, (value, None, None, torch.float32))
            check.meta.update(model_position(narrow))


def _stand_behind(node: Node, wide: Node) -> None:
    """Let all users of a value use the value made from it instead."""
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def _hand_on(
    module: GraphModule, ends: Sequence[tuple[Node, Node, Node]], writers: Mapping[Node, AbstractSet[Node]]
) -> None:
    """Pass results to ReLUs and further layers in bfloat16: conversion to float32 and back changes no bit.

    Args:
        module: the rewritten module.
        ends: for each layer, its node, and those that convert its input, and its result back.
        writers: for each node, those that write the memory of its value: they write the float32 numbers, which are what
            other layers take then.
    """
    narrowing = {narrow for _, narrow, _ in ends}
    for layer, _, wide in ends:
        writing, relus = set(writers[layer]), set[Node]()
        while (behind := only_user(wide)) is not None and is_relu(module, behind):
            (narrow,) = wide.all_input_nodes
            behind.replace_input_with(wide, narrow)
            behind.append(wide)
            _stand_behind(behind, wide)
            wide.args = (behind,)
            writing |= writers[behind]
            relus.add(behind)
            forget_value(behind)
        for user in [each for each in wide.users if each in narrowing and writing <= relus]:
            user.replace_all_uses_with(wide.all_input_nodes[0])
            module.graph.erase_node(user)
        if not wide.users:
            module.graph.erase_node(wide)
