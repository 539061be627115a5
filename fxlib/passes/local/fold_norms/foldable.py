"""Which batch norms may become part of the linear layer or convolution beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.records_gradients import may_leave_gradients
from fxlib.analysis.layers.constant_weights import Steadiness, Weight
from fxlib.analysis.layers.linear_layers import Affine, affine_of
from fxlib.analysis.layers.ranks import Rank, ranks_of
from fxlib.errors import PassError
from fxlib.passes.local.fold_norms.norms import Norm, norm_of, scales_and_shifts
from fxlib.reasons import Declined, Reason
from fxlib.runtime.guards.folded_weights import RANK, counter_of
from fxlib.runtime.submodules import submodule

_ATTRIBUTES = frozenset({"ndim", "shape", "dtype", "device"})
_METHODS = frozenset({"dim", "ndimension", "size", "numel", "nelement"})


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """A layer, the norm right before it, and those right after it, in order."""

    layer: Affine
    before: Norm | None = None
    after: list[Norm] = field(default_factory=list)

    @property
    def norms(self) -> list[Norm]:
        """All its norms, in the program's order."""
        return [*([self.before] if self.before is not None else []), *self.after]

    @property
    def result(self) -> Node:
        """The node whose value the chain computes."""
        return self.after[-1].node if self.after else self.layer.node

    @property
    def weights(self) -> list[Weight]:
        """All tensors behind it."""
        own = [self.layer.weight, *([self.layer.bias] if self.layer.bias is not None else [])]
        return [*own, *(each for norm in self.norms for each in norm.weights)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foldable:
    """What there is to fold, what there is not, and the ranks of inputs that it is true of."""

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
    """One walk over the program; a norm joins the layer before it, or else waits for the one after it."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        effects = Effects.of(module)
        self._steadiness = Steadiness(module, effects)
        self._ranks = ranks_of(module, effects)
        self._by_result: dict[Node, Chain] = {}
        self._waiting: dict[Node, Norm] = {}
        self._gradients = None if may_leave_gradients(module) else Reason.MODE_BLOCKS
        self.chains: list[Chain] = []
        self.declined: list[Declined] = []
        self.assumed: dict[Node, int] = {}

    def run(self) -> None:
        for node in self._module.graph.nodes:
            norm = norm_of(self._module, node)
            if isinstance(norm, Reason):
                self._decline(node, norm)
            elif norm is not None:
                self._place(norm)
            elif (layer := affine_of(self._module, node)) is not None:
                self._add(layer)
        for norm in self._waiting.values():
            self._decline(norm.node, self._why_alone(norm))

    def _place(self, norm: Norm) -> None:
        chain = self._by_result.get(norm.input)
        if chain is None or any(user is not norm.call and not asks_only(user) for user in norm.input.users):
            self._waiting[norm.node] = norm
        elif not self._hindered(chain, norm, chain.layer.outputs):
            chain.after.append(norm)
            self._by_result[norm.node] = chain

    def _add(self, layer: Affine) -> None:
        chain = Chain(layer=layer)
        self.chains.append(chain)
        self._by_result[layer.node] = chain
        norm = self._waiting.get(layer.input)
        if norm is None or len(norm.node.users) != 1:
            return
        del self._waiting[layer.input]
        if self._hindered(chain, norm, layer.inputs):
            return
        if (layer.pads_zeros or layer.kind == "transposed") and bool(scales_and_shifts([norm])[norm][1].any()):
            self._decline(norm.node, Reason.NORM_BEFORE_PADDING)
        else:
            chain.before = norm

    def _hindered(self, chain: Chain, norm: Norm, channels: int) -> bool:
        """Whether the norm may not become part of the layer; says why."""
        reason = self._gradients or self._unsteady(chain, norm) or self._other_dimension(chain.layer, norm, channels)
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
                    where=place_of(norm.node),
                    hint="Load the weights before, or send them along.",
                )
        if any(map(torch.Tensor.is_inference, tensors)) or not self._counts_updates(norm):
            return Reason.WEIGHT_UNCOUNTED
        if not all(map(torch.Tensor.is_floating_point, tensors)):
            return Reason.WEIGHT_COMPUTED
        return self._steadiness.hindrance(norm.node, tensors)

    def _counts_updates(self, norm: Norm) -> bool:
        """Whether it can be told that a norm in training has updated its statistics."""
        beside = {name.rpartition(".")[0]: name for name in norm.mean.sources | norm.variance.sources}
        return all(counter_of(self._module, name) for name in beside.values())

    def _other_dimension(self, layer: Affine, norm: Norm, channels: int) -> Reason | None:
        """The channels of a norm are the second dimension: those of the layer, if its input is a batch of them."""
        rank: Rank | None = norm.rank if norm.rank is not None else self._ranks.get(norm.input)
        if rank is None:
            return Reason.RANK_UNKNOWN
        known = self.assumed.get(rank, rank.meta.get(RANK)) if isinstance(rank, Node) else rank
        fits = norm.mean.tensor.numel() == channels
        if known == layer.rank and not fits:
            raise PassError(
                f"the norm has {norm.mean.tensor.numel()} channels, and the layer beside it {channels}",
                where=place_of(norm.node),
                hint="The model cannot run like this.",
            )
        if not fits or known not in (None, layer.rank):
            return Reason.NORM_OTHER_DIMENSION
        carrier = self._ranks.get(norm.input)
        if isinstance(carrier, Node):  # a norm that insists on its rank refuses other inputs, and the layer may not
            self.assumed.setdefault(carrier, layer.rank)
        return None

    def _why_alone(self, norm: Norm) -> Reason:
        beside = submodule(self._module, str(norm.input.target)) if norm.input.op == "call_module" else None
        layers = (nn.Linear, nn.modules.conv._ConvNd)
        if isinstance(beside, layers) and affine_of(self._module, norm.input) is None:
            return Reason.OPAQUE_MODULE
        return Reason.NORM_ALONE

    def _decline(self, node: Node, reason: Reason, detail: str = "") -> None:
        self.declined.append(Declined(node=node.name, reason=reason, detail=detail))


def asks_only(user: Node) -> bool:
    """Whether a node asks a tensor only for what it has in common with it normalized: rank, sizes, dtype and device."""
    if user.op == "call_method":
        return user.target in _METHODS and set(user.all_input_nodes) == {user.args[0]}
    if user.target is getattr:
        return user.args[1] in _ATTRIBUTES
    return user.target is torch.ops.aten.sym_size.int


def place_of(node: Node) -> str:
    """Say where a node is: its name, the module's path, and the line of the model."""
    path = [str(node.target)] if node.op == "call_module" else []
    return ", ".join([node.name, *path, *([str(node.meta["source"])] if "source" in node.meta else [])])
