"""Let convolutional nets work channels last, where that pays."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node
from typing_extensions import override

from fxlib.analysis.layers.linear_layers import Affine
from fxlib.analysis.operators.signatures import replace_arguments
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.folded_values import as_function, become, hold, read, sweep
from fxlib.passes.local.channels_last.layout_regions import Region, regions_of
from fxlib.reasons import Declined, Reason
from fxlib.runtime.guards.folded_weights import RANK

_SHAPES = ("val", "tensor_meta")
"""Metadata that states strides."""


@register_pass("channels_last", preserves="tolerance", needs=frozenset({"weights", "eval_mode"}))
class ChannelsLast(GraphPass):
    """Put two-dimensional convolutions, and what lies between them, into the layout that their kernels prefer.

    Weights are laid out once. Activations change their layout where they enter a region of such work and where they
    leave it, and the module returns tensors with the strides that it returned before (for inputs in torch's default
    layout). A region in which too few convolutions gain from each change is left alone.
    """

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = regions_of(module)
        declined = list(found.declined)
        held: dict[object, str] = {}
        changes = 0
        for region in found.regions:
            if not region.gains:
                detail = f"{region.changes} changes for {len(region.convolutions)} convolutions"
                names = (each.node.name for each in region.convolutions)
                declined.extend(Declined(node=name, reason=Reason.LAYOUT_MIXED, detail=detail) for name in names)
                continue
            _convert(module, region, held)
            changes += len(region.convolutions)
        sweep(module)
        return PassResult(module, changes=changes, declined=tuple(declined))


def _convert(module: GraphModule, region: Region, held: dict[object, str]) -> None:
    for value, users in region.exits.items():
        for user in users:
            user.replace_input_with(value, _plain(module.graph, value, user))
    for each in region.nodes:
        for key in _SHAPES:
            each.meta.pop(key, None)
    for layer in region.entries:
        layer.node.replace_input_with(layer.input, _last(module.graph, layer.input, layer.node))
    for layer in region.convolutions:
        _lay_out(module, layer, held)
    for placeholder, rank in region.ranks.items():
        placeholder.meta[RANK] = rank


def _plain(graph: Graph, value: Node, user: Node) -> Node:
    """Insert the change to torch's default layout; what the caller gets has just its strides, a copy in any case."""
    with graph.inserting_before(user):
        if user.op == "output":
            node = graph.call_method("clone", (value,), {"memory_format": torch.contiguous_format})
        else:
            node = graph.call_method("contiguous", (value,))
    return _noted(node, value)


def _last(graph: Graph, value: Node, user: Node) -> Node:
    with graph.inserting_before(user):
        node = graph.call_method("contiguous", (value,), {"memory_format": torch.channels_last})
    return _noted(node, user)


def _noted(node: Node, of: Node) -> Node:
    node.meta = {key: of.meta[key] for key in ("order", "source") if key in of.meta}
    return node


def _lay_out(module: GraphModule, layer: Affine, held: dict[object, str]) -> None:
    """Give the convolution a weight that is channels last."""
    weight = layer.weight
    if weight.tensor.is_contiguous(memory_format=torch.channels_last):
        return
    key = id(weight.tensor)
    if key not in held:
        laid = weight.tensor.detach().contiguous(memory_format=torch.channels_last)
        held[key] = hold(module, f"{weight.name.removeprefix('_')}.channels_last", laid)
    value = read(module, held[key], weight.sources, layer.node)
    if layer.node.op == "call_module":
        bias = None
        if layer.bias is not None:
            with module.graph.inserting_before(layer.node):
                bias = module.graph.create_node("get_attr", layer.bias.name)
        become(layer.node, as_function(module, layer, value, bias))
    else:
        replace_arguments(layer.node, weight=value)
