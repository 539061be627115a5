"""Let operators write over arguments that nobody needs any more."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils import _pytree as pytree
from typing_extensions import override

from fxlib.analysis.effects.records_gradients import records_gradients
from fxlib.analysis.operators.in_place import SCATTERS
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.local.reinplace.reuse import Overwrite, Step, Store, plan
from fxlib.runtime import CapturedModule

_SHAPES = ("val", "tensor_meta")


@register_pass("reinplace", preserves="bitwise")
class Reinplace(GraphPass):
    """Turn ATen operators into their in-place variants where nobody can tell, as `torch.fx.passes.reinplace` means to.

    It applies where no gradients are recorded: a module captured under `torch.no_grad()`, a plain GraphModule that is
    rewritten under it, a workload of mode "forward", or a no-grad block. Shapes and strides are those of the graph's
    metadata. Inputs, parameters and buffers are written only where the program itself overwrites them by `copy_`.
    """

    distinct_inputs: bool = False
    """The caller's word that inputs, parameters and buffers share memory only where they did at capture; without it,
    any may share memory with any other."""

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = plan(module, recording=_is_recorded(module, context), distinct_inputs=self.distinct_inputs)
        for step in found.steps:
            _take(module.graph, step)
        return PassResult(module, changes=len(found.steps), declined=found.declined)


def _is_recorded(module: GraphModule, context: Context) -> bool:
    """Whether gradients are recorded when the module's graph begins to run."""
    if context.workload is not None and context.workload.mode == "forward":
        return False
    return records_gradients(module) if isinstance(module, CapturedModule) else torch.is_grad_enabled()


def _take(graph: Graph, step: Step) -> None:
    node = step.node
    if isinstance(step, Overwrite):
        if step.swapped:
            node.args = (node.args[1], node.args[0])
        node.target = step.variant
        _lie_as(node, node.args[0])
        if step.cast is not None:
            _replace(graph, step.cast, node)
        for view, made in step.views.items():
            _relay(view, made)
        return
    if isinstance(step, Store):
        _store(graph, node)
    into = node.args[0]
    assert isinstance(into, Node), node  # noqa: S101 - no other step is planned
    _replace(graph, node, into)


def _store(graph: Graph, scatter: Node) -> None:
    """Copy what a scatter puts into its first argument right there."""
    into, part, *rest = scatter.args
    view = SCATTERS[scatter.target]
    with graph.inserting_before(scatter):
        region = graph.call_function(view, (into, *rest), dict(scatter.kwargs))
        copied = graph.call_function(torch.ops.aten.copy_.default, (region, part))
    for made in (region, copied):
        made.meta = {name: value for name, value in scatter.meta.items() if name not in _SHAPES}
        _lie_as(made, part)


def _lie_as(node: Node, other: object) -> None:
    """Note that a node's value has the shape and strides of another's from now on."""
    assert isinstance(other, Node), node  # noqa: S101 - no other step is planned
    for name in _SHAPES:
        node.meta.pop(name, None)
        if name in other.meta:
            node.meta[name] = other.meta[name]


def _relay(view: Node, made: object) -> None:
    """Note that a view has the strides of a tensor without memory from now on."""
    value = view.meta.pop("val", None)
    if value is not None and "val" in view.all_input_nodes[0].meta:
        assert callable(view.target), view  # noqa: S101 - views are made by operators
        view.meta["val"] = view.target(*map_arg(view.args, lambda each: each.meta["val"]), **view.kwargs)
    if "tensor_meta" in view.meta:
        view.meta["tensor_meta"] = pytree.tree_map_only(torch.Tensor, _extract_tensor_metadata, made)


def _replace(graph: Graph, node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)
