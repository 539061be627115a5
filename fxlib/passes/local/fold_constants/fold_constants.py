"""Compute once what every forward would compute alike."""

from __future__ import annotations

import math

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from typing_extensions import override

from fxlib.analysis.effects.model import Effects
from fxlib.analysis.effects.records_gradients import may_leave_gradients
from fxlib.analysis.effects.sharing import Escapes
from fxlib.passes.infra.base import Context, GraphPass, PassResult, register_pass
from fxlib.passes.infra.folded_values import hold, read, sweep
from fxlib.passes.local.fold_constants.constant_values import Constant, constants
from fxlib.reasons import Declined, Reason


@register_pass("fold_constants", preserves="bitwise", needs=frozenset({"weights", "eval_mode"}))
class FoldConstants(GraphPass):
    """Hold values that are computed from parameters, buffers and literals alone, instead of computing them each time.

    Values that are written to or returned are computed as before, and so are views of what the module holds, which cost
    nothing. The bits are those of this machine, where the module would compute them.
    """

    max_bytes: int = 64 << 20
    """Bytes of all values that are computed, together."""

    @override
    def run(self, module: GraphModule, context: Context) -> PassResult:
        if not may_leave_gradients(module):
            return PassResult(module, changes=0, declined=(Declined(node="graph", reason=Reason.MODE_BLOCKS),))
        effects = context.get(Effects)
        found, escapes = constants(module, effects, max_bytes=self.max_bytes), Escapes(effects)
        declined, changes = list(found.declined), 0
        for node, constant in found.of.items():
            if node.op == "get_attr" or all(user in found.of for user in node.users):
                continue
            if isinstance(constant.value, (bool, int, float)) and math.isfinite(constant.value):
                changes += _write_out(node, constant.value)
            elif isinstance(constant.value, torch.Tensor) and not constant.held:
                reason = escapes.hindrance(node)
                if reason is None:
                    _hold(module, node, constant)
                    changes += 1
                else:
                    declined.append(Declined(node=node.name, reason=reason))
        if changes:
            _erase_unused(module, found.of)
            sweep(module)
        return PassResult(module, changes=changes, declined=tuple(declined))


def _hold(module: GraphModule, node: Node, constant: Constant) -> None:
    name = hold(module, f"{node.name}.folded", constant.value)
    value = read(module, name, constant.sources, node)
    value.meta |= {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
    node.replace_all_uses_with(value)


def _write_out(node: Node, number: float) -> int:
    """Let users have the number itself; those that call a method of it need the node."""
    users = [user for user in node.users if user.op != "call_method" or user.args[0] is not node]
    for user in users:
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda each: number if each is node else each)
    return bool(users)


def _erase_unused(module: GraphModule, found: dict[Node, Constant]) -> None:
    """Take out what only served to compute what is held now. It had no effects, or it would be no constant."""
    for node in reversed(found):
        if not node.users:
            module.graph.erase_node(node)
