"""Fold batch norms into the linear layers and convolutions beside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch.fx import GraphModule
from typing_extensions import override

from fxlib.analysis.layers.linear_layers import Affine
from fxlib.analysis.operators.signatures import replace_arguments
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.folded_values import as_function, become, hold, read, sweep
from fxlib.passes.local.fold_norms.foldable import Chain, asks_only, foldable
from fxlib.passes.local.fold_norms.norms import Norm, ScaleAndShift, scales_and_shifts
from fxlib.reasons import Declined, Reason
from fxlib.runtime.guards.folded_weights import RANK

Folded = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias."""


@register_pass("fold_norms", preserves="tolerance", needs=frozenset({"weights", "eval_mode"}), version="3")
class FoldNorms(GraphPass):
    """Let linear layers and convolutions do the work of the batch norms right before and after them.

    With `scale = weight / sqrt(variance + eps)` and `shift = bias - mean * scale`, a norm after a layer `Wx + b` makes
    it `(scale W) x + (scale b + shift)`, and a norm before it makes it `(W scale) x + (W shift + b)`. Weights are
    computed in float64 and rounded once. They are the rewritten module's own: each call of a layer that is called
    twice gets those of its own norms, and the module's parameters stay as they are.
    """

    @override
    @torch.no_grad()
    def run(self, module: GraphModule, context: Context) -> PassResult:
        found = foldable(module)
        norms = scales_and_shifts(norm for chain in found.chains for norm in chain.norms)
        made: dict[tuple[object, ...], tuple[str, str]] = {}
        changes, declined = 0, list(found.declined)
        for chain in found.chains:
            key = _key(chain)
            if key not in made:
                folded = fold(chain, norms)
                if not all(map(_is_finite, folded)):
                    declined.extend(Declined(node=norm.node.name, reason=Reason.NOT_FINITE) for norm in chain.norms)
                    continue
                made[key] = _hold(module, chain, folded)
            _rewrite(module, chain, made[key])
            changes += len(chain.norms)
        if changes:
            for placeholder, rank in found.ranks.items():
                placeholder.meta[RANK] = rank
            sweep(module)
        return PassResult(module, changes=changes, declined=tuple(declined))


def fold(chain: Chain, norms: Mapping[Norm, ScaleAndShift]) -> Folded:
    """Return weight and bias of the layer that does the work of the whole chain, in the dtype of its weight."""
    layer, held = chain.layer, chain.layer.weight.tensor
    bias = layer.bias.tensor if layer.bias is not None else None
    factors: list[torch.Tensor] = []
    if chain.before is not None:
        scale, shift = (_spread(layer, each, over="inputs") for each in norms[chain.before])
        # (groups, outputs or inputs of each, inputs or outputs of each, taps of the kernel)
        parts = (held * shift).reshape(layer.groups, held.shape[0] // layer.groups, held.shape[1], -1)
        added = parts.sum((1 if layer.kind == "transposed" else 2, 3)).flatten()
        bias = added if bias is None else added + bias
        factors.append(scale)
    for norm in chain.after:
        scale, shift = norms[norm]
        bias = shift if bias is None else bias * scale + shift
        factors.append(_spread(layer, scale, over="outputs"))
    assert bias is not None, layer.node  # noqa: S101 - a chain has a norm
    weight = torch.mul(held, functools.reduce(torch.mul, factors), out=torch.empty_like(held))
    return weight, bias.to(held.dtype, copy=True)


def _spread(layer: Affine, figures: torch.Tensor, *, over: Literal["inputs", "outputs"]) -> torch.Tensor:
    """Give a figure for each channel the shape in which it meets the layer's weight."""
    rows, columns, *kernel = layer.weight.tensor.shape
    ones = [1] * len(kernel)
    if (over == "inputs") == (layer.kind == "transposed"):
        return figures.view(rows, 1, *ones)
    grouped = figures.view(layer.groups, 1, columns).expand(-1, rows // layer.groups, -1)
    return grouped.reshape(rows, columns, *ones)


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all values are: surely where their sum is, which is sooner known."""
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


def _key(chain: Chain) -> tuple[object, ...]:
    """What decides the folded values: calls that are alike in it share them."""
    layer, norms = chain.layer, (*([chain.before] if chain.before is not None else []), None, *chain.after)
    weights = [(norm.mean, norm.variance, norm.weight, norm.bias) for norm in norms if norm is not None]
    held = tuple(None if each is None else id(each.tensor) for each in (layer.weight, layer.bias, *sum(weights, ())))
    return layer.kind, layer.groups, held, tuple(None if norm is None else norm.eps for norm in norms)


def _hold(module: GraphModule, chain: Chain, folded: Folded) -> tuple[str, str]:
    """Give the module weight and bias, and return their names."""
    name = chain.layer.weight.name.removesuffix("weight").rstrip("._") or "layer"
    return hold(module, f"{name}.folded.weight", folded[0]), hold(module, f"{name}.folded.bias", folded[1])


def _rewrite(module: GraphModule, chain: Chain, names: tuple[str, str]) -> None:
    """Let the node of the chain's result be the layer with the folded weights, in the place of the layer."""
    layer, node, result = chain.layer, chain.layer.node, chain.result
    sources = frozenset[str]().union(*(each.sources for each in chain.weights))
    weight, bias = (read(module, name, sources, node) for name in names)
    if chain.before is not None:
        node.replace_input_with(layer.input, chain.before.input)
    if node.op == "call_module":
        become(result, as_function(module, layer, weight, bias))
    else:
        replace_arguments(node, weight=weight, bias=bias)
        become(result, (node.target, node.args, node.kwargs))
    node.meta[RANK] = layer.rank
    if result is not node:  # what the layer is to give from now on goes by the name of the last norm
        result.meta.clear()
        result.meta.update(node.meta)
        node.prepend(result)
    calls = dict.fromkeys(each for norm in reversed(chain.norms) for each in (norm.node, norm.call))
    for each in (*calls, node):
        if each is not result:
            each.replace_all_uses_with(result, delete_user_cb=asks_only)
            module.graph.erase_node(each)
