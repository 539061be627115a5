"""Fold batch norms into the linear layers and convolutions beside them.

The pass reads a batch norm with fixed statistics, in any form, as a scale and a shift for each channel, decides which
norms may be folded into an adjacent layer, and scales that layer's weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.fx import GraphModule, Node
from typing_extensions import override

from fxlib.analysis.effects.gradients import respects_no_grad
from fxlib.analysis.effects.local_work import Motion
from fxlib.analysis.effects.model import Effects
from fxlib.analysis.layers import InputRank, LinearLayer, Rank, Steadiness, Weight, linear_layer_of, ranks_of
from fxlib.analysis.norms import Norm, ScaleAndShift, asks_only, counts_updates, norm_of, scales_and_shifts
from fxlib.analysis.operators.arguments import replace_arguments
from fxlib.errors import PassError
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.folded_values import LAYERS_AS_FUNCTIONS, as_function, become, hold, read, sweep
from fxlib.reasons import Declined, Reason
from fxlib.runtime.guards.folded_weights import RANK
from fxlib.runtime.submodules import submodule
from fxlib.utils.text import location_of

Folded = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias."""


@register_pass(
    "fold_norms",
    preserves="tolerance",
    needs=frozenset({"weights", "eval_mode"}),
    introduces=LAYERS_AS_FUNCTIONS,
    version="4",
)
class FoldNorms(GraphPass):
    """Fold batch norms into the linear layers and convolutions right before and after them.

    With `scale = weight / sqrt(variance + eps)` and `shift = bias - mean * scale`, a norm after a layer `Wx + b` makes
    it `(scale W) x + (scale b + shift)`, and a norm before it makes it `(W scale) x + (W shift + b)`. Weights are
    computed in float64 and rounded once. The new weights belong to the rewritten module: if a layer is called twice,
    each call gets weights for its own norms, and the module's parameters stay unchanged.
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


def _spread(layer: LinearLayer, figures: torch.Tensor, *, over: Literal["inputs", "outputs"]) -> torch.Tensor:
    """Reshape one figure per channel so that it broadcasts with the layer's weight."""
    rows, columns, *kernel = layer.weight.tensor.shape
    ones = [1] * len(kernel)
    if (over == "inputs") == (layer.kind == "transposed"):
        return figures.view(rows, 1, *ones)
    grouped = figures.view(layer.groups, 1, columns).expand(-1, rows // layer.groups, -1)
    return grouped.reshape(rows, columns, *ones)


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, which is certain, and faster to check, if their sum is."""
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


def _key(chain: Chain) -> tuple[object, ...]:
    """Return a key of the folded values: calls with the same key share them."""
    layer, norms = chain.layer, (*([chain.before] if chain.before is not None else []), None, *chain.after)
    weights = [(norm.mean, norm.variance, norm.weight, norm.bias) for norm in norms if norm is not None]
    held = tuple(None if each is None else id(each.tensor) for each in (layer.weight, layer.bias, *sum(weights, ())))
    return layer.kind, layer.groups, held, tuple(None if norm is None else norm.eps for norm in norms)


def _hold(module: GraphModule, chain: Chain, folded: Folded) -> tuple[str, str]:
    """Store weight and bias in the module, and return their names."""
    name = chain.layer.weight.name.removesuffix("weight").rstrip("._") or "layer"
    return hold(module, f"{name}.folded.weight", folded[0]), hold(module, f"{name}.folded.bias", folded[1])


def _rewrite(module: GraphModule, chain: Chain, names: tuple[str, str]) -> None:
    """Replace the node of the chain's result by the layer with the folded weights, at the layer's position."""
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
    if result is not node:  # the layer's new result takes the name of the last norm's
        result.meta.clear()
        result.meta.update(node.meta)
        node.prepend(result)
    calls = dict.fromkeys(each for norm in reversed(chain.norms) for each in (norm.node, norm.call))
    for each in (*calls, node):
        if each is not result:
            each.replace_all_uses_with(result, delete_user_cb=asks_only)
            module.graph.erase_node(each)


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """A layer, the norm right before it, and the norms right after it, in order."""

    layer: LinearLayer
    before: Norm | None = None
    after: list[Norm] = field(default_factory=list)

    @property
    def norms(self) -> list[Norm]:
        """All norms of the chain, in program order."""
        return [*([self.before] if self.before is not None else []), *self.after]

    @property
    def result(self) -> Node:
        """The node whose value the chain computes."""
        return self.after[-1].node if self.after else self.layer.node

    @property
    def weights(self) -> list[Weight]:
        """All tensors that the folded values depend on."""
        own = [self.layer.weight, *([self.layer.bias] if self.layer.bias is not None else [])]
        return [*own, *(each for norm in self.norms for each in norm.weights)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foldable:
    """The chains to fold, the norms that cannot be folded, and the ranks of inputs for which this holds."""

    chains: list[Chain]
    declined: list[Declined]
    ranks: dict[Node, int]


def foldable(module: GraphModule) -> Foldable:
    """Find the layers and their norms, in one pass over the program.

    Raises:
        PassError: the values of weights are missing, or a norm does not fit its layer.
    """
    found = _Search(module)
    found.run()
    chains = [each for each in found.chains if each.norms]
    return Foldable(chains=chains, declined=found.declined, ranks=found.assumed)


class _Search:
    """One walk over the program; a norm joins the layer before it, or else waits for the layer after it."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._effects = effects = Effects.of(module)
        self._steadiness = Steadiness(module, effects)
        self._ranks = ranks_of(module, effects)
        self._by_result: dict[Node, Chain] = {}
        self._waiting: dict[Node, Norm] = {}
        self._blocked = None if respects_no_grad(module) else Reason.MODE_BLOCKS
        self.chains: list[Chain] = []
        self.declined: list[Declined] = []
        self.assumed: dict[Node, int] = {}

    def run(self) -> None:
        for node in self._module.graph.nodes:
            norm = norm_of(self._module, node)
            if isinstance(norm, Reason):
                self._decline(node, norm)
            elif norm is not None:
                self._assign(norm)
            elif (layer := linear_layer_of(self._module, node)) is not None:
                self._add(layer)
        for norm in self._waiting.values():
            self._decline(norm.node, self._why_alone(norm))

    @functools.cached_property
    def _motion(self) -> Motion:
        """Answers whether a norm may run where the layer after it does."""
        return Motion(self._module, self._effects, keep_gradients=False)

    def _assign(self, norm: Norm) -> None:
        chain = self._by_result.get(norm.input)
        if chain is None or any(user is not norm.call and not asks_only(user) for user in norm.input.users):
            self._waiting[norm.node] = norm
        elif not self._hindered(chain, norm, chain.layer.outputs):
            chain.after.append(norm)
            self._by_result[norm.node] = chain

    def _add(self, layer: LinearLayer) -> None:
        chain = Chain(layer=layer)
        self.chains.append(chain)
        self._by_result[layer.node] = chain
        norm = self._waiting.get(layer.input)
        if norm is None or len(norm.node.users) != 1:
            return
        del self._waiting[layer.input]
        moved = self._motion.refusal([norm.call], self._effects.index[layer.node])
        if moved is not None:
            self._decline(norm.node, moved)
            return
        if self._hindered(chain, norm, layer.inputs):
            return
        if (layer.pads_zeros or layer.kind == "transposed") and bool(scales_and_shifts([norm])[norm][1].any()):
            self._decline(norm.node, Reason.NORM_BEFORE_PADDING)
        else:
            chain.before = norm

    def _hindered(self, chain: Chain, norm: Norm, channels: int) -> bool:
        """Return whether the norm may not become part of the layer, and record why."""
        reason = self._blocked or self._unsteady(chain, norm) or self._other_dimension(chain.layer, norm, channels)
        if reason is not None:
            self._decline(norm.node, reason, f"{norm.mean.tensor.numel()} against {channels}")
        return reason is not None

    def _unsteady(self, chain: Chain, norm: Norm) -> Reason | None:
        weights = (*chain.weights, *norm.weights)
        tensors = [each.tensor for each in weights]
        for each in weights:
            if each.tensor.is_meta:
                raise PassError(
                    f"needs the values of {each.name}, and they are missing",
                    where=location_of(norm.node),
                    hint="Load the weights first, or send them along.",
                )
        if any(map(torch.Tensor.is_inference, tensors)) or not counts_updates(self._module, norm):
            return Reason.WEIGHT_UNCOUNTED
        if not all(map(torch.Tensor.is_floating_point, tensors)):
            return Reason.WEIGHT_COMPUTED
        return self._steadiness.refusal(norm.node, tensors)

    def _other_dimension(self, layer: LinearLayer, norm: Norm, channels: int) -> Reason | None:
        """Return why the norm's channels may not be the layer's, as for unbatched inputs; None if they are."""
        rank: Rank | None = norm.rank if norm.rank is not None else self._ranks.get(norm.input)
        if rank is None:
            return Reason.RANK_UNKNOWN
        known = self.assumed.get(rank.input, rank.input.meta.get(RANK)) if isinstance(rank, InputRank) else rank
        carrier = self._ranks.get(norm.input)
        broadcast = isinstance(carrier, InputRank) and carrier.least > layer.rank
        fits = norm.mean.tensor.numel() == channels
        if known == layer.rank and not fits and not broadcast:
            raise PassError(
                f"the norm has {norm.mean.tensor.numel()} channels, and the layer beside it {channels}",
                where=location_of(norm.node),
                hint="The model cannot run as it is.",
            )
        if not fits or broadcast or known not in (None, layer.rank):
            return Reason.NORM_OTHER_DIMENSION
        if isinstance(carrier, InputRank):  # a norm with a fixed rank rejects other inputs, which the layer may accept
            self.assumed.setdefault(carrier.input, layer.rank)
        return None

    def _why_alone(self, norm: Norm) -> Reason:
        beside = submodule(self._module, str(norm.input.target)) if norm.input.op == "call_module" else None
        layers = (nn.Linear, nn.modules.conv._ConvNd)
        if isinstance(beside, layers) and linear_layer_of(self._module, norm.input) is None:
            return Reason.OPAQUE_MODULE
        return Reason.NORM_ALONE

    def _decline(self, node: Node, reason: Reason, detail: str = "") -> None:
        self.declined.append(Declined(node=node.name, reason=reason, detail=detail))
